"""Which shape the next cycles take: costs that were measured, acceptance as it comes.

A recording says what every shape accepts of average text. How much easier or harder a request's text is than
that is one number, its *ease*: the log-odds by which each drafted token is more likely to be accepted.
Whatever shape is in use tells it, and it predicts all others. A shape is chosen for a batch, not for a
request: requests of a cycle share its forwards, so a window that is small for one of them would save nothing.

Legend: G values of ease, M shapes, S steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.tuning.acceptance import Acceptance

EASES = np.linspace(-6.0, 6.0, 49)
LEARNING_RATE = 0.25
FORGETTING = 0.02
"""Part of a request's difference from the others that is forgotten with every cycle."""
SHARED_RATE = 0.02
GAIN = 1.03
"""Predicted speed over that of the shape in use for which it is changed."""
HOLD = 8
"""Cycles between two looks."""
PROBE = 4
"""Cycles that draft, after a while of plain decoding, to see what is accepted by now."""
PROBE_EVERY = 64, 512
"""Cycles of plain decoding before the first probe, and before later ones when they find nothing."""


@dataclass
class Ease:
    """Ease of one request's text, learnt from its cycles."""

    value: float


class ShapePolicy:
    """Choice of the shape for a running batch.

    Args:
        seconds: time of a cycle of a batch size, a shape and a context.
        acceptances: of average text, for all shapes that may be used; plain decoding always may.
    """

    def __init__(
        self, seconds: Callable[[int, SpecShape, int], float], acceptances: Mapping[SpecShape, Acceptance]
    ) -> None:
        self._seconds = seconds
        self.shapes = [NO_SPECULATION, *sorted(shape for shape in acceptances if shape.steps)]
        self._number = {shape: i for i, shape in enumerate(self.shapes)}
        depth = max(shape.steps for shape in self.shapes)
        self._odds = np.full((len(self.shapes), depth), -np.inf)
        for shape, i in self._number.items():
            if shape.steps:
                self._odds[i, : shape.steps] = _log_odds(acceptances[shape].reach)
        chances = _sigmoid(self._odds[None] + EASES[:, None, None])
        self._lengths = 1.0 + chances.cumprod(2).sum(2)
        self.shared_ease = 0.0
        self.shape = NO_SPECULATION
        self._batch_size, self._left = 0, 0
        self._is_probe, self._num_plain, self._probe_every = False, 0, PROBE_EVERY[0]
        self._costs: dict[tuple[int, int], np.ndarray] = {}

    def new_request(self) -> Ease:
        """Return the ease that a request begins with, that of those before it."""
        return Ease(self.shared_ease)

    def choose(self, eases: Sequence[Ease], context: int) -> SpecShape:
        """Choose the shape of the next cycle of a batch, whose requests have ``context`` tokens on
        average."""
        self._num_plain += not self.shape.steps
        self._left -= 1
        if self._left > 0 and len(eases) == self._batch_size:
            return self.shape
        self._batch_size, self._left = len(eases), HOLD
        speeds = self.speeds(eases, context)
        best, now = int(speeds.argmax()), self._number[self.shape]
        was_probe, self._is_probe = self._is_probe, False
        if speeds[best] > GAIN * speeds[now] or (was_probe and not best):
            if now and not best:
                self._probe_every = (
                    min(2 * self._probe_every, PROBE_EVERY[1]) if was_probe else PROBE_EVERY[0]
                )
                self._num_plain = 0
            self.shape = self.shapes[best]
        elif not now and self._num_plain >= self._probe_every and len(self.shapes) > 1:
            self.shape, self._left, self._is_probe = self.shapes[1 + int(speeds[1:].argmax())], PROBE, True
        return self.shape

    def speeds(self, eases: Sequence[Ease], context: int) -> np.ndarray:
        """Expected tokens per second of the batch in every shape, ``[M]``."""
        rows = np.searchsorted(EASES, [ease.value for ease in eases]).clip(0, len(EASES) - 1)
        return self._lengths[rows].sum(0) / self._cost(len(eases), context)

    def _cost(self, batch_size: int, context: int) -> np.ndarray:
        key = batch_size, context // 256
        if key not in self._costs:
            middle = 256 * key[1] + 128
            self._costs[key] = np.array([self._seconds(batch_size, shape, middle) for shape in self.shapes])
        return self._costs[key]

    def observe(self, ease: Ease, shape: SpecShape, num_accepted: int) -> None:
        """Learn from a cycle of one request."""
        if not shape.steps:
            return
        tried = min(num_accepted + 1, shape.steps)
        chances = _sigmoid(self._odds[self._number[shape], :tried] + ease.value)
        surprise = num_accepted - float(chances.sum())
        ease.value += LEARNING_RATE * surprise + FORGETTING * (self.shared_ease - ease.value)
        ease.value = float(np.clip(ease.value, EASES[0], EASES[-1]))
        self.shared_ease += SHARED_RATE * (ease.value - self.shared_ease)


def _log_odds(reach: Sequence[float]) -> np.ndarray:
    """Log-odds that each depth is accepted once the one before it was; those never seen are taken for
    unlikely."""
    before = np.array([1.0, *reach[:-1]])
    chance = np.divide(reach, before, out=np.full(len(reach), 0.05), where=before > 0)
    chance = chance.clip(0.02, 0.98)
    return np.log(chance / (1 - chance))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x))
