"""Kinds of batches: what a cycle computes beside the target's choice, by which it takes its graph.

A graph is captured for every kind, batch size and shape, so kinds are few. Each level of sampling contains
the ones before it: parameters that a request did not ask for are given values that change nothing. Batches
of which a request wants log-probabilities or has a grammar have the first and the last level only.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Literal, NamedTuple

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.request import Request


class Level(IntEnum):
    """Sampling of a batch: the most likely tokens, draws, draws with filters (top-k, top-p, min-p), and these
    of logits with penalties and biases."""

    GREEDY = 0
    DRAWN = 1
    FILTERED = 2
    ADJUSTED = 3


class BatchKind(NamedTuple):
    """Level of sampling, and whether log-probabilities are computed and grammars mask the logits."""

    level: Level
    has_logprobs: bool = False
    has_grammar: bool = False


USUAL_KINDS = tuple(map(BatchKind, Level))
LOGPROBS_KINDS = tuple(BatchKind(level, has_logprobs=True) for level in (Level.GREEDY, Level.ADJUSTED))
GRAMMAR_KINDS = tuple(kind._replace(has_grammar=True) for kind in LOGPROBS_KINDS)
"""With a grammar log-probabilities are always computed, and sent to those who asked for them."""


def kinds(which: Literal["all", "usual"], *, can_have_grammars: bool) -> Iterator[BatchKind]:
    """Iterate over the kinds of batches that are to be prepared for."""
    yield from USUAL_KINDS
    if which == "all":
        yield from LOGPROBS_KINDS
        yield from GRAMMAR_KINDS if can_have_grammars else ()


def kind_of(requests: Sequence[Request]) -> BatchKind:
    """Kind of a batch."""
    level = level_of([request.params for request in requests])
    has_grammar = any(request.reply.match is not None for request in requests)
    has_logprobs = has_grammar or any(request.params.logprobs is not None for request in requests)
    if has_logprobs and level != Level.GREEDY:
        level = Level.ADJUSTED
    return BatchKind(level, has_logprobs, has_grammar)


def level_of(params: Sequence[SamplingParams]) -> Level:
    """Least level that has all that is asked for."""
    if any(map(adjusts_logits, params)):
        return Level.ADJUSTED
    if all(each.is_greedy for each in params):
        return Level.GREEDY
    filtered = any(each.top_k or each.top_p != 1.0 or each.min_p for each in params)
    return Level.FILTERED if filtered else Level.DRAWN


def adjusts_logits(params: SamplingParams) -> bool:
    """Return True if penalties or biases change a request's logits before they are filtered."""
    return params.has_penalties or params.has_bias
