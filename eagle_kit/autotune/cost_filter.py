"""Costs of cycles, learnt from their times: how each kind of cycle compares with plain decoding beside what a
table says, and how well that is known.

Times of single cycles are noisy, and the machine as a whole becomes slower and faster. So what is estimated
is a few numbers at once: the machine's level, what all drafting costs beside the table, what packing its
windows does, and what each kind of cycle costs beside that: a Kalman filter, in plain Python, since it runs
between two cycles.
"""

import math
from typing import NamedTuple

TABLE_ERROR, QUICK_ERROR = 0.15, 0.3
"""Relative error that the cost of a cycle beside plain decoding may have in a table, and in one of a short
measurement, which other programs may have disturbed. What the latter has more is an error of plain decoding's
time, and so of all drafting beside it."""
OF_KIND, OF_PACKING = 0.11, 0.2
"""The part of the former that a kind of cycles does not share with others, and what all those with packed
windows have besides. What is shared is real: where other programs use the memory, all windows cost less
beside plain decoding (measured at batch 8: a window of two 1.15 plain cycles of 18 ms, and 1.3 of 15 ms)."""
WANDER = 0.003
"""Relative error that costs take on with every cycle in which they are not compared."""
TILT, CHANGE = 0.6, 0.1
"""Error of drafting's costs, as a part of the relative change, when the machine becomes slower or faster by
``CHANGE`` or more."""
LEVEL_WANDER = 0.03
"""Relative change of the machine from cycle to cycle."""
FIRST_NOISE, MOST_NOISE, NOISE_RATE = 0.08, 0.25, 0.05
"""Relative error of single cycles that is assumed at first, and that is believed at most; the rate at which
its variance follows what is measured."""
NEW_NOISE = 0.1
"""What the first cycle of a kind behind one of another has besides."""
OUTLIER = 3.0
"""Standard deviations beyond which a time is not believed: one cycle met another program, or, if the next
ones do too, the machine has changed."""
SETTLED, LEVEL_RATE = 6, 0.4
"""Cycles of one kind after which further ones tell the level alone, and the rate at which it follows them."""
NEXT = 4
"""Cycles after which a time still says something of the machine: between two shapes those that make a graph,
or in which the draft catches up, are not taken."""
UNKNOWN, MOST_DOUBT = 2.0, 0.5
"""Relative error of the level where nothing is known of it, and of anything else at most."""
RELAX = 16
"""Cycles after which what was learnt becomes less certain, all of them at once."""
TOLD = 0.01
"""Change of a drift that is worth computing costs anew."""


class Kind(NamedTuple):
    """Kind of a cycle: the ``number`` of its shape, 0 for plain decoding; whether its windows are packed."""

    number: int
    is_packed: bool = False


PLAIN = Kind(0)


class CostFilter:
    """Measured times of a batch size beside the table's, as logarithms; cycles are counted by the caller.

    Args:
        table_error: relative error that a cost may have in the table, ``TABLE_ERROR`` at least.

    Attributes:
        noise: variance of single cycles.
        has_compared: whether drafting followed plain decoding, or the other way round.
        version: number of times that drifts have changed by ``TOLD`` or more.
        num_updates: number of times that anything but the level has changed.
    """

    def __init__(self, table_error: float = TABLE_ERROR) -> None:
        self._seen: dict[Kind, tuple[int, ...]] = {PLAIN: (0,)}  # what of the state a kind's times tell of
        self._state: list[float] = []  # level, drafting, packing, and each kind beside them
        self._prior: list[float] = []  # variances
        self._covariance: list[list[float]] = []
        for variance in (UNKNOWN**2, table_error**2 - OF_KIND**2, OF_PACKING**2):
            self._add(variance)
        self._kept = 1.0 - WANDER**2 / (2.0 * table_error**2)  # of a drift, from cycle to cycle
        self._told = self._state.copy()
        self.noise, self.version, self.num_updates, self.has_compared = FIRST_NOISE**2, 0, 0, False
        self._last, self._last_error, self._last_cycle, self._num_alike = PLAIN, 0.0, -NEXT - 1, 0
        self._relaxed = 0
        self._level_then: float | None = None  # when the machine was last seen to change

    def drift(self, kind: Kind) -> float:
        """Cost of a kind beside plain decoding and the table, as a logarithm."""
        return sum([self._told[i] for i in self._parts(kind) if i < len(self._told)])

    def variance(self, kind: Kind, cycle: int) -> float:
        """Variance of a drift."""
        parts, kept = self._parts(kind), self._kept ** (2 * max(cycle - self._relaxed, 0))
        new = 0.0 if kind in self._seen else OF_KIND**2
        then = sum([self._covariance[i][j] for i in parts for j in parts]) + new
        prior = sum([self._prior[i] for i in parts]) + new
        return min(kept * then + (1.0 - kept) * prior, prior)

    def standard_error(self, kind: Kind, beside: Kind) -> float:
        """Standard error of a drift beside that of another kind, of drafting both."""
        mine, other = self._parts(kind), self._parts(beside)
        if kind == beside:
            return 0.0
        signs = [(i, 1.0) for i in mine if i not in other] + [(i, -1.0) for i in other if i not in mine]
        new = sum([OF_KIND**2 for each in (kind, beside) if each not in self._seen])
        prior = sum([self._prior[i] for i, _ in signs]) + new
        variance = sum([a * b * self._covariance[i][j] for i, a in signs for j, b in signs]) + new
        return math.sqrt(min(max(variance, 0.0), prior))

    def _parts(self, kind: Kind) -> tuple[int, ...]:
        """What of the state is a kind's, the level aside."""
        return self._seen.get(kind, (0, 1, 2) if kind.is_packed else (0, 1))[1:]

    def observe(self, kind: Kind, cycle: int, error: float) -> None:
        """Take in a cycle whose time has the logarithm ``error`` beside the table's."""
        before, follows = self._last, cycle - self._last_cycle <= NEXT
        self._num_alike = self._num_alike + 1 if follows and kind == before else 1
        if self._num_alike > 1:
            change = min((error - self._last_error) ** 2 / 2, MOST_NOISE**2)
            self.noise += NOISE_RATE * (change - self.noise)
        self.has_compared |= follows and (kind == PLAIN) != (before == PLAIN)
        self._last, self._last_error, self._last_cycle = kind, error, cycle
        if kind not in self._seen:
            self._seen[kind] = (0, *self._parts(kind), self._add(OF_KIND**2))
        seen, state = self._seen[kind], self._state
        is_due = cycle - self._relaxed >= RELAX
        if is_due:
            self._relax(cycle)
        innovation = error - sum([state[i] for i in seen])
        if self._num_alike > SETTLED and not is_due:
            most = OUTLIER * math.sqrt(self.noise)
            state[0] += LEVEL_RATE * min(max(innovation, -most), most)
        else:
            self._covariance[0][0] += LEVEL_WANDER**2 if follows else UNKNOWN**2
            noise = self.noise if self._num_alike > 1 else self.noise + NEW_NOISE**2
            odd = {0, seen[-1], self._seen[before][-1]} if self._num_alike == 1 else {0}
            self._learn(seen, innovation, noise, odd)
        if self._level_then is None or (follows and self._num_alike <= SETTLED):
            self._level_then = state[0]  # what is learnt of kinds is no change of the machine
        elif abs(state[0] - self._level_then) > CHANGE:
            self._tilt(state[0] - self._level_then, is_drafting=len(seen) > 1)
            self._level_then = state[0]

    def _tilt(self, change: float, *, is_drafting: bool) -> None:
        """Doubt what drafting costs beside plain decoding, where one of them was seen to become slower or
        faster."""
        covariance = self._covariance
        added = min((TILT * change) ** 2, max(MOST_DOUBT**2 - covariance[1][1], 0.0))
        covariance[1][1] += added
        if is_drafting:  # what is known is their sum
            covariance[0][0] += added
            covariance[0][1] -= added
            covariance[1][0] -= added
        self.num_updates += 1

    def _add(self, variance: float) -> int:
        """Make room for a number of the state -> its place."""
        place = len(self._state)
        self._state.append(0.0)
        self._prior.append(variance)
        for row in self._covariance:
            row.append(0.0)
        self._covariance.append([*[0.0] * place, variance])
        return place

    def _relax(self, cycle: int) -> None:
        """Go back from what was learnt towards the table, as it is forgotten."""
        kept, self._relaxed = self._kept ** (cycle - self._relaxed), cycle
        for i in range(1, len(self._state)):
            self._state[i] *= kept
            row = self._covariance[i]
            for j in range(1, len(row)):
                row[j] *= kept**2
            row[i] += (1.0 - kept**2) * self._prior[i]
            row[0] *= kept
            self._covariance[0][i] = row[0]

    def _learn(self, seen: tuple[int, ...], innovation: float, noise: float, odd: set[int]) -> None:
        """Update all numbers by the ``innovation`` of the sum of those ``seen``. One beyond ``OUTLIER``
        standard deviations is rejected, and the variances of those that are ``odd`` then are raised."""
        self.num_updates += 1
        column = [sum([row[i] for i in seen]) for row in self._covariance]
        spread = sum([column[i] for i in seen]) + noise
        if innovation**2 > OUTLIER**2 * spread:
            for i in odd:
                most = MOST_DOUBT**2 if i else UNKNOWN**2
                self._covariance[i][i] += min(innovation**2 / 2, max(most - self._covariance[i][i], 0.0))
            return
        for i, (row, mine) in enumerate(zip(self._covariance, column, strict=True)):
            gain = mine / spread
            self._state[i] += gain * innovation
            for j, other in enumerate(column):
                row[j] -= gain * other
        now, told = self._state, self._told
        if len(now) > len(told) or any([abs(a - b) > TOLD for a, b in zip(now[1:], told[1:], strict=True)]):
            self._told = now.copy()
            self.version += 1
