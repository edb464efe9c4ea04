"""Costs of cycles, learnt from their times: how each shape compares with plain decoding beside what a table
says, and how well that is known.

Times of single cycles are noisy, and the machine as a whole becomes slower and faster. So shapes are compared
where one follows another, and an estimate is corrected by as much as it is doubted (a Kalman filter).

Legend: M shapes, plain decoding the first.
"""

import math
from statistics import median
from typing import NamedTuple

import numpy as np

TABLE_ERROR, WANDER, TILT = 0.15, 0.003, 0.3
"""Relative error that a shape's cost beside plain decoding may have in the table, that it takes on with every
cycle in which the two are not compared, and, as a part of this, when the machine as a whole becomes slower or
faster: more rows of a forward take less time beside its weights when others use the memory (measured: from
a ratio of 1.65 to 1.38 when plain decoding becomes 1.55 times slower)."""
QUICK_ERROR = 0.3
"""The same of a short measurement, which other programs may have disturbed. What it has more is an error of
plain decoding's time, and so of all shapes beside it."""
LEVEL_RATE, NOISE_RATE, FIRST_NOISE, MOST_NOISE = 0.3, 0.05, 0.08, 0.25
"""Rates at which the speed of the machine and the variance of single cycles follow what is measured; the
relative error that these have at first, and at most."""
COMPARED = 6
"""Cycles on either side of a change between plain decoding and drafting whose medians are compared."""
LEAST_DOUBT = 0.02
"""Relative error to which a shape is known at best from cycles of other shapes, whose errors it shares."""
MEDIAN = math.pi / 2
"""Variance of a median over that of a mean."""
NEXT = 4
"""Cycles after which a time still says something of the machine: between two shapes those that make a graph,
or in which the draft catches up, are not taken."""


class _Before(NamedTuple):
    """What was known when plain decoding was entered or left; the fields are those of :class:`Clock`."""

    drift: np.ndarray
    doubt: np.ndarray
    surprise: np.ndarray
    is_known: np.ndarray
    common: float


class Clock:
    """Measured times of a batch size beside the table's, as logarithms. Shapes are named by their numbers;
    cycles are counted by the caller.

    Args:
        num_shapes: M.
        table_error: relative error that a cost may have in the table, ``TABLE_ERROR`` at least.

    Attributes:
        drift: ``[M]`` of each shape beside plain decoding.
        noise: variance of single cycles.
        is_known: ``[M]``, True for shapes that were compared with plain decoding.
        version: number of times that ``drift`` has changed.
    """

    def __init__(self, num_shapes: int, table_error: float = TABLE_ERROR) -> None:
        self.drift, self.noise = np.zeros(num_shapes), FIRST_NOISE**2
        self.is_known, self.version = np.zeros(num_shapes, dtype=bool), 0
        self._common = table_error**2 - TABLE_ERROR**2  # variance of the error that shapes not known share
        self._doubt = np.full(num_shapes, TABLE_ERROR**2)  # variance of the rest when it was last compared
        self._level = 0.0  # of the machine
        self._level_then, self._compared = np.zeros(num_shapes), np.zeros(num_shapes)
        self._here: list[tuple[int, float]] = []  # cycles since plain decoding was entered or left
        self._there: list[tuple[int, float]] = []  # those before that
        self._surprise = np.zeros(num_shapes)  # of the last comparison
        self._before = self._snapshot(0)
        self._moved = 0.0  # of shapes not known, since then
        self._last_cycle = -NEXT - 1

    def doubt(self, number: int, cycle: int) -> float:
        """Variance of a shape's drift."""
        return self._own_doubt(number, cycle) + (0.0 if self.is_known[number] else self._common)

    def inherit(self, number: int, of: int) -> None:
        """Begin with what is known of another shape."""
        state = self.drift, self._doubt, self._level_then, self._compared, self._surprise, self.is_known
        for each in (*state, *self._before[:4]):
            each[number] = each[of]
        self.version += 1

    def _own_doubt(self, number: int, cycle: int) -> float:
        """Variance without the common error. A change within half of a cycle's noise says nothing."""
        change = abs(self._level - float(self._level_then[number])) - math.sqrt(self.noise) / 2
        waited = WANDER**2 * (cycle - float(self._compared[number]))
        doubt = float(self._doubt[number]) + waited + (TILT * max(change, 0.0)) ** 2
        return min(doubt, TABLE_ERROR**2)

    def _snapshot(self, cycle: int) -> _Before:
        doubt = np.array([self._own_doubt(number, cycle) for number in range(len(self.drift))])
        return _Before(self.drift.copy(), doubt, self._surprise.copy(), self.is_known.copy(), self._common)

    def observe(self, number: int, cycle: int, error: float) -> None:
        """Take in a cycle whose time has the logarithm ``error`` beside the table's."""
        if cycle - self._last_cycle > NEXT:
            self._here, self._there = [], []
            self._level = error - self.drift[number]
        if self._here and bool(number) != bool(self._here[-1][0]):
            self._here, self._there = [], self._here[-COMPARED:]
            self._before, self._moved = self._snapshot(cycle), 0.0
        if self._here and self._here[-1][0] == number:
            change = min((error - self._here[-1][1]) ** 2 / 2, MOST_NOISE**2)
            self.noise += NOISE_RATE * (change - self.noise)
        elif self._here:
            self._compare_shapes(*self._here[-1], number, error)
        self._here.append((number, error))
        self._last_cycle = cycle
        if self._there and len(self._here) <= COMPARED:
            self._compare(cycle)
        self._level += LEVEL_RATE * (error - self.drift[number] - self._level)

    def _compare_shapes(self, last: int, last_error: float, number: int, error: float) -> None:
        """Learn from two cycles of different shapes how these compare (a Kalman filter of two numbers): each
        is corrected by as much as it is doubted. What both may have wrong is not seen so."""
        self.version += 1
        doubts = float(self._doubt[last]), float(self._doubt[number])
        surprise = (error - last_error) - float(self.drift[number] - self.drift[last])
        spread = sum(doubts) + 2.0 * self.noise
        surprise = min(max(surprise, -2.0 * math.sqrt(spread)), 2.0 * math.sqrt(spread))
        for each, doubt, sign in ((last, doubts[0], -1.0), (number, doubts[1], 1.0)):
            self.drift[each] += sign * doubt / spread * surprise
            self._doubt[each] = max(doubt - doubt**2 / spread, LEAST_DOUBT**2)

    def _compare(self, cycle: int) -> None:
        """Learn how the shapes on one side of a change compare with plain decoding on the other (a Kalman
        filter of one number each, from what was known before the change)."""
        self.version += 1
        drafted, plain = (self._here, self._there) if self._here[0][0] else (self._there, self._here)
        base, before = median([error for _, error in plain]), self._before
        self._learn_common(drafted, base, len(plain))
        for number in {number for number, _ in drafted}:
            mine = [error for each, error in drafted if each == number]
            drift, last = float(before.drift[number]), float(before.surprise[number])
            doubt = float(before.doubt[number]) + (0.0 if before.is_known[number] else before.common)
            surprise = median(mine) - base - drift
            self._surprise[number] = surprise
            if min(abs(surprise), abs(last)) > TABLE_ERROR and surprise * last > 0.0:
                doubt = max(doubt, TABLE_ERROR**2)  # twice is no chance: its cost is not what it was
            gain = doubt / (doubt + MEDIAN * self.noise * (1 / len(mine) + 1 / len(plain)))
            self.drift[number] = drift + gain * surprise
            is_odd = abs(surprise) > TABLE_ERROR > abs(last)
            self._doubt[number] = TABLE_ERROR**2 if is_odd else (1.0 - gain) * doubt
            self._level_then[number], self._compared[number] = self._level, cycle
            self.is_known[number] = True

    def _learn_common(self, drafted: list[tuple[int, float]], base: float, num_plain: int) -> None:
        """Learn what shapes that are not known share, from those of them that were drafted: an error of plain
        decoding's own time. It moves the others."""
        before = self._before
        new = [(number, error) for number, error in drafted if not before.is_known[number]]
        if not new or not before.common:
            return
        surprise = median([error - float(before.drift[number]) for number, error in new]) - base
        own = float(np.mean([before.doubt[number] for number, _ in new]))
        spread = before.common + own + MEDIAN * self.noise * (1 / len(new) + 1 / num_plain)
        others = ~before.is_known
        others[[0, *(number for number, _ in new)]] = False
        moved = before.common / spread * surprise
        self.drift[others] += moved - self._moved
        self._moved, self._common = moved, before.common * (1.0 - before.common / spread)
