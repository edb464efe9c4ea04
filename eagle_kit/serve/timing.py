"""Timing of cycles in an engine: shapes, batch sizes and contexts that a table of costs is fitted to.

Requests of random tokens run in the engine itself, so that everything of a step counts: kernels, recordings,
the host's work. Their text accepts next to nothing, which costs what accepting would: shapes are fixed.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.serve.engine import Engine
from eagle_kit.serve.request import Request
from eagle_kit.tuning.acceptance import Acceptance
from eagle_kit.tuning.costs import Timing
from eagle_kit.tuning.policy import Ease, ShapePolicy

TIMED_SHAPES = tuple(
    map(SpecShape.parse, ("1,1,2", "2,1,3", "4,1,5", "7,1,8", "3,2,6", "3,4,8", "5,4,16", "5,8,32"))
)
CONTEXTS = 64, 1024
WARM_UPS = {1: 30}
"""Cycles before those that are timed: a request alone has its cycles recorded after some tens. Default 2."""
NUM_CYCLES = 7


class Point(NamedTuple):
    """Batch size and context at which all shapes are timed."""

    batch_size: int
    context: int


def points_of(engine: Engine) -> list[Point]:
    """List the points worth timing in an engine."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= engine.config.max_batch_size]
    longest = engine.config.max_context - 512
    return [
        Point(size, context) for size in sizes for context in CONTEXTS if context <= max(longest, CONTEXTS[0])
    ]


def time_cycles(
    engine: Engine,
    points: Sequence[Point],
    shapes: Sequence[SpecShape] = TIMED_SHAPES,
    *,
    on_point: Callable[[list[Timing]], None] = lambda timings: None,
) -> list[Timing]:
    """Time plain decoding and ``shapes`` at every point -> medians.

    Args:
        on_point: called with the timings of each point.
    """
    shapes = [NO_SPECULATION, *shapes]
    dictated = _Dictated(shapes)
    before = engine.shapes
    engine.use_shape(dictated)
    found: list[Timing] = []
    try:
        for point in points:
            timings = _time_point(engine, dictated, point, shapes)
            found += timings
            on_point(timings)
    finally:
        engine.use_shape(before)
    return found


def _time_point(
    engine: Engine, dictated: "_Dictated", point: Point, shapes: Sequence[SpecShape]
) -> list[Timing]:
    rng, top = random.Random(0), engine.target.config.vocab_size
    params = SamplingParams(max_tokens=engine.config.max_context, ignore_eos=True)
    requests = [
        Request(-1 - i, [rng.randrange(top) for _ in range(max(2, point.context - 5 * i))], params)
        for i in range(point.batch_size)  # of different lengths, as requests are
    ]
    for request in requests:
        engine.add_request(request)
    try:
        dictated.shape = NO_SPECULATION
        while any(not request.token_ids for request in requests):
            engine.step()
        timings = []
        for shape in shapes:
            dictated.shape = shape
            for _ in range(WARM_UPS.get(point.batch_size, 2)):
                engine.step()
            seconds = []
            for _ in range(NUM_CYCLES):
                begun = time.perf_counter()
                engine.step()
                seconds.append(time.perf_counter() - begun)
            context = statistics.mean(request.num_tokens for request in requests)
            timings.append(Timing(point.batch_size, shape, round(context), statistics.median(seconds)))
        return timings
    finally:
        for request in requests:
            engine.abort(request)
        engine.drain()


class _Dictated(ShapePolicy):
    """Policy that is told the shape."""

    def __init__(self, shapes: Sequence[SpecShape]) -> None:
        nothing = {shape: Acceptance(1.0, (0.0,) * shape.steps) for shape in shapes}
        super().__init__(lambda batch_size, shape, context: 1.0, nothing)

    def choose(self, eases: Sequence[Ease], context: int) -> SpecShape:
        """See :class:`ShapePolicy`."""
        return self.shape
