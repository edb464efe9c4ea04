"""Which shape the next cycle takes: costs that were measured, acceptance as it comes.

A table says what every shape accepts of average text, by how sure the draft is of its first token. How much
easier or harder a request's text is than that is one number, its *ease*: the log-odds by which each drafted
token is more likely to be accepted. Whatever shape is in use tells it, and it predicts all others.

Every few cycles the policy decides, from averages, whether to speculate at all and in which shape at most.
While it speculates, the draft's confidence shortens or widens single cycles: a step that is worth less than
the time that it takes is not drafted. A draft that tells how likely each depth is accepted (DSpark's
confidence head) is believed for chains, but for a calibration by depth, which all requests teach, and a bias
of each request. Whatever it tells, it tells of the text and not of tokens that will be drawn, so that no
choice changes a distribution. How sure the draft is differs by text as well, and a request's *mix* says how
often each class of confidence comes up in it. Cycles that are chosen one by one are worth more than any
single shape, so what counts for speculation is the average of what was expected of them. A shape is for a
batch, not for a request: requests of a cycle share its forwards. But of the drafts of a chain the target may
verify only the likeliest of the batch, whichever requests they belong to, whose rows are packed.

Legend: G values of ease, M shapes, C classes of confidence.
"""

import math
import operator
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.tuning.acceptance import AcceptanceTable
from eagle_kit.tuning.calibration import Calibration
from eagle_kit.tuning.chances import (
    CHANGE,
    EASES,
    LEAST_EASE,
    MOST_EASE,
    VARIANCE,
    chance_of,
    conditional_log_odds,
    learn_offset,
    log_odds_of,
    reach_of,
)
from eagle_kit.tuning.cost_filter import PLAIN, Kind
from eagle_kit.tuning.cycle_costs import CycleCosts, PackedShare
from eagle_kit.tuning.shapes import Seconds

SHARED_VARIANCE, SHARED_CHANGE, TOGETHER = 0.25, 0.06, 4
"""Variance at first of what texts have in common, and what every new request adds to it: tasks change. Those
of a batch of more than ``TOGETHER`` add as much as so many."""
MIX_RATE, SHARED_RATE, AVERAGE_SEEN = 0.1, 0.02, 16
"""Rates at which a request's mix and that of all follow what is seen, and confidences for which the mix of
another draft counts."""
WORTH_CYCLES, LEAST_CYCLES = 64, 8
"""Cycles of one request over which the worth of speculation is averaged, and least cycles of a batch, as many
as what was expected at first counts."""
GAIN = 1.03
"""Predicted speed over that of the shape in use for which it is changed; plain decoding needs none."""
LEAST_GAIN = 0.02
"""Part of a cycle's tokens that another shape must be worth for a single cycle."""
HOLD, WHOLE_LOOK = 8, 4
"""Cycles between two looks, and looks between two that compare all shapes, where cycles are chosen one by
one: those have all shapes to choose from, whichever is in use."""
PROBE = 4
"""Cycles of a probe, which are plain where the rest drafts, or draft where the rest is plain."""
SAMPLES = 16
"""Drafts of all requests after which a probe that drafts may end sooner, in two cycles at least: one reads
what the draft has missed, and is not timed."""
MOST_PROBE = 8
"""Plain cycles after which a probe ends though none of them could be timed."""
USE = 128
"""Cycles for which what a probe tells is of use."""
PROBE_LOSS, MOST_LOSS = 0.005, 1.5
"""Part of the time that probes may take off, and what may be saved up of it, in plain cycles."""
CHECKS, UNCHECKED = 4, 16
"""How often, for sizes up to each power of two, and after how many cycles of drafting plain decoding is tried
though a short measurement calls it slower, until the two have been compared."""
HORIZON = 32
"""Cycles in which it has to pay that a draft reads what it has missed."""
UNSEEN = 16
"""Cycles without a verified draft after which a request has one verified: its text may have become easier."""

EASE_SPACING = float(EASES[1] - EASES[0])

Reading = Callable[[int, int, int], float]


@dataclass
class Ease:
    """Outlook of one request: the ease of its text, learnt from its cycles, with the ``variance`` that it is
    known to; the ``mix`` of the C classes of the draft's confidence in its next token, and this class, None
    where it is not known; ``num_missed``, tokens that the draft has not read; the ``information`` that its
    drafts have given about it, one over a variance, and the value that it ``began`` with, that of texts
    before it; the log-odds of ``told`` confidences, that each depth of a chain is accepted where all before
    it are, empty where the draft does not tell them, with the ``bias [2]`` by which they are wrong once
    calibrated, and its variance. ``num_unseen``: cycles since a draft of it was verified while others' were.
    ``is_new``: no cycle has come yet; ``first``: its only cycle so far, of which nothing was learnt: shape,
    drafts accepted and verified, class of confidence."""

    value: float
    mix: Sequence[float]
    confidence: int | None = None
    variance: float = VARIANCE
    num_missed: int = 0
    information: float = 0.0
    began: float = 0.0
    told: Sequence[float] = ()
    bias: tuple[float, float] = (0.0, VARIANCE)
    num_unseen: int = 0
    is_new: bool = True
    first: tuple[SpecShape, int, int | None, int] | None = None


@dataclass(frozen=True)
class Choice:
    """A shape for a batch size: its expected tokens per cycle and request, milliseconds of a cycle, its speed
    over plain decoding, and the part of its drafts that is verified, the likeliest of the batch."""

    batch_size: int
    shape: SpecShape
    length: float
    milliseconds: float
    gain: float
    verified: float = 1.0

    @property
    def label(self) -> str:
        """Batch size and shape, such as ``batch 8: 1,1,2``."""
        return f"batch {self.batch_size}: {self.shape}"

    def __str__(self) -> str:
        text = f"{self.label}, {self.milliseconds:.3g} ms a cycle"
        if not self.shape.steps:
            return text
        if self.verified < 1:
            text += f", {self.verified:.0%} of its drafts verified"
        return f"{text}, {self.length:.2f} tokens, {self.gain:.2f} x plain decoding expected"


class _Outlook(NamedTuple):
    """Expected ``tokens`` and ``seconds`` of a cycle of a batch in every shape, ``[M]``, and the part of its
    drafts that is ``verified``."""

    tokens: np.ndarray
    seconds: np.ndarray
    verified: np.ndarray

    @property
    def speeds(self) -> np.ndarray:
        """Expected tokens per second, ``[M]``."""
        return self.tokens / self.seconds


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
        packed_share: of a cycle whose windows are packed; None packs nothing.
        tuned_to: largest batch size whose times a long measurement has. Those of larger ones are doubted
            more, and compared with plain decoding early.
        is_average: whether the acceptance is that of another draft, so that what texts have in common, their
            ease and their mix, is learnt faster at first.

    Attributes:
        costs: what a cycle costs now.
        num_drafts: drafts of each request to verify in the cycle that :meth:`choose` chose last; None for
            all.
    """

    def __init__(
        self,
        seconds: Seconds,
        acceptance: AcceptanceTable,
        menus: Mapping[int, Sequence[SpecShape]],
        origin: str = "",
        reading: Reading = lambda batch_size, num_tokens, context: 0.0,
        packed_share: PackedShare | None = None,
        tuned_to: int = sys.maxsize,
        *,
        is_average: bool = False,
    ) -> None:
        self._reading, self.origin = reading, origin
        self._num_checks: Counter[int] = Counter()  # by the size's power of two
        self.num_drafts: list[int] | None = None
        used = {shape for menu in menus.values() for shape in menu if shape.steps}
        self.shapes = [NO_SPECULATION, *sorted(used)]
        self._number = {shape: i for i, shape in enumerate(self.shapes)}
        self.costs = CycleCosts(self.shapes, seconds, packed_share, tuned_to)
        self._edges = acceptance.edges
        odds = conditional_log_odds(acceptance, self.shapes)
        self._reach = reach_of(odds, EASES)
        self._lengths = 1.0 + self._reach.sum(3)
        self._length_lists: list[list[list[float]]] = self._lengths.transpose(0, 2, 1).tolist()  # [G, C, M]
        self._shape_lengths: list[list[list[float]]] = self._lengths.transpose(1, 0, 2).tolist()  # [M, G, C]
        shares = np.stack([acceptance.shares.get(s, np.full(odds.shape[1], 0.0)) for s in self.shapes])
        shares[0] = 1 / odds.shape[1]
        self._usual_mix = shares[1:].mean(0) if used else shares[0]
        self._tilts = shares / np.maximum(self._usual_mix, 1e-6)
        self._tilt_lists: list[list[float]] = self._tilts.tolist()
        mean_chances = [_mean_odds(acceptance, shape) for shape in self.shapes]
        self._odds = [  # by shape, and class of confidence; last where it is not known
            [*(each[: shape.steps].tolist() for each in odds[i]), mean_chances[i]]
            for i, shape in enumerate(self.shapes)
        ]
        self._tells = False
        self._chains = {i: s.steps for i, s in enumerate(self.shapes) if s.steps and s.topk == 1}
        self._chain_reach: dict[int, list[list[list[float]]]] = {  # [G, C, S]
            i: self._reach[:, i, :, :steps].tolist() for i, steps in self._chains.items()
        }
        self._sizes = sorted(menus)
        self._numbers = {
            size: [self._number[shape] for shape in self.shapes if shape.steps and shape in menu]
            for size, menu in menus.items()
        }
        self.shared_ease, self.calibration = 0.0, Calibration()
        self.shared_mix: Sequence[float] = self._usual_mix.tolist()
        self._shared_variance = VARIANCE if is_average else SHARED_VARIANCE
        self._num_seen = AVERAGE_SEEN if is_average else round(1 / SHARED_RATE)  # confidences in the mix
        self.shape, self._used = NO_SPECULATION, PLAIN
        # Of a cycle of speculation, on average: tokens beside those of the eases, and seconds.
        self._gained = self._spent = 0.0
        self._num_averaged = 0
        mean = (self._lengths[:, 1:] * self._usual_mix).sum(2).mean(1) if used else self._lengths[:, 0, 0]
        self._usual_lengths: list[float] = mean.tolist()
        self._num_cycles = self._num_timed = self._num_looks = 0
        self._batch_size, self._left, self._rate = 0, 0, 0.0
        self._is_probe, self._num_plain, self._num_drafting = False, 0, 0
        self._may_lose = math.inf  # seconds, in probes
        self._known_eases: list[tuple[float, Sequence[float]]] = []  # of the speeds that were computed last
        self._known_costs: Sequence[float] = ()
        self._known_speeds = np.empty(0)

    def new_request(self) -> Ease:
        """Return the outlook that a request begins with, that of those before it."""
        change = SHARED_CHANGE * TOGETHER / max(self._batch_size, TOGETHER)
        self._shared_variance = min(self._shared_variance + change, VARIANCE)
        return Ease(self.shared_ease, self.shared_mix, began=self.shared_ease)

    @property
    def menus(self) -> dict[int, list[SpecShape]]:
        """Shapes to choose from, by the batch sizes that have their own."""
        return {size: self.menu(size) for size in self._sizes}

    def menu(self, batch_size: int) -> list[SpecShape]:
        """List the shapes for a batch size, plain decoding among them."""
        return [NO_SPECULATION, *(self.shapes[number] for number in self._drafting(batch_size))]

    def choose(self, eases: Sequence[Ease], context: int) -> SpecShape:
        """Choose the shape of the next cycle of a batch, whose requests have ``context`` tokens on
        average."""
        self._left -= 1
        self.num_drafts = None
        self._num_cycles += 1
        costs = self.costs.of(len(eases), context).seconds
        self._may_lose += PROBE_LOSS * costs[self._number[self.shape]]
        may_stay = self._is_probe and self._number[self.shape] in (0, *self._drafting(len(eases)))
        if self._left <= 0 and self._is_probe:  # times may be late, or left out
            timed, most = (1, PROBE) if self.shape.steps else (2, MOST_PROBE)
            self._left = int(self._num_timed < timed and self._num_plain + self._num_drafting < most)
        if self._left <= 0 or (len(eases) != self._batch_size and not may_stay):
            self._look(eases, context)
        if not self.shape.steps:
            self._num_plain += 1
            if self._num_plain > PROBE:
                self._spent = 0.0  # what was expected before is forgotten
            return self.shape
        self._num_drafting += 1
        if all(ease.confidence is None for ease in eases):
            self._spent, self._used = 0.0, Kind(self._number[self.shape])
            return self.shape
        told = [self._told_reach(ease) for ease in eases] if self._tells else [()] * len(eases)
        rows = _rows(eases)
        expected = self._expected(eases, rows, told)
        base, allowed = self._number[self.shape], self._drafting(len(eases))
        at_best = {number: self.costs.at_best(len(eases), number, self._used) for number in allowed}
        worth = {n: expected[n] - self._rate * costs[n] * part for n, part in at_best.items()}
        best = max(allowed, key=worth.__getitem__)
        if base in allowed and worth[best] < worth[base] + LEAST_GAIN * expected[base]:
            best = base
        tokens, seconds = expected[best], costs[best]
        if not self._is_probe:
            least = worth[best] + LEAST_GAIN * tokens
            packed = self._pack(eases, rows, told, context, expected, least)
            if packed is not None:
                best, self.num_drafts, tokens, seconds = packed
        self._used = Kind(self._number[self.shape] if self._is_probe else best, self.num_drafts is not None)
        usual = self._usual(rows)
        if not self._spent:
            self._num_averaged, outlook = 0, self._outlook(eases, context)
            self._gained, self._spent = float(outlook.tokens[base]) / usual, float(outlook.seconds[base])
        self._num_averaged += 1
        lasting = min(len(eases) / WORTH_CYCLES, 1 / LEAST_CYCLES)
        rate = max(lasting, 1 / (LEAST_CYCLES + self._num_averaged))  # the first ones are an average of all
        self._gained += rate * (tokens / usual - self._gained)
        self._spent += rate * (seconds - self._spent)
        return self.shape if self._is_probe else self.shapes[best]

    def _pack(
        self,
        eases: Sequence[Ease],
        rows: Sequence[int],
        told: Sequence[Sequence[float]],
        context: int,
        expected: Sequence[float],
        least: float,
    ) -> tuple[int, list[int], float, float] | None:
        """Chain, drafts of each request, expected tokens and seconds of the cycle that is worth most of those
        that verify the likeliest drafts of a batch only, where whole windows of the shapes have the
        ``expected`` tokens; None where none is worth ``least``."""
        best, size = None, len(eases)
        for number in self._packable(size):
            packings = self.costs.packings(size, context, number)
            at_best = self.costs.at_best(size, number, self._used, is_packed=True)
            if not packings.may_be_worth(least, size, expected[number], at_best * self._rate):
                continue
            steps = self.shapes[number].steps
            reached = self._expected_reach(eases, rows, told, number)
            ranked = [*reached]
            for i, ease in enumerate(eases):
                if ease.num_unseen >= UNSEEN:
                    ranked[i * steps] = 1.0
            # A draft behind those that it depends on.
            order = sorted(range(len(ranked)), key=ranked.__getitem__, reverse=True)
            sums = [*accumulate([reached[place] for place in order], initial=float(size))]
            for count, took in zip(packings.counts, packings.seconds, strict=True):
                worth = sums[count] - self._rate * at_best * took
                if worth > least:
                    verified = Counter([place // steps for place in order[:count]])
                    drafts = [verified[i] for i in range(size)]
                    best, least = (number, drafts, sums[count], took), worth
        return best

    def _weights(self, eases: Sequence[Ease]) -> np.ndarray:
        """How often each class of confidence comes up in a request's cycles of each shape, ``[B, M, C]``."""
        weights: np.ndarray = self._tilts * np.array([ease.mix for ease in eases])[:, None]
        return weights / weights.sum(2, keepdims=True)

    def _expected(
        self, eases: Sequence[Ease], rows: Sequence[int], told: Sequence[Sequence[float]]
    ) -> list[float]:
        """Expected tokens of a batch's next cycle in every shape, M of them; those of chains by the draft's
        own confidences, as of :meth:`_told_reach`, where it tells them. ``rows``: places of the eases."""
        lengths = []
        for ease, row, reach in zip(eases, rows, told, strict=True):
            if ease.confidence is None:  # it has just come
                mine: list[float] = (self._lengths[row] * self._weights([ease])[0]).sum(1).tolist()
            else:
                mine = self._length_lists[row][ease.confidence]
            if reach:
                mine, reached = [*mine], [*accumulate(reach, initial=1.0)]
                for number, depth in self._chains.items():
                    if depth < len(reached):
                        mine[number] = reached[depth]
            lengths.append(mine)
        return lengths[0] if len(lengths) == 1 else [*map(sum, zip(*lengths, strict=True))]

    def _expected_reach(
        self, eases: Sequence[Ease], rows: Sequence[int], told: Sequence[Sequence[float]], number: int
    ) -> list[float]:
        """Chance that each depth of each request's next cycle in a chain is accepted with all before it, one
        request behind another; arguments as of :meth:`_expected`."""
        steps, reach = self.shapes[number].steps, self._chain_reach[number]
        found: list[float] = []
        for ease, row, mine in zip(eases, rows, told, strict=True):
            if len(mine) >= steps:
                found += mine[:steps]
            elif ease.confidence is None:
                found += (self._weights([ease])[0, number] @ self._reach[row, number, :, :steps]).tolist()
            else:
                found += reach[row][ease.confidence]
        return found

    def _told_reach(self, ease: Ease) -> list[float]:
        """Chance that each depth is accepted with all before it, by the confidences that the draft tells;
        none where it tells none."""
        if not ease.told:
            return []
        odds = self.calibration.log_odds(ease.told)
        return [*accumulate((chance_of(each + ease.bias[0]) for each in odds), operator.mul)]

    def _usual(self, rows: Sequence[int]) -> float:
        """Tokens of a cycle that texts of eases at ``rows`` usually give, for an average over cycles to
        follow the eases. Those of few requests err, so of one the square root is followed; of a draft that
        tells its chains' chances it is 1, as these follow the text by themselves."""
        if self._tells:
            return 1.0
        usual = sum([self._usual_lengths[place] for place in rows])
        return usual ** (len(rows) / (1.0 + len(rows)))

    def _look(self, eases: Sequence[Ease], context: int) -> None:
        """Decide whether to speculate, and in which shape where confidence is not known."""
        size, now, costs = len(eases), self._number[self.shape], self.costs.of(len(eases), context).seconds
        if size != self._batch_size:
            self._spent = 0.0
        self._batch_size, self._left, self._num_looks = size, HOLD, self._num_looks + 1
        allowed = self._drafting(size)
        drafting, worth, entering, is_much_better, plain = 0, 0.0, 1.0, False, size / costs[0]
        if allowed:
            drafting = now
            if now not in allowed or not self._spent or self._num_looks % WHOLE_LOOK == 0:
                speeds = self._speeds(eases, context, costs)
                at_best = {n: speeds[n] / self.costs.at_best(size, n, self._used) for n in {*allowed, now}}
                drafting, plain = max(allowed, key=at_best.__getitem__), float(speeds[0])
                worth, is_much_better = float(speeds[drafting]), at_best[drafting] > GAIN * at_best[now]
            if self._spent:
                worth = self._gained * self._usual(_rows(eases)) / self._spent
            if not now:
                decoding = HORIZON * costs[drafting]
                entering = decoding / (decoding + self._reading_missed(eases, context))
        is_better = worth > plain
        if self._is_probe:
            self._use(drafting if is_better else 0)
        elif not now and worth * entering > GAIN * plain:
            self._use(drafting)
            self._left = _drafting_cycles(size, HOLD)
        elif now and not is_better:
            self._use(0)
        elif now and is_much_better:
            self._use(drafting)
        elif allowed and self._pays_to_probe(eases, context, drafting, worth / plain):
            self._use(0 if now else drafting, is_probe=True)
            if self.shape.steps:
                self._left = _drafting_cycles(size, PROBE)
        self._rate = max(worth, plain)

    def _pays_to_probe(self, eases: Sequence[Ease], context: int, drafting: int, gain: float) -> bool:
        """Return True if trying the other of plain decoding and ``drafting``, which is worth ``gain`` times
        plain decoding as far as is known, is expected to save more time than it takes (the knowledge
        gradient of two choices), and probes have not lost too much lately."""
        costs, size, is_plain = self.costs.of(len(eases), context).seconds, len(eases), not self.shape.steps
        doubt, distance = self._doubt(eases, drafting), abs(math.log(gain))
        other = NormalDist(-distance, doubt)  # logarithm of its worth beside what is used
        gain_if_better = doubt**2 * other.pdf(0.0) - distance * (1.0 - other.cdf(0.0))
        saved = USE * costs[0] * gain_if_better
        cycles = _drafting_cycles(size, PROBE) if is_plain else PROBE
        lost = cycles * costs[drafting if is_plain else 0] * (1 - math.exp(-distance))
        lost += self._reading_missed(eases, context) if is_plain else self._reading(size, PROBE, context)
        most, num_cycles = MOST_LOSS * costs[0], self._num_plain + self._num_drafting
        self._may_lose = min(self._may_lose, most)
        has_waited = PROBE_LOSS * num_cycles * costs[self._number[self.shape]] >= max(most, lost)
        if not has_waited and (saved < lost or self._may_lose < lost):
            return self._checks(size)
        self._may_lose -= lost
        return True

    def _checks(self, batch_size: int) -> bool:
        """Return True if times of a short measurement are to be compared with plain decoding now, a few times
        at most: cycles that have no graph or recording yet are not timed."""
        kind, is_known = batch_size.bit_length(), batch_size <= self.costs.tuned_to
        if is_known or self._num_drafting < UNCHECKED or self._num_checks[kind] >= CHECKS:
            return False
        is_due = self.costs.needs_comparing(batch_size)
        self._num_checks[kind] += is_due
        return is_due

    def _doubt(self, eases: Sequence[Ease], number: int) -> float:
        """Relative error of what a shape is worth beside plain decoding: of the ease of the texts, and of the
        cost as far as cycles are timed."""
        tilts, lengths = self._tilt_lists[number], self._shape_lengths[number]
        total = variance = shared = 0.0
        for ease, row in zip(eases, _rows(eases), strict=True):
            mix = [*map(operator.mul, tilts, ease.mix)]
            here = sum(map(operator.mul, mix, lengths[row])) / sum(mix)
            easier = sum(map(operator.mul, mix, lengths[min(row + 1, len(EASES) - 1)])) / sum(mix)
            slope = (easier - here) / EASE_SPACING
            total += here
            variance += slope**2 * ease.variance
            shared += 0.0 if ease.information else slope
        variance += shared**2 * self._shared_variance
        of_costs = self.costs.variance(len(eases), number, self._num_cycles)
        return math.sqrt(variance / total**2 + of_costs) + 1e-6

    def _reading_missed(self, eases: Sequence[Ease], context: int) -> float:
        """Seconds in which the draft reads what it has missed."""
        missed = max(ease.num_missed for ease in eases)
        return self._reading(len(eases), missed, context) if missed else 0.0

    def _use(self, number: int, *, is_probe: bool = False) -> None:
        shape = self.shapes[number]
        if is_probe or bool(shape.steps) != bool(self.shape.steps):
            self._num_plain = self._num_drafting = 0
        self.shape, self._is_probe = shape, is_probe
        if is_probe:
            self._left, self._num_timed = PROBE, 0

    def _speeds(self, eases: Sequence[Ease], context: int, costs: Sequence[float]) -> np.ndarray:
        """Expected tokens per second of the batch in every shape, ``[M]``; 0 off its menu. They are kept
        where nothing is learnt: plain cycles say nothing of texts."""
        known = [(ease.value, ease.mix) for ease in eases]
        if known != self._known_eases or costs is not self._known_costs:
            self._known_eases, self._known_costs = known, costs
            self._known_speeds = self._outlook(eases, context).speeds
        return self._known_speeds

    def _outlook(self, eases: Sequence[Ease], context: int) -> "_Outlook":
        """What is expected of the batch in every shape, with as many drafts verified as is fastest; nothing
        off its menu."""
        size, rows, weights = len(eases), _rows(eases), self._weights(eases)
        tokens, allowed = np.zeros(len(self.shapes)), [0, *self._drafting(size)]
        tokens[allowed] = (self._lengths[rows] * weights).sum(2).sum(0)[allowed]
        seconds, verified = np.array(self.costs.of(size, context).seconds), np.ones(len(self.shapes))
        for number in self._packable(size):
            packings = self.costs.packings(size, context, number)
            speed = float(tokens[number] / seconds[number])
            if not packings.may_be_worth(0.0, size, float(tokens[number]), speed):
                continue
            counts, took = np.array(packings.counts), np.array(packings.seconds)
            steps = self.shapes[number].steps
            reached = self._reach[rows, number, :, :steps]
            times = np.broadcast_to(weights[:, number, :, None], reached.shape)
            sums = size + _likeliest(reached.ravel(), times.ravel(), counts)
            best = int((sums / took).argmax())
            if sums[best] / took[best] > tokens[number] / seconds[number]:
                tokens[number], seconds[number] = sums[best], took[best]
                verified[number] = counts[best] / (size * steps)
        return _Outlook(tokens, seconds, verified)

    def _packable(self, batch_size: int) -> list[int]:
        """Numbers of the chains on the menu whose windows can be packed."""
        if self.costs.packed_share is None or batch_size == 1 or not self._edges:
            return []
        return [number for number in self._drafting(batch_size) if number in self._chains]

    def _drafting(self, batch_size: int) -> list[int]:
        """Numbers of the shapes on the menu, plain decoding aside."""
        at = min(bisect_right(self._sizes, batch_size - 1), len(self._sizes) - 1)
        return self._numbers[self._sizes[at]] if self._sizes else []

    def observe(self, ease: Ease, shape: SpecShape, num_accepted: int, num_drafts: int | None = None) -> None:
        """Learn from a cycle of one request, which began with its ``confidence``, and of whose chain the
        first ``num_drafts`` were verified, None for all of the window. The first cycle of a reply tells
        nothing of its text, since replies begin alike, unless it stays the only one (:meth:`leave`)."""
        known = -1 if ease.confidence is None else ease.confidence
        if ease.is_new:
            ease.is_new, ease.first = False, (shape, num_accepted, num_drafts, known)
        else:
            ease.first = None
            self._learn(ease, shape, num_accepted, num_drafts, known)

    def leave(self, ease: Ease) -> None:
        """Learn from the only cycle of a request that has ended, if it had one only."""
        if ease.first is not None:
            ease.told = ()  # what the draft told behind it
            self._learn(ease, *ease.first)
            ease.first = None

    def _learn(
        self, ease: Ease, shape: SpecShape, num_accepted: int, num_drafts: int | None, known: int
    ) -> None:
        """Learn from a cycle that began with the class of confidence ``known``, -1 where it was not."""
        if not shape.steps:
            ease.variance = min(ease.variance + CHANGE, VARIANCE)
            return
        ease.num_unseen = ease.num_unseen + 1 if num_drafts == 0 else 0
        odds = self._odds[self._number[shape]][known][:num_drafts]
        ease.value, ease.variance, information = learn_offset(ease.value, ease.variance, odds, num_accepted)
        if self._number[shape] in self._chains and len(ease.told) >= shape.steps:
            drafted = ease.told[: shape.steps][:num_drafts]
            self.calibration.learn(drafted, ease.bias[0], num_accepted)
            *bias, _ = learn_offset(*ease.bias, self.calibration.log_odds(drafted), num_accepted)
            ease.bias = bias[0], bias[1]
        before, ease.information = ease.information, ease.information + information
        told = _about_all(ease.information) - _about_all(before)
        rate = self._shared_variance * told / (1.0 + self._shared_variance * told)
        self.shared_ease += rate * (_alone(ease) - self.shared_ease)
        self.shared_ease = min(max(self.shared_ease, LEAST_EASE), MOST_EASE)
        self._shared_variance *= 1.0 - rate

    def see(self, ease: Ease, confidence: float | Sequence[float] | None) -> None:
        """Take in the probability that the draft gives its next first token, or those with which each depth
        is accepted with all before it."""
        if confidence is None or isinstance(confidence, float):
            ease.told, probability = (), confidence
        else:
            ease.told, probability = log_odds_of(confidence), confidence[0]
            if ease.told and not self._tells:
                self._tells, self._spent = True, 0.0  # what was averaged is of another kind
        is_known = probability is not None and probability == probability and (self._edges or ease.told)
        ease.confidence = bisect_right(self._edges, probability or 0.0) if is_known else None
        if ease.confidence is not None:
            ease.mix = _with_seen(ease.mix, ease.confidence, MIX_RATE)
            self._num_seen += 1
            rate = max(SHARED_RATE, 1 / self._num_seen)
            self.shared_mix = _with_seen(self.shared_mix, ease.confidence, rate)

    def observe_time(
        self, batch_size: int, shape: SpecShape, context: int, seconds: float, num_rows: int | None = None
    ) -> None:
        """Learn what a cycle of a batch took, whose windows were packed into ``num_rows`` if any. What all
        shapes have in common, such as a machine that has become slower, changes no choice; shapes are
        compared where one follows the other."""
        self.costs.observe(batch_size, self._number[shape], context, seconds, num_rows, self._num_cycles)
        self._num_timed += 1

    def plan(self, batch_sizes: Sequence[int], context: int = 256) -> list[Choice]:
        """What is chosen for batches of average text."""
        choices = []
        for size in batch_sizes:
            average = Ease(self.shared_ease, self.shared_mix)
            outlook = self._outlook([average] * size, context)
            speeds = outlook.speeds
            best = int(speeds.argmax())
            length, seconds = float(outlook.tokens[best]) / size, float(outlook.seconds[best])
            gain, verified = float(speeds[best] / speeds[0]), float(outlook.verified[best])
            choices.append(Choice(size, self.shapes[best], length, 1e3 * seconds, gain, verified))
        return choices


class ToldPolicy(ShapePolicy):
    """Policy that is told the ``shape`` of every cycle: by a measurement, or by the first rank of tensor
    parallelism."""

    def __init__(self, menus: Mapping[int, Sequence[SpecShape]], shape: SpecShape = NO_SPECULATION) -> None:
        shapes = [shape for menu in menus.values() for shape in menu]
        even = AcceptanceTable.even([NO_SPECULATION, *dict.fromkeys(s for s in shapes if s.steps)])
        super().__init__(lambda batch_size, shape, context: 1.0, even, menus)
        self.shape = shape

    def choose(self, eases: Sequence[Ease], context: int) -> SpecShape:
        """See :class:`ShapePolicy`."""
        return self.shape

    def observe_time(
        self, batch_size: int, shape: SpecShape, context: int, seconds: float, num_rows: int | None = None
    ) -> None:
        """See :class:`ShapePolicy`."""


def _drafting_cycles(batch_size: int, most: int) -> int:
    """Cycles of drafting that tell enough of a batch."""
    return min(max(SAMPLES // batch_size, 2), most)


def _alone(ease: Ease) -> float:
    """Value of an ease as its drafts alone say, without what was expected of it before."""
    known = VARIANCE * ease.information
    return ease.began + (ease.value - ease.began) * (1.0 + known) / max(known, 1e-6)


def _about_all(information: float) -> float:
    """Information about what texts have in common, of that about one of them: one text tells little."""
    return information / (1.0 + VARIANCE * information)


def _likeliest(chances: np.ndarray, times: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sums of the largest of chances that come up so many ``times`` each, ``counts`` of them."""
    order = (-chances).argsort()
    chances, times = chances[order], times[order]
    before = times.cumsum() - times
    used: np.ndarray = np.clip(counts[:, None] - before, 0.0, times) @ chances
    return used


def _rows(eases: Sequence[Ease]) -> list[int]:
    """Places of requests' eases, which :func:`learn_offset` keeps within ``EASES``, among them."""
    return [int((ease.value - LEAST_EASE) / EASE_SPACING + 0.5) for ease in eases]


def _with_seen(mix: Sequence[float], seen: int, rate: float) -> list[float]:
    """A mix in which a class has come up once more."""
    after = [each - rate * each for each in mix]
    after[seen] += rate
    return after


def _mean_odds(acceptance: AcceptanceTable, shape: SpecShape) -> list[float]:
    """Log-odds of each depth where the confidence is not known."""
    if not shape.steps:
        return []
    mean = acceptance.shares[shape] @ acceptance.reach[shape]
    whole = AcceptanceTable((), {shape: np.ones(1)}, {shape: mean[None]})
    odds: list[float] = conditional_log_odds(whole, [shape])[0, 0].tolist()
    return odds
