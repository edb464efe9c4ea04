"""Which shape the next cycle takes: costs that were measured, acceptance as it comes.

A table says what every shape accepts of average text, by how sure the draft is of its first token. How much
easier or harder a request's text is than that is one number, its *ease*: the log-odds by which each drafted
token is more likely to be accepted. Whatever shape is in use tells it, and it predicts all others.

Every few cycles the policy decides, from averages, whether to speculate at all and in which shape at most.
While it speculates, the draft's confidence shortens or widens single cycles: a step that is worth less than
the time that it takes is not drafted. How sure the draft is differs by text as well, and a request's *mix*
says how often each class of confidence comes up in it. Cycles that are chosen one by one are worth more than
any single shape, so what counts for speculation is the average of what was expected of them. A shape is for a
batch, not for a request: requests of a cycle share its forwards, so a window that is small for one of them
would save nothing.

Legend: G values of ease, M shapes, C classes of confidence.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.tuning.acceptance import AcceptanceTable
from eagle_kit.tuning.chances import conditional_log_odds, expected_lengths
from eagle_kit.tuning.shapes import Seconds

EASES = np.linspace(-6.0, 6.0, 49)
VARIANCE, CHANGE = 1.0, 0.01
"""Variance of the ease of texts, and what is added to that of a request's with every cycle: texts change."""
MIX_RATE, SHARED_RATE = 0.1, 0.02
WORTH_CYCLES, LEAST_CYCLES = 64, 8
"""Cycles of one request over which the worth of speculation is averaged, and least cycles of a batch."""
GAIN = 1.03
"""Predicted speed over that of the shape in use for which it is changed; plain decoding needs none."""
LEAST_GAIN = 0.02
"""Part of a cycle's tokens that another shape must be worth for a single cycle."""
HOLD = 8
"""Cycles between two looks."""
PROBE = 4
"""Cycles that draft after a while of plain decoding, to see what is accepted by now, or that are plain after
a while of speculation, to see what plain cycles cost."""
MOST_PROBE = 8
"""Plain cycles after which such a probe ends though none of them could be timed."""
PROBE_EVERY, PROBE_LESS = (16, 256), 4
"""Cycles of plain decoding before the first probe, and most of those before later ones; how much longer one
that finds nothing makes them, unless it could be mistaken about the costs."""
PLAIN_PROBE_EVERY = 32, 256
"""Least and most cycles of speculation before the next probe of plain decoding."""
DOUBTFUL_PROBE_EVERY = 8
"""Cycles of speculation before a probe of plain decoding where the costs could be so wrong that it is no
faster; each one that leaves this open makes it twice as many."""
PROBE_LOSS = 0.004
"""Part of the time that probes of plain decoding may take off, where ``PLAIN_PROBE_EVERY`` lets them come so
seldom: up to a gain of 1.34, and 1 % at a gain of 3."""
MOST_MISSED, HORIZON = 32, 32
"""Tokens of a request that a draft may have to read when it is needed again, and cycles in which that has to
pay."""
TABLE_ERROR, WANDER, TILT = 0.15, 0.007, 0.3
"""Relative error that a shape's cost beside plain decoding may have in the table, that it takes on from one
change between the two to the next, and, as a part of this, when the machine as a whole becomes slower or
faster: more rows of a forward take less time beside its weights when others use the memory (measured: from
a ratio of 1.65 to 1.38 when plain decoding becomes 1.55 times slower)."""
COMMON_RATE, NOISE_RATE, FIRST_NOISE = 0.3, 0.05, 0.05
"""Rates at which what is common to all costs, and the variance of single cycles, follow what is measured; the
relative error that these have at first."""
NUM_SURE = 5
"""Changes of which the middle one tells that a cost is not what it was."""
NEXT = 4
"""Cycles after which a time still says something of the machine: between two shapes those that make a graph,
or in which the draft catches up, are not taken."""
OUTLIER, MOST_OUTLIERS = math.log(2.5), 3
"""A cycle that is so much slower was interrupted, unless those after it are as slow."""


Reading = Callable[[int, int, int], float]


@dataclass
class Ease:
    """Outlook of one request: the ease of its text, learnt from its cycles, with the ``variance`` that it is
    known to; the ``mix [C]`` of classes of the draft's confidence in its next token, and this class, None
    where it is not known."""

    value: float
    mix: np.ndarray
    confidence: int | None = None
    variance: float = VARIANCE


@dataclass
class _Clock:
    """Measured times of a batch size beside the table's, as logarithms: ``drift [M]`` of each shape beside
    plain decoding, with its variance ``doubt [M]`` when it was last compared, what was ``common`` to all
    then (``common_then [M]``) and is now, the ``recent`` errors of what it foretold, and the variance
    ``noise`` of single cycles."""

    drift: np.ndarray
    doubt: np.ndarray
    common_then: np.ndarray
    noise: float = FIRST_NOISE**2
    recent: dict[int, list[float]] = field(default_factory=dict)
    common: float = 0.0
    last: int = -1
    last_cycle: int = 0
    num_outliers: int = 0

    def doubt_now(self, number: int) -> float:
        """Variance of a shape's drift. A change within half of a cycle's noise says nothing."""
        change = abs(self.common - float(self.common_then[number])) - math.sqrt(self.noise) / 2
        return float(self.doubt[number]) + (TILT * max(change, 0.0)) ** 2


@dataclass(frozen=True)
class Choice:
    """A shape for a batch size: its expected tokens per verify and request, milliseconds of a cycle, and its
    speed over plain decoding."""

    batch_size: int
    shape: SpecShape
    length: float
    milliseconds: float
    gain: float

    @property
    def label(self) -> str:
        """Batch size and shape, such as ``batch 8: 1,1,2``."""
        return f"batch {self.batch_size}: {self.shape}"

    def __str__(self) -> str:
        text = f"{self.label}, {self.milliseconds:.3g} ms a cycle"
        if not self.shape.steps:
            return text
        return f"{text}, {self.length:.2f} tokens, {self.gain:.2f} x plain decoding expected"


class ShapePolicy:
    """Choice of the shape for a running batch.

    Args:
        seconds: time of a cycle of a batch size, a shape and a context.
        acceptance: of average text.
        menus: shapes to choose from by batch size, a size's are those of the next in it; plain decoding
            always is one.
        origin: where the numbers come from, for people.
        reading: time in which the draft reads tokens that a batch decoded without it: batch size, tokens per
            request, context.
    """

    def __init__(
        self,
        seconds: Seconds,
        acceptance: AcceptanceTable,
        menus: Mapping[int, Sequence[SpecShape]],
        origin: str = "",
        reading: Reading = lambda batch_size, num_tokens, context: 0.0,
    ) -> None:
        self._seconds, self._reading, self.origin = seconds, reading, origin
        used = {shape for menu in menus.values() for shape in menu if shape.steps}
        self.shapes = [NO_SPECULATION, *sorted(used)]
        self._number = {shape: i for i, shape in enumerate(self.shapes)}
        self._edges = acceptance.edges
        odds = conditional_log_odds(acceptance, self.shapes)
        self._lengths = expected_lengths(odds, EASES)
        shares = np.stack([acceptance.shares.get(s, np.full(odds.shape[1], 0.0)) for s in self.shapes])
        shares[0] = 1 / odds.shape[1]
        self._usual_mix = shares[1:].mean(0) if used else shares[0]
        self._tilts = shares / np.maximum(self._usual_mix, 1e-6)
        mean_chances = [_mean_odds(acceptance, shape) for shape in self.shapes]
        self._odds = [  # by shape, and class of confidence; last where it is not known
            [*(each[: shape.steps].tolist() for each in odds[i]), mean_chances[i]]
            for i, shape in enumerate(self.shapes)
        ]
        self._sizes = sorted(menus)
        self._is_on_menu = {
            size: np.array([shape in (NO_SPECULATION, *menu) for shape in self.shapes])
            for size, menu in menus.items()
        }
        self.shared_ease, self.shared_mix = 0.0, self._usual_mix
        self.shape = NO_SPECULATION
        self._tokens = self._spent = 0.0  # of a cycle of speculation, on average
        self._num_cycles = self._num_timed = 0
        self._batch_size, self._left, self._rate = 0, 0, 0.0
        self._is_probe, self._num_plain, self._num_drafting = False, 0, 0
        self._before = 0.0  # worth of drafting when it was tried
        self._probe_every, self._plain_probe_every = PROBE_EVERY[0], DOUBTFUL_PROBE_EVERY
        self._costs: dict[tuple[int, int], np.ndarray] = {}
        self._clocks: dict[int, _Clock] = {}

    def new_request(self) -> Ease:
        """Return the outlook that a request begins with, that of those before it."""
        return Ease(self.shared_ease, self.shared_mix)

    def menu(self, batch_size: int) -> list[SpecShape]:
        """List the shapes for a batch size, plain decoding among them."""
        return [shape for shape, on in zip(self.shapes, self._allowed(batch_size), strict=True) if on]

    def choose(self, eases: Sequence[Ease], context: int) -> SpecShape:
        """Choose the shape of the next cycle of a batch, whose requests have ``context`` tokens on
        average."""
        self._left -= 1
        self._num_cycles += 1
        may_stay = self._is_probe and self._allowed(len(eases))[self._number[self.shape]]
        if self._left <= 0 and self._is_probe and not self.shape.steps and self._num_timed < 2:
            self._left = int(self._num_plain < MOST_PROBE)  # it is there to tell what plain cycles take
        if self._left <= 0 or (len(eases) != self._batch_size and not may_stay):
            self._look(eases, context)
        if not self.shape.steps:
            self._num_plain += 1
            if self._num_plain > PROBE:
                self._tokens = self._spent = 0.0  # what was expected before
            return self.shape
        self._num_drafting += 1
        classes = [ease.confidence for ease in eases if ease.confidence is not None]
        if len(classes) < len(eases):
            self._tokens = self._spent = 0.0
            return self.shape
        costs = self._cost(len(eases), context)
        expected = self._lengths[_rows(eases), :, np.array(classes)].sum(0)
        worth = expected - self._rate * costs
        worth[~self._allowed(len(eases))] = worth[0] = -math.inf
        best, base = int(worth.argmax()), self._number[self.shape]
        if worth[best] < worth[base] + LEAST_GAIN * expected[base]:
            best = base
        rate = min(len(eases) / WORTH_CYCLES, 1 / LEAST_CYCLES)
        if not self._spent:
            speeds = self.speeds(eases, context)
            self._tokens, self._spent = float(speeds[base] * costs[base]), float(costs[base])
        self._tokens += rate * (float(expected[best]) - self._tokens)
        self._spent += rate * (float(costs[best]) - self._spent)
        return self.shape if self._is_probe else self.shapes[best]

    def _look(self, eases: Sequence[Ease], context: int) -> None:
        """Decide whether to speculate, and in which shape where confidence is not known."""
        speeds = self.speeds(eases, context)
        now, may_draft = self._number[self.shape], bool(self._allowed(len(eases))[1:].any())
        drafting = 1 + int(speeds[1:].argmax()) if may_draft else 0
        if len(eases) != self._batch_size:
            self._tokens = self._spent = 0.0
        self._batch_size, self._left = len(eases), HOLD
        worth = 0.0
        if may_draft:
            worth = self._tokens / self._spent if self._spent else float(speeds[drafting])
            if not now:
                worth *= self._rest_of_reading(len(eases), context)[drafting]
        is_better = worth > speeds[0]
        if self._is_probe:
            if now:  # it drafted
                longer = min(PROBE_LESS * self._probe_every, PROBE_EVERY[1])
                is_open = self._could_pay(eases, context, worth)
                self._probe_every = PROBE_EVERY[0] if is_open else longer
            else:
                self._plain_probe_every = min(2 * self._plain_probe_every, PLAIN_PROBE_EVERY[1])
            self._use(drafting if is_better else 0)
        elif not now and worth > GAIN * speeds[0]:
            self._use(drafting)
        elif now and worth < speeds[0]:
            self._probe_every = PROBE_EVERY[0]
            self._use(0)
        elif now and speeds[drafting] > GAIN * speeds[now]:
            self._use(drafting)
        elif (
            not now
            and may_draft
            and self._num_plain >= self._probe_after(len(eases), drafting, worth / speeds[0])
        ):
            self._before = float(speeds[drafting] / speeds[0])
            self._use(drafting, is_probe=True)
        elif now and self._num_drafting >= self._plain_probe_after(len(eases), worth / speeds[0]):
            self._use(0, is_probe=True)
        self._rate = max(worth, float(speeds[0]))

    def _doubt(self, batch_size: int, number: int) -> float:
        """Relative error of a shape's cost, as far as cycles are timed."""
        clock = self._clocks.get(batch_size)
        return 0.0 if clock is None else math.sqrt(clock.doubt_now(number))

    def _could_pay(self, eases: Sequence[Ease], context: int, worth: float) -> bool:
        """Return True if drafting, which was just tried, could pay: its cost may be wrong, or more was
        accepted than before, and the text may be easier than it seems from so few cycles."""
        number, plain = self._number[self.shape], len(eases) / self._cost(len(eases), context)[0]
        if worth * math.exp(self._doubt(len(eases), number)) > plain:
            return True
        best = [Ease(min(e.value + math.sqrt(e.variance), EASES[-1]), e.mix) for e in eases]
        is_rising = self.speeds(eases, context)[1:].max() > self._before * plain
        return bool(is_rising and self.speeds(best, context)[1:].max() > plain)

    def _probe_after(self, batch_size: int, number: int, worth: float) -> int:
        """Cycles of plain decoding after which drafting is tried: few where the machine has changed since its
        cost was known, and it could pay by now."""
        clock = self._clocks.get(batch_size)
        has_changed = clock is not None and clock.doubt_now(number) > 2.0 * clock.doubt[number]
        if has_changed and worth * math.exp(self._doubt(batch_size, number)) > 1.0:
            return PROBE_EVERY[0]
        return self._probe_every

    def _plain_probe_after(self, batch_size: int, gain: float) -> float:
        """Cycles of speculation after which plain decoding is tried."""
        least, most = PLAIN_PROBE_EVERY
        usual = min(max(PROBE * (1 - 1 / gain) / PROBE_LOSS, least), most)
        if gain > math.exp(self._doubt(batch_size, self._number[self.shape])):
            self._plain_probe_every = DOUBTFUL_PROBE_EVERY
            return usual
        return min(self._plain_probe_every, usual)

    def _rest_of_reading(self, batch_size: int, context: int) -> np.ndarray:
        """Part of the time of ``HORIZON`` cycles that is left when the draft has read what it has missed,
        ``[M]``."""
        reading = self._reading(batch_size, min(self._num_plain, MOST_MISSED), context)
        decoding = HORIZON * self._cost(batch_size, context)
        return decoding / (decoding + reading)

    def _use(self, number: int, *, is_probe: bool = False) -> None:
        shape = self.shapes[number]
        if is_probe or bool(shape.steps) != bool(self.shape.steps):
            self._num_plain = self._num_drafting = 0
        self.shape, self._is_probe = shape, is_probe
        if is_probe:
            self._left, self._num_timed = PROBE, 0

    def speeds(self, eases: Sequence[Ease], context: int) -> np.ndarray:
        """Expected tokens per second of the batch in every shape, ``[M]``; 0 off its menu."""
        weights = self._tilts * np.stack([ease.mix for ease in eases])[:, None]
        lengths = (self._lengths[_rows(eases)] * weights).sum(2) / weights.sum(2)
        speeds = lengths.sum(0) / self._cost(len(eases), context)
        return np.where(self._allowed(len(eases)), speeds, 0.0)

    def _allowed(self, batch_size: int) -> np.ndarray:
        at = min(bisect_right(self._sizes, batch_size - 1), len(self._sizes) - 1)
        return self._is_on_menu[self._sizes[at]] if self._sizes else np.array([True])

    def _cost(self, batch_size: int, context: int) -> np.ndarray:
        """Seconds of a cycle in every shape, ``[M]``, as the table and this engine's cycles have them."""
        key = batch_size, context // 256
        if key not in self._costs:
            middle = 256 * key[1] + 128
            self._costs[key] = np.array([self._seconds(batch_size, shape, middle) for shape in self.shapes])
        clock = self._clocks.get(batch_size)
        return self._costs[key] if clock is None else self._costs[key] * np.exp(clock.drift)

    def observe(self, ease: Ease, shape: SpecShape, num_accepted: int) -> None:
        """Learn from a cycle of one request, which began with its ``confidence``."""
        if not shape.steps:
            ease.variance = min(ease.variance + CHANGE, VARIANCE)
            return
        known = -1 if ease.confidence is None else ease.confidence
        odds = self._odds[self._number[shape]][known]
        surprise, information = float(num_accepted), 0.0
        for each in odds[: num_accepted + 1]:
            chance = 1.0 / (1.0 + math.exp(-each - ease.value))
            surprise -= chance
            information += chance * (1.0 - chance)
        left = ease.variance / (1.0 + ease.variance * information)
        ease.value = min(max(ease.value + left * surprise, EASES[0]), EASES[-1])
        ease.variance = min(left + CHANGE, VARIANCE)
        self.shared_ease += SHARED_RATE * (ease.value - self.shared_ease)

    def see(self, ease: Ease, probability: float | None) -> None:
        """Take in the probability that the draft gives its next first token."""
        is_known = probability is not None and probability == probability and self._edges
        ease.confidence = bisect_right(self._edges, probability or 0.0) if is_known else None
        if ease.confidence is not None:
            seen = np.zeros(len(ease.mix))
            seen[ease.confidence] = 1.0
            ease.mix = ease.mix + MIX_RATE * (seen - ease.mix)
            self.shared_mix = self.shared_mix + SHARED_RATE * (seen - self.shared_mix)

    def observe_time(self, batch_size: int, shape: SpecShape, context: int, seconds: float) -> None:
        """Learn what a cycle of a batch took. What all shapes have in common, such as a machine that has
        become slower, changes no choice; a shape is compared with plain decoding where one follows the
        other."""
        number, num = self._number[shape], len(self.shapes)
        new = _Clock(np.zeros(num), np.full(num, TABLE_ERROR**2), np.zeros(num))
        clock = self._clocks.setdefault(batch_size, new)
        surprise = math.log(seconds / float(self._cost(batch_size, context)[number])) - clock.common
        if abs(surprise) > OUTLIER and clock.last >= 0 and clock.num_outliers < MOST_OUTLIERS:
            clock.num_outliers += 1
            return
        is_next = clock.last >= 0 and self._num_cycles - clock.last_cycle <= NEXT
        if is_next and clock.last != number and 0 in (clock.last, number):
            self._compare_with_plain(clock, max(clock.last, number), surprise if number else -surprise)
        elif is_next and clock.last == number:
            clock.noise += NOISE_RATE * (surprise**2 - clock.noise)
        clock.common += surprise * (COMMON_RATE if is_next else 1.0)
        clock.last, clock.last_cycle, clock.num_outliers = number, self._num_cycles, 0
        self._num_timed += 1

    @staticmethod
    def _compare_with_plain(clock: _Clock, number: int, surprise: float) -> None:
        """Learn from a cycle of a shape beside one of plain decoding, with which it is compared (a Kalman
        filter of one number). Two shapes are not compared with one another: an error of one would be the
        other's too, and a shape that looks dear is not used again to find out."""
        clock.recent[number] = recent = [*clock.recent.get(number, ()), surprise][-NUM_SURE:]
        if len(recent) == NUM_SURE and abs(sorted(recent)[NUM_SURE // 2]) > TABLE_ERROR:
            clock.doubt[number], clock.recent[number] = TABLE_ERROR**2, []
        doubt = clock.doubt_now(number) + WANDER**2
        gain, limit = doubt / (doubt + clock.noise), 2.0 * math.sqrt(doubt + clock.noise)
        clock.drift[number] += gain * min(max(surprise, -limit), limit)
        clock.doubt[number], clock.common_then[number] = (1.0 - gain) * doubt, clock.common

    def plan(self, batch_sizes: Sequence[int], context: int = 256) -> list[Choice]:
        """What is chosen for batches of average text."""
        choices = []
        for size in batch_sizes:
            speeds, costs = self.speeds([self.new_request()] * size, context), self._cost(size, context)
            best = int(speeds.argmax())
            gain, length = speeds[best] / speeds[0], speeds[best] * costs[best] / size
            choices.append(
                Choice(size, self.shapes[best], float(length), 1e3 * float(costs[best]), float(gain))
            )
        return choices


def _rows(eases: Sequence[Ease]) -> np.ndarray:
    values = np.array([ease.value for ease in eases])
    step = EASES[1] - EASES[0]
    return ((values - EASES[0]) / step + 0.5).astype(int).clip(0, len(EASES) - 1)


def _mean_odds(acceptance: AcceptanceTable, shape: SpecShape) -> list[float]:
    """Log-odds of each depth where the confidence is not known."""
    if not shape.steps:
        return []
    mean = acceptance.shares[shape] @ acceptance.reach[shape]
    whole = AcceptanceTable((), {shape: np.ones(1)}, {shape: mean[None]})
    odds: list[float] = conditional_log_odds(whole, [shape])[0, 0].tolist()
    return odds
