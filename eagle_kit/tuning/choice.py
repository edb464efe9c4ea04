"""The best shape for a batch: most expected tokens per predicted second."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.tuning.acceptance import Acceptance

Seconds = Callable[[int, SpecShape, int], float]
"""Time of a cycle of a batch size, a shape and a context."""


class Choice(NamedTuple):
    """A shape, the tokens per second and request that are expected of it, and those of plain decoding."""

    shape: SpecShape
    speed: float
    plain: float


def choose(
    seconds: Seconds, acceptances: Mapping[SpecShape, Acceptance], batch_size: int, context: int
) -> Choice:
    """Choose the shape of the most expected tokens per second; of equal ones that with fewer tokens."""
    plain = 1.0 / seconds(batch_size, NO_SPECULATION, context)
    best = Choice(NO_SPECULATION, plain, plain)
    for shape in sorted(acceptances, key=lambda each: (each.tokens, each.steps)):
        if shape.steps:
            speed = acceptances[shape].length / seconds(batch_size, shape, context)
            if speed > best.speed:
                best = Choice(shape, speed, plain)
    return best
