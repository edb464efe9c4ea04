"""Sampling parameters of a request."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, Self

from eagle_kit.core.errors import UserError, shown
from eagle_kit.core.structured_outputs import Grammar, StructuredOutputs, ThinkingBudget

MAX_LOGPROBS = 20
"""Largest number of alternatives per token that a request may ask for (OpenAI's limit)."""
MAX_BAD_WORDS = 128
"""Most words that a request may forbid."""
MAX_BAD_WORD_CHARS = 256
"""Most characters of a forbidden word."""
MAX_SALT_CHARS = 256
"""Most characters of a cache salt; the base64 of 256 random bits has 43."""

WHOLE_NUMBERS = (
    "max_tokens",
    "min_tokens",
    "top_k",
    "n",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "speculative_depth",
)
OPTIONAL = ("seed", "logprobs", "prompt_logprobs", "speculative_depth")
"""Whole numbers that may be None."""
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
CONSTRAINT = "Give structured_outputs=StructuredOutputs(json=...), or with regex, choice or grammar."
WHOLE_TEXT = "Decode token_ids with llm.tokenizer."
REMEDIES = {
    "add_generation_prompt": "Leave it out: chat opens the response; generate continues a text as it stands.",
    "best_of": "Give n and logprobs=0, and choose among output.outputs by cumulative_logprob.",
    "chat_template": "Give it to LLM, as chat_template=FILE.",
    "continue_final_message": "Give the rendered conversation to generate.",
    "ebnf": CONSTRAINT,
    "guided_decoding": CONSTRAINT,
    "json_schema": CONSTRAINT,
    "logits_processors": "Give logit_bias, allowed_token_ids, bad_words or structured_outputs.",
    "lora_request": "Merge the adapter into the target's weights.",
    "max_new_tokens": "Give max_tokens.",
    "thinking_token_budget": "Send it to a server, which knows the form of the reasoning.",
    "regex": CONSTRAINT,
    "skip_special_tokens": WHOLE_TEXT,
    "truncate_prompt_tokens": "Cut the token ids of the prompt, and give those.",
    "use_beam_search": "Give n and a temperature.",
    "use_tqdm": "Give progress=True, or leave it out.",
}
"""What to write in place of a parameter that vLLM or SGLang has and we have not."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of the responses to one prompt. The names are vLLM's; the default is greedy
    decoding of up to 256 tokens.

    Attributes:
        max_tokens: maximum number of tokens of a response; 0 computes the prompt alone, for its
            ``prompt_logprobs``.
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all, as -1 does, which becomes 0.
        top_p: then keep the smallest set of most likely tokens whose probabilities sum to at least this.
        min_p: then keep tokens whose probability is at least this share of the largest one.
        seed: seed of the response's random numbers, which do not depend on the batch; None draws a seed when
            the request arrives. With ``n`` responses, response i has the seed ``seed + i``.
        repetition_penalty: > 1 divides positive and multiplies negative logits of tokens that are in the
            prompt or the response (arXiv 1909.05858).
        frequency_penalty: subtracted from a token's logit for every occurrence in the response.
        presence_penalty: subtracted from the logit of every token that is in the response.
        logit_bias: token id, also as a text of digits -> number added to its logit.
        allowed_token_ids: tokens that the response may have, at least one; None allows all. The response ends
            by itself only if one of the model's end tokens is among them. Not together with a constraint.
        bad_words: up to 128 words of up to 256 characters that the response must not have. Each word's
            tokens, with and without a leading blank, are forbidden directly after one another within the
            response.
        logprobs: number of most likely alternatives to report besides the sampled token, 0 to 20; None
            reports nothing. Log-probabilities are a log-softmax of the target's raw logits, before
            temperature, filters, penalties and biases.
        stop: text, or list of texts, that ends the response and is cut from its text.
        stop_token_ids: tokens that end the response besides the model's own end tokens; the stop token is
            kept.
        ignore_eos: continue after the model's own end tokens.
        min_tokens: tokens of the response before one of the model's end tokens, with ``ignore_eos`` too, or
            of ``stop_token_ids``. Until then no stop text ends it. A grammar that allows nothing else ends
            the response before.
        include_stop_str_in_output: the text of the response has the stop text, or the token, that ended it.
        grammar: constraint that the response must match, as the engine follows it; ``structured_outputs`` is
            the form for callers.
        thinking_budget: most tokens of the response's reasoning, with its bounds, as the engine follows it;
            None has no limit.
        cache_salt: text of 1 to 256 characters. Requests share cached pages, n-grams and compiled grammars
            only with requests of the same salt; requests without a salt share theirs. It does not change
            the response's distribution.
        n: number of responses to the prompt, at least 1.
        prompt_logprobs: number of most likely alternatives to report for every token of the prompt, 0 to 20;
            None reports nothing. The prompt is computed whole, without cached pages.
        speculative_depth: the greatest depth of a draft that may be accepted in a cycle; 0 decodes plainly,
            also among requests with drafts; None has no limit. It does not change the response.
        structured_outputs: constraint that the response must match, or a mapping of its attributes such as
            ``{"json": schema}``.

    Raises:
        UserError: a parameter is out of range, of another type, or not known.
    """

    def __new__(cls, *_values: Any, **named: Any) -> Self:
        """Raise UserError for names that are no parameters; the dataclass would raise TypeError."""
        known = [each.name for each in fields(cls)]
        for name in named:
            if name not in known:
                default = f"Use {', '.join(known)}."
                raise UserError(f"There is no sampling parameter {name}.", REMEDIES.get(name, default))
        return super().__new__(cls)

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
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logprobs: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    grammar: Grammar | None = None
    thinking_budget: ThinkingBudget | None = None
    cache_salt: str | None = None
    n: int = 1
    prompt_logprobs: int | None = None
    speculative_depth: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        self._normalise()

        # Ranges of numbers.
        for name, low, high in (
            ("max_tokens", 0, math.inf),
            ("min_tokens", 0, math.inf),
            ("temperature", 0.0, math.inf),
            ("top_k", 0, math.inf),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.0, math.inf),
            ("frequency_penalty", -2.0, 2.0),
            ("presence_penalty", -2.0, 2.0),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
            ("speculative_depth", 0, math.inf),
            ("n", 1, math.inf),
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

        if self.min_tokens > self.max_tokens:
            raise UserError(
                f"min_tokens is {self.min_tokens}, and max_tokens is {self.max_tokens}.", "Lower min_tokens."
            )

        # Biases and constraints on tokens.
        if not all(math.isfinite(bias) for bias in self.logit_bias.values()):
            raise UserError("logit_bias has a number that is not finite.", "Give finite numbers.")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise UserError("allowed_token_ids is empty.", "Leave it out, or name a token.")
        if self.allowed_token_ids is not None and self.constraint is not None:
            raise UserError("allowed_token_ids and a grammar exclude each other.", "Leave out one of them.")

        # Texts.
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise UserError(
                f"bad_words has {len(self.bad_words)} words, {MAX_BAD_WORDS} are allowed.", "Give fewer."
            )
        for word in self.bad_words:
            if not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
                raise UserError(
                    f"bad_words has a word of {len(word)} characters, 1 to {MAX_BAD_WORD_CHARS} are allowed.",
                    "Leave it out, or give another one.",
                )
        if any(not text for text in self.stop):
            raise UserError("A stop text is empty.", "Leave it out, or give some text.")
        if self.cache_salt is not None:
            self._check_salt(self.cache_salt)

    def _normalise(self) -> None:
        """Replace sequences by tuples, a single text by a tuple of one, and a mapping by the constraint."""
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _texts(getattr(self, name), name))
        for name in ("stop_token_ids", "allowed_token_ids"):
            object.__setattr__(self, name, _token_ids(getattr(self, name), name))
        self._check_types()
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise UserError(
                f"grammar is {shown(self.grammar)}, which is no Grammar.",
                CONSTRAINT,
            )
        if self.structured_outputs is None:
            return
        object.__setattr__(self, "structured_outputs", StructuredOutputs.read(self.structured_outputs))
        if self.grammar is not None:
            raise UserError("grammar and structured_outputs exclude each other.", "Leave out one of them.")

    def _check_types(self) -> None:
        """Raise UserError for a number or a switch of another type. Whole numbers become ``int``."""
        for name in WHOLE_NUMBERS:
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise UserError(f"{name} is {shown(value)}.", "Give a whole number.")
            object.__setattr__(self, name, operator.index(value))
        for name in NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise UserError(f"{name} is {shown(value)}.", "Give a number.")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise UserError(f"{name} is {shown(value)}.", "Give True or False.")

    @property
    def constraint(self) -> Grammar | None:
        """Grammar that the response must match; None if there is no constraint."""
        if self.structured_outputs is not None:
            return self.structured_outputs.as_grammar()
        return self.grammar

    def of_response(self, index: int) -> "SamplingParams":
        """Parameters of response ``index`` of the ``n``; the first one alone computes ``prompt_logprobs``."""
        seed = None if self.seed is None else successor(self.seed, index)
        prompt_logprobs = self.prompt_logprobs if index == 0 else None
        return replace(self, n=1, seed=seed, prompt_logprobs=prompt_logprobs)

    @staticmethod
    def _check_salt(salt: object) -> None:
        remedy = f"Give a text of 1 to {MAX_SALT_CHARS} characters, or leave it out."
        if not isinstance(salt, str):
            raise UserError(f"cache_salt is {shown(salt)}, which is no text.", remedy)
        if not 1 <= len(salt) <= MAX_SALT_CHARS:
            raise UserError(f"cache_salt has {len(salt)} characters.", remedy)

    @property
    def is_greedy(self) -> bool:
        """True if every token is the most likely one."""
        return self.temperature == 0.0

    @property
    def has_bias(self) -> bool:
        """True if numbers that do not depend on other tokens are added to logits."""
        return bool(self.logit_bias) or self.allowed_token_ids is not None

    @property
    def has_penalties(self) -> bool:
        """True if logits depend on the tokens before them."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


def successor(seed: int, index: int) -> int:
    """Seed of response ``index``, wrapped into 64 bits, so that the largest seed has successors."""
    return (seed + index + 2**63) % 2**64 - 2**63


def _texts(given: Any, name: str) -> tuple[str, ...]:
    """A text or a list of texts as a tuple; None as an empty tuple. Raises UserError."""
    if given is None:
        return ()
    if isinstance(given, str):
        return (given,)
    texts = tuple(given) if isinstance(given, Iterable) else (given,)
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"{name} has {shown(text)}, which is no text.", "Give a text or a list of texts.")
    return texts


def _biases(given: Any) -> dict[int, float]:
    """Token ids with the numbers added to their logits; None as an empty mapping. Raises UserError."""
    if given is None:
        return {}
    remedy = "Give a mapping of token ids to numbers."
    if not isinstance(given, Mapping):
        raise UserError(f"logit_bias is {shown(given)}.", remedy)
    biases = {}
    for token, bias in given.items():
        is_text = isinstance(token, str) and token.isdecimal()
        if not is_text and (isinstance(token, bool) or not hasattr(token, "__index__")):
            raise UserError(f"logit_bias has the key {shown(token)}, which is no token id.", remedy)
        if isinstance(bias, bool) or not isinstance(bias, Real):
            raise UserError(f"logit_bias has {shown(bias)}, which is no number.", remedy)
        biases[int(token)] = float(bias)
    return biases


def _token_ids(given: Any, name: str) -> tuple[int, ...] | None:
    """Token ids as a tuple. None stays as ``allowed_token_ids``, and is an empty tuple otherwise. Raises
    UserError."""
    if given is None:
        return None if name == "allowed_token_ids" else ()
    remedy = "Give a list of token ids."
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UserError(f"{name} is {shown(given)}.", remedy)
    found = []
    for token in given:
        try:
            found.append(operator.index(token))
        except TypeError:
            raise UserError(f"{name} has {shown(token)}, which is no whole number.", remedy) from None
    return tuple(found)
