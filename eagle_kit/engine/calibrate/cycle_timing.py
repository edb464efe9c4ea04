"""Timing of cycles in an engine: the shapes, batch sizes and contexts that a table of costs is fitted to.

Requests of random tokens run in the engine itself, so that everything of a step counts: kernels, recordings,
the host's work. Their text accepts next to nothing, which costs what accepting would: shapes are fixed.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from eagle_kit.autotune.costs import Timing
from eagle_kit.autotune.policy import ShapePolicy
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.memory.engine_memory import NEED_LESS
from eagle_kit.engine.request import Request

SECONDS_OF_A_VISIT = 15.0
LEAST_ROUNDS = 2
MOST_ACCEPTED = 0.75
"""Part of a draft's steps that text which drafts well accepts."""


class Point(NamedTuple):
    """Batch size and context at which shapes are timed."""

    batch_size: int
    context: int


class Visit(NamedTuple):
    """Number of a pass over the points, and the point."""

    number: int
    point: Point


class Plan(NamedTuple):
    """What to time: ``shapes`` besides plain decoding at all ``points``, in ``num_passes`` over them of
    ``num_rounds`` turns (fewer where they take longer than ``seconds``) of ``num_cycles`` each. A
    machine that is slower for some minutes is so in one pass of several. Batch sizes of a context come in
    rising order: a shape that cannot pay at one is left out at those above. Passes are counted from
    ``first_pass``."""

    points: Sequence[Point]
    shapes: Sequence[SpecShape]
    num_rounds: int
    num_cycles: int
    num_passes: int = 1
    first_pass: int = 0
    seconds: float = SECONDS_OF_A_VISIT

    @property
    def passes(self) -> range:
        """Numbers of the passes."""
        return range(self.first_pass, self.first_pass + self.num_passes)

    @property
    def visits(self) -> list[Visit]:
        """What is timed one after another."""
        return [Visit(number, point) for number in self.passes for point in self.points]


def time_cycles(
    engine: Engine,
    plan: Plan,
    *,
    done: Mapping[Visit, list[Timing]] = MappingProxyType({}),
    on_visit: Callable[[Visit, list[Timing]], None] = lambda visit, timings: None,
) -> list[Timing]:
    """Time plain decoding and the plan's shapes at every point -> typical times. The engine's shapes and
    counters are as before.

    Args:
        done: visits that were made before.
        on_visit: called with the timings of each other visit.
    """
    found = dict(done)
    with _dictation(engine, [NO_SPECULATION, *plan.shapes]) as dictated:
        for visit in plan.visits:
            if visit in found:
                continue
            shapes = _worth_timing(engine, plan, visit.point, found)
            engine.use_graphs(visit.point)
            found[visit] = time_point(engine, dictated, visit.point, plan._replace(shapes=shapes))
            on_visit(visit, found[visit])
    points = [[found[Visit(number, point)] for number in plan.passes] for point in plan.points]
    return [timing for visits in points for timing in _joined(visits)]


def _worth_timing(
    engine: Engine, plan: Plan, point: Point, found: Mapping[Visit, list[Timing]]
) -> list[SpecShape]:
    """Shapes of a point: those of the first pass, where memory suffices for them and they may pay."""
    if before := found.get(Visit(plan.first_pass, point)):
        return [timing.shape for timing in before if timing.shape.steps]
    kept = [s for s in plan.shapes if point.batch_size * s.tokens <= engine.config.most_rows]
    return [shape for shape in kept if not _is_too_slow(shape, point, found)]


def _is_too_slow(shape: SpecShape, point: Point, found: Mapping[Visit, list[Timing]]) -> bool:
    """Return True if a smaller batch lost with a shape even if most of its drafts were accepted."""
    for (_, other), (plain, *rest) in found.items():
        seconds = next((timing.seconds for timing in rest if timing.shape == shape), 0.0)
        if other.batch_size < point.batch_size and seconds > plain.seconds * (
            1 + MOST_ACCEPTED * shape.steps
        ):
            return True
    return False


def _joined(visits: Sequence[Sequence[Timing]]) -> list[Timing]:
    """Typical times of a point from those of all passes."""
    seconds = _typical(np.array([[timing.seconds for timing in visit] for visit in visits]))
    contexts = np.array([[timing.context for timing in visit] for visit in visits]).mean(0).round()
    return [
        first._replace(context=int(context), seconds=each)
        for first, context, each in zip(visits[0], contexts, seconds, strict=True)
    ]


@contextmanager
def _dictation(engine: Engine, shapes: Sequence[SpecShape]) -> Iterator[ShapePolicy]:
    """Have an engine use the shapes that it is told."""
    before = engine.shapes
    totals = engine.totals
    dictated = ShapePolicy({1: shapes})
    engine.use_shape(dictated)
    engine.totals = type(totals)()
    try:
        yield dictated
    finally:
        engine.use_shape(before)
        engine.use_graphs(None)
        engine.forget_prefixes()  # random prompts are of no use to anyone
        engine.totals = totals


def time_point(engine: Engine, dictated: ShapePolicy, point: Point, plan: Plan) -> list[Timing]:
    """Run cycles at one point -> typical times of plain decoding and of the plan's shapes, in this order.

    Args:
        dictated: the engine's policy, which is told the shape of each cycle.
        plan: its points and passes are not read.
    """
    batch = _Batch(engine, dictated, point)
    begun = time.perf_counter()
    shapes = (NO_SPECULATION, *plan.shapes)
    rounds: list[list[tuple[float, int]]] = []
    try:
        while len(rounds) < plan.num_rounds:
            if len(rounds) >= LEAST_ROUNDS and time.perf_counter() - begun > plan.seconds:
                break
            batch.begin()
            turns = [(0.0, 0)] * len(shapes)
            for i in np.roll(np.arange(len(shapes)), len(rounds)):
                for _ in range(1 + engine.config.lag):  # the draft catches up with what it has missed
                    batch.step(shapes[i])
                context = batch.context
                turns[i] = statistics.median(batch.turn(shapes[i], plan.num_cycles)), context
            rounds.append(turns)
    finally:
        batch.end()
    seconds, contexts = np.moveaxis(np.array(rounds), 2, 0)
    return [
        Timing(point.batch_size, shape, round(context), each)
        for shape, context, each in zip(shapes, contexts.mean(0), _typical(seconds), strict=True)
    ]


def _typical(seconds: np.ndarray) -> list[float]:
    """Typical times ``[shapes]`` of ``[rounds, shapes]``, where whole rounds and single turns may be slow:
    the median over rounds of each shape's time beside those of its round."""
    logs = np.log(seconds)
    rounds = logs.mean(1, keepdims=True)
    typical: list[float] = np.exp(np.median(logs - rounds, axis=0) + np.median(rounds)).tolist()
    return typical


def prefill(engine: Engine, requests: Sequence[Request]) -> None:
    """Add requests and run the engine until each has its first token. Cycles of those that have it already
    make no graphs: batches that small may not come again.

    Raises:
        UserError: the target's logits are not finite, or a GPU has too little memory.
    """
    before = engine.graphs_in_use
    engine.use_graphs("off")
    try:
        for request in requests:
            engine.add_request(request)
        while any(not request.token_ids and request.finish_reason is None for request in requests):
            engine.step()
    finally:
        engine.use_graphs(before)
    for request in requests:
        if request.response.failure is not None:
            raise request.response.failure
    if any(request.finish_reason == "error" for request in requests):
        raise UserError(
            "The target's logits are not finite, so its cycles cannot be timed.",
            "Check its weights, and that its dtype holds its states.",
        )


class _Batch:
    """Requests of random tokens at a point. Their lengths differ, as those of requests do."""

    def __init__(self, engine: Engine, dictated: ShapePolicy, point: Point) -> None:
        self._engine = engine
        self._dictated = dictated
        self._requests: list[Request] = []
        rng = random.Random(0)
        top = engine.target.config.vocab_size
        count = point.batch_size
        self._prompts = [
            [rng.randrange(top) for _ in range(max(2, round(point.context * (0.5 + (i + 0.5) / count))))]
            for i in range(count)
        ]

    @property
    def context(self) -> int:
        """Mean number of tokens."""
        return round(statistics.mean(request.num_tokens for request in self._requests))

    def begin(self) -> None:
        """Put the requests into the engine, as new; the prefix cache has their prompts by then."""
        self.end()
        params = SamplingParams(max_tokens=self._engine.config.max_context, ignore_eos=True, seed=0)
        self._dictated.shape = NO_SPECULATION
        self._requests = [Request(i, ids, params, group=0) for i, ids in enumerate(self._prompts)]
        for request in self._requests:
            self._engine.check_request(request)
        prefill(self._engine, self._requests)

    def step(self, shape: SpecShape) -> float:
        """Run a cycle of all requests, and return the seconds that it took.

        Raises:
            UserError: a GPU has too little memory for the whole cycle.
        """
        if any(request.finish_reason for request in self._requests):  # the context is short
            self.begin()
        self._dictated.shape = shape
        totals = self._engine.totals
        num_in_parts = totals.num_steps_in_parts
        begun = time.perf_counter()
        self._engine.step()
        seconds = time.perf_counter() - begun
        if totals.num_steps_in_parts != num_in_parts:
            raise UserError(f"The GPU has too little memory for a cycle of shape {shape}.", NEED_LESS)
        return seconds

    def turn(self, shape: SpecShape, num_cycles: int) -> Iterator[float]:
        """Run ``num_cycles`` cycles besides those that make a graph -> seconds of each."""
        graphs = self._engine.runner.graphs
        num_done = 0
        while num_done < num_cycles:
            before = graphs.num_warm_ups
            seconds = self.step(shape)
            if graphs.num_warm_ups == before:
                num_done += 1
                yield seconds

    def end(self) -> None:
        """Take the requests out of the engine."""
        for request in self._requests:
            self._engine.abort(request)
        self._engine.drain()
        self._requests = []
