"""Probes: a few cycles of what is not used, since what is not used is not known."""

import math
from collections import Counter
from statistics import NormalDist

PROBE = 4
"""Cycles of a probe, which are plain where the rest drafts, or draft where the rest is plain."""
SAMPLES = 16
"""Drafts of all requests after which a probe that drafts may end sooner, in two cycles at least: one reads
what the draft has missed, and is not timed."""
MOST_PROBE = 8
"""Plain cycles after which a probe ends though fewer than two of them could be timed."""
USE = 128
"""Cycles for which what a probe tells is of use."""
PROBE_LOSS, MOST_LOSS, MOST_DEBT = 0.005, 1.5, 0.5
"""Part of the time that probes may take off, what may be saved up of it, and what may be owed, in plain
cycles."""
CHECKS, UNCHECKED = 4, 16
"""How often, for sizes up to each power of two, and after how many cycles of drafting plain decoding is tried
though a short measurement calls it slower, until the two have been compared."""


class Probes:
    """When plain decoding and drafting try each other.

    What a probe is expected to lose is paid when it begins; what drafting has lost beyond that, in the probe
    or in what followed, is owed when it ends, but for what is lost before the first probe.

    Attributes:
        is_on: whether a probe runs.
        num_plain, num_drafting: cycles since the last change between the two.
        lost: seconds that drafting has taken since then, by what cycles cost, beyond those in which plain
            decoding would have given the same tokens.
    """

    def __init__(self) -> None:
        self.is_on, self.num_plain, self.num_drafting = False, 0, 0
        self._num_timed = 0
        self._may_lose = math.inf  # seconds
        self.lost = 0.0
        self._paid = self._paid_next = 0.0  # for what is done now, and for what comes
        self._num_checks: Counter[int] = Counter()  # by the size's power of two

    def begin_other(self) -> None:
        """Count from a change between the two."""
        self.num_plain, self.num_drafting, self._num_timed = 0, 0, 0
        self._may_lose -= max(self.lost - self._paid, 0.0)
        self.lost, self._paid, self._paid_next = 0.0, self._paid_next, 0.0

    def note_times(self, count: int) -> None:
        """Note that so many cycles more were timed."""
        self._num_timed += count

    def lacks_times(self, *, is_plain: bool) -> bool:
        """Return True if a probe has to go on since its times are late, or were left out."""
        timed, most = (2, MOST_PROBE) if is_plain else (1, PROBE)
        return self._num_timed < timed and self.num_plain + self.num_drafting < most

    def save(self, seconds: float) -> None:
        """Allow a part of the time that cycles took to be lost in probes."""
        self._may_lose += PROBE_LOSS * seconds

    def pay(self, gain: float, doubt: float, lost: float, plain: float, since: float) -> bool:
        """Return True if trying the other is expected to save more time than it takes (the knowledge gradient
        of two choices), and probes have not lost too much lately; what this one takes is paid then.

        Args:
            gain: of drafting over plain decoding, as far as is known.
            doubt: its relative error.
            lost: seconds that a probe is expected to take off.
            plain: seconds of a plain cycle.
            since: seconds since the last change.
        """
        distance = abs(math.log(gain))
        other = NormalDist(-distance, doubt)  # logarithm of its worth beside what is used
        gain_if_better = doubt**2 * other.pdf(0.0) - distance * (1.0 - other.cdf(0.0))
        saved, most = USE * plain * gain_if_better, MOST_LOSS * plain
        self._may_lose = max(min(self._may_lose, most), -MOST_DEBT * plain)
        has_waited = PROBE_LOSS * since >= max(most, lost)
        if not has_waited and (saved < lost or self._may_lose < lost):
            return False
        self._may_lose -= lost
        self._paid_next = lost
        return True

    def checks(self, batch_size: int, *, is_due: bool) -> bool:
        """Return True if times of a short measurement are to be compared with plain decoding now, which is
        due, a few times at most: cycles that have no graph or recording yet are not timed."""
        kind = batch_size.bit_length()
        if self.num_drafting < UNCHECKED or self._num_checks[kind] >= CHECKS:
            return False
        self._num_checks[kind] += is_due
        return is_due


def drafting_cycles(batch_size: int, most: int) -> int:
    """Cycles of drafting that tell enough of a batch."""
    return min(max(SAMPLES // batch_size, 2), most)
