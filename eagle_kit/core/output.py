"""Finished response of a request."""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from eagle_kit.core.shape import SpecShape
from eagle_kit.core.stats import SpecStats

FinishReason = Literal["stop", "length", "context", "abort", "error"]
NOT_FINITE = "The target's logits are not finite (NaN or infinity). Check its weights and its dtype."
"""Message of the finish reason ``"error"``."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one emitted token under the target.

    Attributes:
        logprob: of the token.
        top: the most likely alternatives as (token id, log-probability), best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class ResponseLogprobs:
    """Log-probabilities of the tokens of a response: a sequence of :class:`TokenLogprobs`.

    They are kept in arrays, and an entry is made when it is read. All tokens have the same number k of
    alternatives; a token takes 4 + 8 k bytes.
    """

    def __init__(self) -> None:
        self._num_top = 0
        self._chosen = array("f")
        self._top_ids = array("i")
        self._top_values = array("f")

    def append(self, logprob: float, top_ids: Sequence[int], top_values: Sequence[float]) -> None:
        """Append a token's fp32 log-probability, and the ids and log-probabilities of its alternatives."""
        if not self:
            self._num_top = len(top_ids)
        assert len(top_ids) == len(top_values) == self._num_top
        self._chosen.append(logprob)
        self._top_ids.extend(top_ids)
        self._top_values.extend(top_values)

    def extend(self, later: "ResponseLogprobs") -> None:
        """Append the tokens of ``later``."""
        if not later:
            return
        if not self:
            self._num_top = later._num_top
        assert later._num_top == self._num_top
        self._chosen.extend(later._chosen)
        self._top_ids.extend(later._top_ids)
        self._top_values.extend(later._top_values)

    def part(self, start: int, stop: int) -> "ResponseLogprobs":
        """Copy the tokens from ``start`` to ``stop``."""
        num_top = self._num_top
        part = ResponseLogprobs()
        part._num_top = num_top
        part._chosen = self._chosen[start:stop]
        part._top_ids = self._top_ids[start * num_top : stop * num_top]
        part._top_values = self._top_values[start * num_top : stop * num_top]
        return part

    def cut(self, count: int) -> None:
        """Keep the first ``count`` tokens."""
        del self._chosen[count:]
        del self._top_ids[count * self._num_top :]
        del self._top_values[count * self._num_top :]

    def chosen(self, index: int) -> float:
        """Log-probability of token ``index``."""
        return self._chosen[index]

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> TokenLogprobs:
        logprob = self._chosen[index]
        start = range(len(self))[index] * self._num_top
        ids = self._top_ids[start : start + self._num_top]
        values = self._top_values[start : start + self._num_top]
        return TokenLogprobs(logprob, tuple(zip(ids, values, strict=True)))

    def __iter__(self) -> Iterator[TokenLogprobs]:
        for index in range(len(self)):
            yield self[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ResponseLogprobs):
            return NotImplemented
        return list(self) == list(other)


class PromptLogprobs:
    """Log-probabilities of the tokens of a prompt behind its first, which has none before it.

    Attributes:
        entries: entry i is that of token i + 1.
        ranks: of each entry, how many tokens are at least as likely as its token; 1 is the most likely.
    """

    def __init__(self) -> None:
        self.entries = ResponseLogprobs()
        self.ranks = array("i")

    def append(self, logprob: float, rank: int, top_ids: Sequence[int], top_values: Sequence[float]) -> None:
        """Append a token's fp32 log-probability and rank, and its most likely alternatives."""
        self.entries.append(logprob, top_ids, top_values)
        self.ranks.append(rank)

    def of_all_tokens(self) -> list[TokenLogprobs | None]:
        """One entry per token of the prompt, None for the first one."""
        return [None, *self.entries]


@dataclass
class RequestOutput:
    """Finished response to a prompt, and, with ``n`` > 1, the other responses to it.

    Attributes:
        prompt_ids: the prompt as tokens.
        token_ids: the response, its stop token included.
        text: the response decoded, special tokens left out, cut before a stop text.
        finish_reason: ``"stop"`` (a stop token or text), ``"length"`` (max_tokens), ``"context"`` (the
            context is full), ``"abort"``, or ``"error"`` (the target's logits are not finite; the response
            ends before them).
        stats: acceptance of this response.
        shapes: cycles in each shape.
        logprobs: one entry per token, empty unless requested.
        num_cached_tokens: prompt tokens found in the prefix cache.
        prefill_s: seconds from admission to the first token.
        decode_s: seconds from the first token to the last, during which other requests of the batch decode
            too.
        index: number of this response among the ``n``.
        others: the other responses to the prompt, in order; only the first response has them.
        prompt_logprobs: one entry per token of the prompt, None for the first one; None unless requested.
        prompt: the text that was continued; None where token ids or a conversation were given.
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
    index: int = 0
    others: "list[RequestOutput]" = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    prompt: str | None = None

    @property
    def outputs(self) -> "list[RequestOutput]":
        """All responses to the prompt, this one first, under vLLM's name."""
        return [self, *self.others]

    @property
    def prompt_token_ids(self) -> list[int]:
        """:attr:`prompt_ids` under vLLM's name."""
        return self.prompt_ids

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of the whole response; None unless ``logprobs`` were requested."""
        if not self.logprobs:
            return None
        return sum(entry.logprob for entry in self.logprobs)


@dataclass(frozen=True)
class ResponseDelta:
    """Addition to a response that is being streamed.

    Attributes:
        prompt_index: number of the prompt in the call.
        index: number of the response among the ``n`` of its prompt.
        text: new text; special tokens and stop texts are left out.
        token_ids: new tokens.
        finish_reason: of the last delta of a response, as in :class:`RequestOutput`; None before.
    """

    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
