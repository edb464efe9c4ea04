"""Times of cycles from a formula, in place of a measurement, so that no test's shapes depend on a clock.

What is replaced is the timing of cycles at one point. Plans, passes, fits and files of costs stay real.
"""

from collections.abc import Sequence
from functools import cache

from eagle_kit.autotune.costs import CostTable, Timing
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.engine.calibrate import cycle_timing as timing

MEASURED = timing.time_point
"""The real measurement."""
FIT = CostTable.fit
"""The real fit, which takes a third of a second."""


def seconds_of(batch_size: int, shape: SpecShape, context: int) -> float:
    """Time of a cycle on a machine that is bound by memory up to 16 rows. A step of the draft costs a tenth
    of a forward of the target, so that drafts of average quality pay in small batches."""
    num_rows = batch_size * shape.tokens
    target = 1e-3 * max(1.0, num_rows / 16)
    draft = 1e-4 * shape.steps * max(1.0, batch_size * shape.topk / 16)
    attention = 1e-7 * batch_size * context
    return target + draft + attention


def synthetic_timings(
    engine: object, dictated: object, point: timing.Point, plan: timing.Plan
) -> list[Timing]:
    """Return what :func:`eagle_kit.engine.calibrate.cycle_timing.time_point` returns, without a cycle."""
    batch_size, context = point
    shapes: Sequence[SpecShape] = (NO_SPECULATION, *plan.shapes)
    return [Timing(batch_size, shape, context, seconds_of(batch_size, shape, context)) for shape in shapes]


def remembered_fit(timings: Sequence[Timing]) -> CostTable:
    """Return what :meth:`eagle_kit.autotune.costs.CostTable.fit` returns, computed once a process."""
    return _fit_once(tuple(timings))


@cache
def _fit_once(timings: tuple[Timing, ...]) -> CostTable:
    return FIT(timings)
