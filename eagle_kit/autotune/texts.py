"""What the drafts of texts tell of them: how easy each is, how sure the draft is of it, and what texts have
in common.

What cycles bring is kept as it comes and learnt later, all of it at once: between two cycles, behind a
forward that has emptied the processor's caches, Python takes several times what it takes in a loop.
"""

import operator
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from eagle_kit.autotune.calibration import Calibration
from eagle_kit.autotune.chances import (
    CHANGE,
    LEAST_EASE,
    MOST_EASE,
    VARIANCE,
    chance_of,
    learn_offset,
    log_odds_of,
    place_of,
)

SHARED_VARIANCE, SHARED_CHANGE, TOGETHER = 0.25, 0.06, 4
"""Variance at first of what texts have in common, and what every new request adds to it: tasks change. Those
of a batch of more than ``TOGETHER`` add as much as so many."""
MIX_RATE, SHARED_RATE, AVERAGE_SEEN = 0.1, 0.02, 16
"""Rates at which a request's mix and that of all follow what is seen, and confidences for which the mix of
another draft counts."""


@dataclass(eq=False)
class Ease:
    """Outlook of one request.

    Attributes:
        value: ease of its text, learnt from its cycles.
        mix: how often each of the C classes of the draft's confidence in its next token comes up.
        confidence: this class; None where it is not known.
        variance: of the ease.
        num_missed: tokens that the draft has not read.
        information: that its drafts have given about the ease, one over a variance.
        began: the ease at first, that of texts before it.
        told: log-odds of the confidences that the draft tells, that each depth of a chain is accepted where
            all before it are; empty where it tells none.
        bias: by which they are wrong once calibrated, and its variance.
        num_unseen: cycles since a draft of it was verified while others' were.
        is_new: whether no cycle was learnt from yet.
        first: its only cycle so far, of which nothing was learnt.
    """

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
    first: "Outcome | None" = None

    @property
    def is_young(self) -> bool:
        """True as long as it may have had one cycle only."""
        return self.is_new or self.first is not None


class Outcome(NamedTuple):
    """What became of a request's cycle: drafts ``num_accepted``, the ``odds`` of those that were verified,
    by average text, and the ``told`` log-odds of these."""

    ease: Ease
    num_accepted: int
    odds: Sequence[float]
    told: Sequence[float]


class Texts:
    """Eases and mixes of requests, and those that new ones begin with.

    Args:
        edges: between the classes of confidence.
        usual_mix: how often each class comes up in average text.
        is_average: whether that is of another draft, so that what texts have in common is learnt faster at
            first.

    Attributes:
        shared_ease: what the eases of texts have in common, known to ``shared_variance``.
        calibration: of the confidences that the draft tells of each depth, if it ``tells`` them.
    """

    def __init__(self, edges: Sequence[float], usual_mix: Sequence[float], *, is_average: bool) -> None:
        self._edges = edges
        self.shared_ease, self.shared_mix, self.calibration = 0.0, usual_mix, Calibration()
        self.shared_variance = VARIANCE if is_average else SHARED_VARIANCE
        self._num_seen = AVERAGE_SEEN if is_average else round(1 / SHARED_RATE)  # confidences in the mix
        self.tells = False
        self._outcomes: list[Outcome | Ease] = []
        self._seen: list[tuple[Ease, int]] = []

    def average(self) -> Ease:
        """Return the outlook of a text of which nothing is known."""
        return Ease(self.shared_ease, self.shared_mix, began=self.shared_ease)

    def new_request(self, batch_size: int) -> Ease:
        """Return the outlook that a request of such a batch begins with."""
        change = SHARED_CHANGE * TOGETHER / max(batch_size, TOGETHER)
        self.shared_variance = min(self.shared_variance + change, VARIANCE)
        return self.average()

    def see(self, ease: Ease, confidence: float | Sequence[float] | None) -> None:
        """Take in the probability that the draft gives its next first token, or those with which each depth
        is accepted with all before it."""
        if confidence is None or isinstance(confidence, float):
            ease.told, probability = (), confidence
        else:
            ease.told, probability = log_odds_of(confidence), confidence[0]
            self.tells = self.tells or bool(ease.told)
        is_known = probability is not None and probability == probability and (self._edges or ease.told)
        ease.confidence = bisect_right(self._edges, probability or 0.0) if is_known else None
        if ease.confidence is not None:
            self._seen.append((ease, ease.confidence))

    def observe(self, ease: Ease, num_accepted: int, odds: Sequence[float], told: Sequence[float]) -> None:
        """Keep what became of a cycle, see :class:`Outcome`."""
        self._outcomes.append(Outcome(ease, num_accepted, odds, told))

    def leave(self, ease: Ease) -> None:
        """Note that a request has ended: its only cycle counts, if it had one only."""
        self._outcomes.append(ease)

    def learn(self) -> None:
        """Learn from all that was kept. The first cycle of a reply tells nothing of its text, since replies
        begin alike, unless it stays the only one."""
        self._learn_mixes()
        outcomes, self._outcomes = self._outcomes, []
        before: dict[Ease, float] = {}
        for outcome in outcomes:
            if isinstance(outcome, Ease):
                ease, first = outcome, outcome.first
                ease.first = None
                if first is not None:
                    before.setdefault(ease, ease.information)
                    self._learn(first)
                continue
            ease = outcome.ease
            if ease.is_new:
                ease.is_new, ease.first = False, outcome
            else:
                ease.first = None
                before.setdefault(ease, ease.information)
                self._learn(outcome)
        for ease, known in before.items():
            told = _about_all(ease.information) - _about_all(known)
            rate = self.shared_variance * told / (1.0 + self.shared_variance * told)
            self.shared_ease += rate * (_alone(ease) - self.shared_ease)
            self.shared_ease = min(max(self.shared_ease, LEAST_EASE), MOST_EASE)
            self.shared_variance *= 1.0 - rate

    def _learn(self, outcome: Outcome) -> None:
        ease, num_accepted, odds, told = outcome
        ease.value, ease.variance, information = learn_offset(ease.value, ease.variance, odds, num_accepted)
        ease.information += information
        if told:
            self.calibration.learn(told, ease.bias[0], num_accepted)
            *bias, _ = learn_offset(*ease.bias, self.calibration.log_odds(told), num_accepted)
            ease.bias = bias[0], bias[1]

    def _learn_mixes(self) -> None:
        seen, self._seen = self._seen, []
        if not seen:
            return
        by_ease: dict[Ease, list[int]] = {}
        for ease, confidence in seen:
            by_ease.setdefault(ease, []).append(confidence)
        for ease, classes in by_ease.items():
            ease.mix = _with_seen(ease.mix, classes, lambda _: MIX_RATE)
        before, self._num_seen = self._num_seen, self._num_seen + len(seen)
        classes = [confidence for _, confidence in seen]
        self.shared_mix = _with_seen(self.shared_mix, classes, lambda n: max(SHARED_RATE, 1 / (before + n)))

    def told_reach(self, ease: Ease) -> list[float]:
        """Chance that each depth is accepted with all before it, by the confidences that the draft tells;
        none where it tells none."""
        odds = self.calibration.log_odds(ease.told)
        return [*accumulate([chance_of(each + ease.bias[0]) for each in odds], operator.mul)]


def age(eases: Sequence[Ease], num_cycles: int) -> None:
    """Let eases become less certain over cycles that told nothing of them."""
    for ease in eases:
        ease.variance = min(ease.variance + num_cycles * CHANGE, VARIANCE)


def places_of(eases: Sequence[Ease]) -> list[int]:
    """List the places of requests' eases among those of the tables."""
    return [place_of(ease.value) for ease in eases]


def _alone(ease: Ease) -> float:
    """Value of an ease as its drafts alone say, without what was expected of it before."""
    known = VARIANCE * ease.information
    return ease.began + (ease.value - ease.began) * (1.0 + known) / max(known, 1e-6)


def _about_all(information: float) -> float:
    """Information about what texts have in common, of that about one of them: one text tells little."""
    return information / (1.0 + VARIANCE * information)


def _with_seen(mix: Sequence[float], classes: Sequence[int], rate: Callable[[int], float]) -> list[float]:
    """A mix in which ``classes`` have come up once more, the n-th of them, from 1 on, at ``rate(n)``."""
    seen, weight = [0.0] * len(mix), 1.0
    for number in range(len(classes), 0, -1):
        share = rate(number)
        seen[classes[number - 1]] += weight * share
        weight *= 1.0 - share
    return [weight * known + new for known, new in zip(mix, seen, strict=True)]
