"""What a user asks of the engine and what comes back."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from eagle_kit.core.errors import UserError
from eagle_kit.core.stats import SpecStats

MAX_LOGPROBS = 20
"""Most alternatives per token that can be asked for, OpenAI's limit."""

FinishReason = Literal["stop", "length", "context", "abort"]


class Grammar(NamedTuple):
    """What a reply must match: any JSON object, a JSON schema (as text) or a regular expression."""

    kind: Literal["json_object", "json_schema", "regex"]
    text: str = ""


@dataclass(frozen=True)
class SamplingParams:
    """How one reply is decoded.

    Attributes:
        max_tokens: most tokens of the reply, >= 1.
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: then keep the smallest set of most likely tokens whose probabilities sum to at least this.
        min_p: then keep tokens at least this share as likely as the most likely one.
        seed: of this reply's draws, whatever it is batched with; None draws one when the request arrives.
        repetition_penalty: > 1 divides positive and multiplies negative logits of tokens that are in the
            prompt or the reply (arXiv 1909.05858).
        frequency_penalty: subtracted from a token's logit per occurrence in the reply.
        presence_penalty: subtracted from the logit of a token that is in the reply.
        logit_bias: added to the logits of single tokens.
        logprobs: None for none, or how many most likely alternatives to report besides the chosen token,
            0 to 20. They are log-softmaxes of the target's logits as they are, before anything above.
        stop: texts that end the reply; they are left out of it.
        stop_token_ids: tokens that end the reply besides the model's own end tokens; the stop token is kept.
        ignore_eos: go on after the model's own end tokens.
        grammar: what the reply must match.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_tokens", 1, math.inf),
            ("temperature", 0.0, math.inf),
            ("top_k", 0, math.inf),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.0, math.inf),
            ("frequency_penalty", -2.0, 2.0),
            ("presence_penalty", -2.0, 2.0),
            ("logprobs", 0, MAX_LOGPROBS),
        ):
            value = getattr(self, name)
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                bound = f"at least {low}" if high == math.inf else f"from {low} to {high}"
                raise UserError(f"{name} is {value}.", f"Give a number {bound}.")
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0.0:
                raise UserError(f"{name} is 0.", "Give a number above 0; 1 leaves the distribution as it is.")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed}.", "Give a 64-bit whole number.")
        if not all(math.isfinite(bias) for bias in self.logit_bias.values()):
            raise UserError("logit_bias has a number that is not finite.", "Give finite numbers.")
        if any(not text for text in self.stop):
            raise UserError("A stop text is empty.", "Leave it out, or give some text.")

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


class TokenLogprobs(NamedTuple):
    """Of one emitted token: its log-probability under the target, and the most likely tokens ``top`` as
    (token id, log-probability), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class RequestOutput:
    """One finished reply.

    Attributes:
        prompt_ids: the prompt as tokens.
        token_ids: the reply, its stop token included.
        text: the reply decoded, special tokens left out, cut before a stop text.
        finish_reason: ``"stop"`` (a stop token or text), ``"length"`` (max_tokens), ``"context"`` (the
            context is full) or ``"abort"``.
        stats: acceptance of this reply.
        logprobs: one entry per token when they were asked for.
        num_cached_tokens: prompt tokens that the prefix cache held.
        prefill_s: seconds from admission to the first token.
        decode_s: seconds from the first token to the last; shared by the batch it decoded in.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stats: SpecStats = field(default_factory=SpecStats)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
