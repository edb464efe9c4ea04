"""Kinds of batches: level of sampling, log-probabilities and grammars, which choose the graph of a cycle.

A graph is captured for every kind, batch size and shape, so there are few kinds. Each level of sampling
contains the levels before it: a parameter that a request did not set gets a value that changes nothing.
Batches with log-probabilities or grammars have the first or the last level.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Literal, NamedTuple

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.request import Request


class Level(IntEnum):
    """Level of sampling of a batch."""

    GREEDY = 0
    """The most likely tokens."""
    SAMPLED = 1
    """Tokens drawn at a temperature."""
    FILTERED = 2
    """Tokens drawn after top-k, top-p and min-p."""
    ADJUSTED = 3
    """The same, from logits with penalties and biases."""


LEVEL_NAMES = ("greedy", "sampled", "filtered", "penalties and biases")
"""Names of the levels for people."""


class BatchKind(NamedTuple):
    """What a batch computes besides the target's logits.

    Attributes:
        level: level of sampling.
        has_logprobs: True if log-probabilities are computed.
        has_grammar: True if grammars mask the logits.
    """

    level: Level
    has_logprobs: bool = False
    has_grammar: bool = False

    @property
    def name(self) -> str:
        """The kind in words."""
        level = LEVEL_NAMES[self.level]
        if self.has_grammar:
            return f"{level} with grammars"
        return f"{level} with logprobs" if self.has_logprobs else level

    def containing(self) -> Iterator["BatchKind"]:
        """Iterate over the kinds that compute the same for a batch of this kind: itself, then those of higher
        levels."""
        for level in Level:
            if level >= self.level:
                yield self._replace(level=level)

    def computes_all_of(self, other: "BatchKind") -> bool:
        """Return whether this kind computes at least what ``other`` computes."""
        computes_level = self.level >= other.level
        computes_logprobs = self.has_logprobs or not other.has_logprobs
        computes_masks = self.has_grammar or not other.has_grammar
        return computes_level and computes_logprobs and computes_masks


USUAL_KINDS = tuple(map(BatchKind, Level))
LOGPROBS_KINDS = tuple(BatchKind(level, has_logprobs=True) for level in (Level.GREEDY, Level.ADJUSTED))
GRAMMAR_KINDS = tuple(kind._replace(has_grammar=True) for kind in LOGPROBS_KINDS)
"""Batches with a grammar always compute log-probabilities; requests that did not ask for them get none."""


def kinds(which: Literal["all", "usual"], *, can_have_grammars: bool) -> Iterator[BatchKind]:
    """Iterate over the kinds of batches that a warm-up prepares."""
    yield from USUAL_KINDS
    if which == "all":
        yield from LOGPROBS_KINDS
        yield from GRAMMAR_KINDS if can_have_grammars else ()


def kind_of(requests: Sequence[Request]) -> BatchKind:
    """Return the kind of a batch."""
    level = level_of([request.params for request in requests])
    has_grammar = any(request.response.match is not None for request in requests)
    has_logprobs = has_grammar or any(request.params.logprobs is not None for request in requests)
    if has_logprobs and level != Level.GREEDY:
        level = Level.ADJUSTED
    return BatchKind(level, has_logprobs, has_grammar)


def level_of(params: Sequence[SamplingParams]) -> Level:
    """Return the lowest level that has all parameters that are set."""
    if any(map(adjusts_logits, params)):
        return Level.ADJUSTED
    if all(each.is_greedy for each in params):
        return Level.GREEDY
    filtered = any(each.top_k or each.top_p != 1.0 or each.min_p for each in params)
    return Level.FILTERED if filtered else Level.SAMPLED


def adjusts_logits(params: SamplingParams) -> bool:
    """Return True if penalties or biases change a request's logits before they are filtered."""
    return params.has_penalties or params.has_bias
