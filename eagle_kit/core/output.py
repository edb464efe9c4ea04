"""Finished reply of a request."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from eagle_kit.core.shape import SpecShape
from eagle_kit.core.stats import SpecStats

FinishReason = Literal["stop", "length", "context", "abort", "error"]
NOT_FINITE = "The target's logits are not finite (NaN or infinity). Check its weights and its dtype."
"""Message of the finish reason ``"error"``."""


class TokenLogprobs(NamedTuple):
    """Log-probability of one emitted token under the target, and its most likely alternatives ``top`` as
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
            context is full), ``"abort"``, or ``"error"`` (the target's logits are not finite; the reply ends
            before them).
        stats: acceptance of this reply.
        shapes: cycles in each shape.
        logprobs: one entry per token, empty unless requested.
        num_cached_tokens: prompt tokens found in the prefix cache.
        prefill_s: seconds from admission to the first token.
        decode_s: seconds from the first token to the last, during which other requests of the batch decode
            too.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stats: SpecStats = field(default_factory=SpecStats)
    shapes: Counter[SpecShape] = field(default_factory=Counter)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
