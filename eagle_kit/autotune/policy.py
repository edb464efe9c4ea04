"""Which shape the next cycle takes: costs that were measured, acceptance as it comes.

A table says what every shape accepts of average text, by how sure the draft is of its first token. How much
easier or harder a request's text is than that is one number, its *ease*: the log-odds by which each drafted
token is more likely to be accepted. Whatever shape is in use tells it, and it predicts all others.

Every few cycles the policy learns from those before, and decides, from averages, whether to speculate at all
and in which shape. While it speculates, the draft's confidence shortens or widens single cycles: a step that
is worth less than the time that it takes is not drafted. A draft that tells how likely each depth
is accepted (DSpark's confidence head) is believed for chains, but for a calibration by depth, which all
requests teach, and a bias of each request. Whatever it tells, it tells of the text and not of tokens that
will be drawn, so that no choice changes a distribution. How sure the draft is differs by text as well, and a
request's *mix* says how often each class of confidence comes up in it. Cycles that are chosen one by one are
worth more than any single shape, so what counts then is the average of what was expected of them.
A shape is for a batch, not for a request: requests of a cycle share its forwards. But of the drafts of a
chain the target may verify only the likeliest of the batch, whichever requests they belong to, whose rows are
packed.

Legend: M shapes, C classes of confidence.
"""

import math
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from eagle_kit.autotune.acceptance import AcceptanceTable
from eagle_kit.autotune.cost_filter import PLAIN, Kind
from eagle_kit.autotune.cycle_costs import CycleCosts, PackedShare, Packings
from eagle_kit.autotune.lengths import Lengths
from eagle_kit.autotune.probes import PROBE, Probes, drafting_cycles
from eagle_kit.autotune.shapes import Seconds
from eagle_kit.autotune.texts import Ease, Texts, age, places_of
from eagle_kit.core.shape import NO_SPECULATION, SpecShape

WORTH_CYCLES, LEAST_CYCLES = 64, 8
"""Cycles of one request over which the worth of speculation is averaged, and least cycles of a batch, as many
as what was expected at first counts."""
GAIN = 1.03
"""Predicted speed over that of the shape in use for which it is changed; plain decoding needs none."""
LEAST_GAIN = 0.02
"""Part of a cycle's tokens that another shape must be worth for a single cycle."""
HOLD, CLEAR, WHOLE_LOOK = 8, 1.1, 4
"""Cycles between two looks, twice as many where one of plain decoding and drafting is faster by ``CLEAR`` by
costs of a long measurement, and looks between two that compare all shapes, where cycles are chosen one by
one: those have all shapes to choose from, whichever is in use."""
LEARN = 2
"""Cycles of a new batch that are learnt from together; then twice as many each time, up to ``HOLD``."""
HORIZON = 32
"""Cycles in which it has to pay that a draft reads what it has missed."""
UNSEEN = 16
"""Cycles without a verified draft after which a request has one verified: its text may have become easier."""

Reading = Callable[[int, int, int], float]


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


class _Packable(NamedTuple):
    """A chain whose windows can be packed: its ``number`` and ``steps``, and what that costs, at best
    ``part`` of it."""

    number: int
    steps: int
    packings: Packings
    part: float


class _Terms(NamedTuple):
    """What single cycles are chosen by until more is learnt.

    Attributes:
        num_cycles: that are learnt from together.
        eases: of the batch, with their ``places`` among those of the tables.
        usual: tokens that a cycle of theirs usually gives.
        seconds: of a cycle in every shape.
        prices: tokens that the time of a cycle is worth, by the numbers of the shapes on the menu.
        rate: tokens that a second is worth.
        packable: chains that can be packed.
    """

    num_cycles: int
    eases: Sequence[Ease]
    places: list[int]
    usual: float
    seconds: Sequence[float]
    prices: dict[int, float]
    rate: float
    packable: list[_Packable]


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
        texts: what is known of the texts that are decoded.
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
        self.num_drafts: list[int] | None = None
        used = {shape for menu in menus.values() for shape in menu if shape.steps}
        self.shapes = [NO_SPECULATION, *sorted(used)]
        self._number = {shape: i for i, shape in enumerate(self.shapes)}
        self.costs = CycleCosts(self.shapes, seconds, packed_share, tuned_to)
        self._lengths = Lengths(acceptance, self.shapes)
        self.texts = Texts(self._lengths.edges, self._lengths.usual_mix.tolist(), is_average=is_average)
        self._sizes = sorted(menus)
        self._numbers = {
            size: [self._number[shape] for shape in self.shapes if shape.steps and shape in menu]
            for size, menu in menus.items()
        }
        self.shape, self._used = NO_SPECULATION, PLAIN
        # Of a cycle that was chosen, on average: tokens over those that its texts usually give, and seconds.
        self._gained = self._spent = 0.0
        self._num_averaged = 0
        self._num_cycles = self._num_looks = self._num_unlearnt = 0
        self._batch_size, self._left, self._rate = 0, 0, 0.0
        self._num_together = LEARN
        self._probes = Probes()
        self._share = self._plain_share = 0.0  # of a cycle's seconds for one request, and of a plain one's
        self._times: list[tuple[int, int, int, float, int | None, int]] = []
        self._terms: _Terms | None = None
        self._known: tuple[list[tuple[float, Sequence[float]]], Sequence[float], _Outlook] | None = None

    def new_request(self) -> Ease:
        """Return the outlook that a request begins with, that of those before it."""
        self.learn()
        return self.texts.new_request(self._batch_size)

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
        self._num_cycles += 1
        self._num_unlearnt += 1
        self.num_drafts = None
        terms = self._terms
        if self._left <= 0 or terms is None or eases != terms.eases or self._has_enough(terms):
            terms = self._renew(eases, context)
        if not self.shape.steps:
            self._probes.num_plain += 1
            return self.shape
        self._probes.num_drafting += 1
        if all([ease.confidence is None for ease in eases]):
            self._used = Kind(self._number[self.shape])
            self._note_seconds(terms, terms.seconds[self._used.number])
            return self.shape
        told = [self.texts.told_reach(ease) for ease in eases] if self.texts.tells else []
        expected = self._lengths.expected(eases, terms.places, told)
        base = self._number[self.shape]
        worth = {number: expected[number] - price for number, price in terms.prices.items()}
        best = max(worth, key=worth.__getitem__)
        if base in worth and worth[best] < worth[base] + LEAST_GAIN * expected[base]:
            best = base
        tokens, seconds = expected[best], terms.seconds[best]
        packed = self._pack(terms, told, expected, worth[best] + LEAST_GAIN * tokens)
        if packed is not None:
            best, self.num_drafts, tokens, seconds = packed
        if len(eases) == self._batch_size:
            self._average(tokens / terms.usual, seconds, context)
        self._note_seconds(terms, seconds)
        self._used = Kind(best, self.num_drafts is not None)
        return self.shapes[best]

    def _note_seconds(self, terms: _Terms, seconds: float) -> None:
        """Note what a cycle of drafting takes, for what it loses to be known when its tokens are."""
        self._share, self._plain_share = seconds / len(terms.eases), terms.seconds[0] / len(terms.eases)

    def _has_enough(self, terms: _Terms) -> bool:
        """Return True if there is enough to learn from; what plain cycles took can wait for a look."""
        return self.shape.steps > 0 and self._num_unlearnt >= terms.num_cycles

    def _usual(self, places: Sequence[int]) -> float:
        """Tokens that a cycle of texts usually gives, for an average over cycles to follow their eases. A
        draft that tells its chains' chances follows the text by itself."""
        return 1.0 if self.texts.tells else self._lengths.usual(places)

    def _average(self, gained: float, seconds: float, context: int) -> None:
        """Take a cycle into the average of speculation's worth."""
        assert self._terms is not None
        eases, usual, base = self._terms.eases, self._terms.usual, self._number[self.shape]
        if not self._spent:
            self._num_averaged, outlook = 0, self._known_outlook(eases, context)
            self._gained, self._spent = float(outlook.tokens[base]) / usual, float(outlook.seconds[base])
        self._num_averaged += 1
        lasting = min(len(eases) / WORTH_CYCLES, 1 / LEAST_CYCLES)
        rate = max(lasting, 1 / (LEAST_CYCLES + self._num_averaged))  # the first ones are an average of all
        self._gained += rate * (gained - self._gained)
        self._spent += rate * (seconds - self._spent)

    def _pack(
        self, terms: _Terms, told: Sequence[Sequence[float]], expected: Sequence[float], least: float
    ) -> tuple[int, list[int], float, float] | None:
        """Chain, drafts of each request, expected tokens and seconds of the cycle that is worth most of those
        that verify the likeliest drafts of a batch only, where whole windows of the shapes have the
        ``expected`` tokens; None where none is worth ``least``."""
        best, size, eases = None, len(terms.eases), terms.eases
        for number, steps, packings, part in terms.packable:
            rate = part * terms.rate
            if not packings.may_be_worth(least, size, expected[number], rate):
                continue
            reached = self._lengths.expected_reach(eases, terms.places, told, number)
            ranked = [*reached]
            for i, ease in enumerate(eases):
                if ease.num_unseen >= UNSEEN:
                    ranked[i * steps] = 1.0
            # A draft behind those that it depends on.
            order = sorted(range(len(ranked)), key=ranked.__getitem__, reverse=True)
            sums = [*accumulate([reached[place] for place in order], initial=float(size))]
            for count, took in zip(packings.counts, packings.seconds, strict=True):
                worth = sums[count] - rate * took
                if worth > least:
                    verified = Counter([place // steps for place in order[:count]])
                    drafts = [verified[i] for i in range(size)]
                    best, least = (number, drafts, sums[count], took), worth
        return best

    def _renew(self, eases: Sequence[Ease], context: int) -> _Terms:
        """Learn, look anew whether to speculate if that is due, and say what cycles are chosen by from now
        on."""
        seconds, size = self.costs.of(len(eases), context).seconds, len(eases)
        if not self.shape.steps:
            age(eases, self._num_unlearnt)
        self._probes.save(self._num_unlearnt * seconds[self._number[self.shape]])
        self._num_unlearnt = 0
        self.learn()
        if self._terms is None or eases != self._terms.eases:
            self._num_together = LEARN
            if self.texts.tells:
                self._spent = 0.0  # the average is of these texts
        if self._left <= 0 and self._probes.is_on:
            self._left = int(self._probes.lacks_times(is_plain=not self.shape.steps))
        may_stay = self._probes.is_on and self._number[self.shape] in (0, *self._drafting(size))
        if self._left <= 0 or (size != self._batch_size and not may_stay):
            self._look(eases, context)
        self._terms = self._make_terms(eases, context)
        self._num_together = min(2 * self._num_together, HOLD)
        return self._terms

    def _make_terms(self, eases: Sequence[Ease], context: int) -> _Terms:
        places, size = places_of(eases), len(eases)
        seconds, part = self.costs.of(size, context).seconds, self.costs.at_best
        prices: dict[int, float] = {}
        packable = []
        if self.shape.steps:
            for number in self._drafting(size):
                prices[number] = self._rate * seconds[number] * part(size, number, self._used)
            for number in self._packable(size):
                packings = self.costs.packings(size, context, number)
                at_best = part(size, number, self._used, is_packed=True)
                packable.append(_Packable(number, self.shapes[number].steps, packings, at_best))
        return _Terms(
            num_cycles=self._num_together,
            eases=list(eases),
            places=places,
            usual=self._usual(places),
            seconds=seconds,
            prices=prices,
            rate=self._rate,
            packable=packable,
        )

    def learn(self) -> None:
        """Learn from the cycles that were observed."""
        times, self._times = self._times, []
        for each in times:
            self.costs.observe(*each)
        self._probes.note_times(len(times))
        self.texts.learn()

    def _look(self, eases: Sequence[Ease], context: int) -> None:
        """Decide whether to speculate, and in which shape where confidence is not known."""
        size, now, costs = len(eases), self._number[self.shape], self.costs.of(len(eases), context).seconds
        if size != self._batch_size or self._probes.num_plain > PROBE:
            self._spent = 0.0  # what was expected before is forgotten
        self._batch_size, self._num_looks = size, self._num_looks + 1
        allowed = self._drafting(size)
        drafting, worth, entering, is_much_better, plain = 0, 0.0, 1.0, False, size / costs[0]
        is_paid = self._probes.is_on  # with the probe
        reading = 0.0 if now or is_paid else self._reading_missed(eases, context)
        if allowed:
            drafting = now
            if now not in allowed or not self._spent or self._num_looks % WHOLE_LOOK == 0:
                speeds = self._known_outlook(eases, context).speeds
                at_best = {n: speeds[n] / self.costs.at_best(size, n, self._used) for n in {*allowed, now}}
                drafting, plain = max(allowed, key=at_best.__getitem__), float(speeds[0])
                worth, is_much_better = float(speeds[drafting]), at_best[drafting] > GAIN * at_best[now]
            if self._spent:
                worth = self._gained * self._usual(places_of(eases)) / self._spent
            if not now:
                decoding = HORIZON * costs[drafting]
                entering = decoding / (decoding + reading)
        is_better = worth > plain
        is_clear = max(worth, plain) > CLEAR * min(worth, plain) and size <= self.costs.tuned_to
        self._left = (1 + is_clear) * HOLD
        if self._probes.is_on:
            self._use(drafting if is_better else 0, reading)
        elif not now and worth * entering > GAIN * plain:
            self._use(drafting, reading)
            self._left = drafting_cycles(size, HOLD)
        elif now and not is_better:
            self._use(0, reading)
        elif now and is_much_better:
            self._use(drafting, reading)
        elif allowed and self._pays_to_probe(eases, context, drafting, worth / plain, reading):
            self._use(0 if now else drafting, reading, is_probe=True)
            self._left = drafting_cycles(size, PROBE) if self.shape.steps else PROBE
        self._rate = max(worth, plain)

    def _pays_to_probe(
        self, eases: Sequence[Ease], context: int, drafting: int, gain: float, reading: float
    ) -> bool:
        """Return True if the other of plain decoding and ``drafting``, which is worth ``gain`` times plain
        decoding as far as is known, is to be tried; the draft reads what it has missed for ``reading``
        seconds."""
        costs, size, is_plain = self.costs.of(len(eases), context).seconds, len(eases), not self.shape.steps
        cycles = drafting_cycles(size, PROBE) if is_plain else PROBE
        lost = cycles * costs[drafting if is_plain else 0] * (1.0 - min(gain, 1.0 / gain))
        lost += reading if is_plain else self._reading(size, PROBE, context)
        num_cycles = self._probes.num_plain + self._probes.num_drafting
        since = num_cycles * costs[self._number[self.shape]]
        if self._probes.pay(gain, self._doubt(eases, drafting), lost, costs[0], since):
            return True
        if size <= self.costs.tuned_to:
            return False
        return self._probes.checks(size, is_due=self.costs.needs_comparing(size))

    def _doubt(self, eases: Sequence[Ease], number: int) -> float:
        """Relative error of what a shape is worth beside plain decoding: of the ease of the texts, and of the
        cost as far as cycles are timed."""
        of_texts = self._lengths.relative_variance(eases, number, self.texts.shared_variance)
        return math.sqrt(of_texts + self.costs.variance(len(eases), number, self._num_cycles)) + 1e-6

    def _reading_missed(self, eases: Sequence[Ease], context: int) -> float:
        """Seconds in which the draft reads what it has missed."""
        missed = max(ease.num_missed for ease in eases)
        return self._reading(len(eases), missed, context) if missed else 0.0

    def _use(self, number: int, reading: float, *, is_probe: bool = False) -> None:
        """Go on with a shape; when drafting begins the draft reads what it has missed for ``reading``
        seconds."""
        shape = self.shapes[number]
        if is_probe or bool(shape.steps) != bool(self.shape.steps):
            self._probes.begin_other()
            self._probes.lost += reading if shape.steps else 0.0
        self.shape, self._probes.is_on = shape, is_probe

    def _known_outlook(self, eases: Sequence[Ease], context: int) -> _Outlook:
        """See :meth:`_outlook`; the last one where nothing was learnt since, as in plain cycles."""
        known, costs = [(ease.value, ease.mix) for ease in eases], self.costs.of(len(eases), context).seconds
        if self._known is None or known != self._known[0] or costs is not self._known[1]:
            self._known = known, costs, self._outlook(eases, context)
        return self._known[2]

    def _outlook(self, eases: Sequence[Ease], context: int) -> _Outlook:
        """What is expected of the batch in every shape, with as many drafts verified as is fastest; nothing
        off its menu."""
        size, places = len(eases), places_of(eases)
        tokens, allowed = np.zeros(len(self.shapes)), [0, *self._drafting(size)]
        weights = self._lengths.weights([ease.mix for ease in eases])
        tokens[allowed] = self._lengths.mean(places, weights)[allowed]
        seconds, verified = np.array(self.costs.of(size, context).seconds), np.ones(len(self.shapes))
        for number in self._packable(size):
            packings = self.costs.packings(size, context, number)
            speed = float(tokens[number] / seconds[number])
            if not packings.may_be_worth(0.0, size, float(tokens[number]), speed):
                continue
            counts, took = np.array(packings.counts), np.array(packings.seconds)
            reached = self._lengths.reach(places, number)
            times = np.broadcast_to(weights[:, number, :, None], reached.shape)
            sums = size + _likeliest(reached.ravel(), times.ravel(), counts)
            best = int((sums / took).argmax())
            if sums[best] / took[best] > tokens[number] / seconds[number]:
                tokens[number], seconds[number] = sums[best], took[best]
                verified[number] = counts[best] / (size * self.shapes[number].steps)
        return _Outlook(tokens, seconds, verified)

    def _packable(self, batch_size: int) -> list[int]:
        """Numbers of the chains on the menu whose windows can be packed."""
        if self.costs.packed_share is None or batch_size == 1 or not self._lengths.edges:
            return []
        return [number for number in self._drafting(batch_size) if number in self._lengths.chains]

    def _drafting(self, batch_size: int) -> list[int]:
        """Numbers of the shapes on the menu, plain decoding aside."""
        at = min(bisect_right(self._sizes, batch_size - 1), len(self._sizes) - 1)
        return self._numbers[self._sizes[at]] if self._sizes else []

    def observe(self, ease: Ease, shape: SpecShape, num_accepted: int, num_drafts: int | None = None) -> None:
        """Take in a cycle of one request, which began with its ``confidence``, and of whose chain the first
        ``num_drafts`` were verified, None for all of the window. A plain cycle tells that a young reply goes
        on."""
        if not shape.steps:
            self.texts.observe(ease, 0, (), ())
            return
        number = self._number[shape]
        self._probes.lost += self._share - (1 + num_accepted) * self._plain_share
        ease.num_unseen = ease.num_unseen + 1 if num_drafts == 0 else 0
        odds, told = self._lengths.odds(number, ease.confidence), ease.told
        if number not in self._lengths.chains or len(told) < shape.steps:
            told = ()
        if num_drafts is not None:
            odds = odds[:num_drafts]
        self.texts.observe(ease, num_accepted, odds, told[: len(odds)])

    def leave(self, ease: Ease) -> None:
        """Note that a request has ended."""
        self.texts.leave(ease)

    def see(self, ease: Ease, confidence: float | Sequence[float] | None) -> None:
        """Take in what the draft tells of its next tokens, see :meth:`Texts.see`."""
        did_tell = self.texts.tells
        self.texts.see(ease, confidence)
        if self.texts.tells != did_tell:
            self._spent, self._terms = 0.0, None  # what was averaged is of another kind

    def observe_time(
        self, batch_size: int, shape: SpecShape, context: int, seconds: float, num_rows: int | None = None
    ) -> None:
        """Take in what a cycle of a batch took, whose windows were packed into ``num_rows`` if any. What all
        shapes have in common, such as a machine that has become slower, changes no choice; shapes are
        compared where one follows the other."""
        number = self._number[shape]
        self._times.append((batch_size, number, context, seconds, num_rows, self._num_cycles))

    def plan(self, batch_sizes: Sequence[int], context: int = 256) -> list[Choice]:
        """What is chosen for batches of average text."""
        choices = []
        for size in batch_sizes:
            outlook = self._outlook([self.texts.average()] * size, context)
            speeds = outlook.speeds
            best = int(speeds.argmax())
            length, seconds = float(outlook.tokens[best]) / size, float(outlook.seconds[best])
            gain, verified = float(speeds[best] / speeds[0]), float(outlook.verified[best])
            choices.append(Choice(size, self.shapes[best], length, 1e3 * seconds, gain, verified))
        return choices


class ToldPolicy(ShapePolicy):
    """Policy that is told the ``shape`` of every cycle, by a measurement, or by the first rank of tensor
    parallelism, and learns nothing."""

    def __init__(self, menus: Mapping[int, Sequence[SpecShape]], shape: SpecShape = NO_SPECULATION) -> None:
        shapes = [shape for menu in menus.values() for shape in menu]
        even = AcceptanceTable.even([NO_SPECULATION, *dict.fromkeys(s for s in shapes if s.steps)])
        super().__init__(lambda batch_size, shape, context: 1.0, even, menus)
        self.shape = shape

    def choose(self, eases: Sequence[Ease], context: int) -> SpecShape:
        """Return the shape that was told."""
        return self.shape

    def observe(self, ease: Ease, shape: SpecShape, num_accepted: int, num_drafts: int | None = None) -> None:
        """Do nothing."""

    def leave(self, ease: Ease) -> None:
        """Do nothing."""

    def see(self, ease: Ease, confidence: float | Sequence[float] | None) -> None:
        """Do nothing."""

    def observe_time(
        self, batch_size: int, shape: SpecShape, context: int, seconds: float, num_rows: int | None = None
    ) -> None:
        """Do nothing."""


def _likeliest(chances: np.ndarray, times: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sums of the largest of chances that come up so many ``times`` each, ``counts`` of them."""
    order = (-chances).argsort()
    chances, times = chances[order], times[order]
    before = times.cumsum() - times
    used: np.ndarray = np.clip(counts[:, None] - before, 0.0, times) @ chances
    return used
