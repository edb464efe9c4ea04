"""Plain decoding or n-grams, chosen by what the engine's own cycles took and gave.

N-grams have no draft whose acceptance could be recorded before: whether they pay depends on how much the text
repeats. So both kinds of cycles are timed while they serve, and the other kind is tried now and then.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence

from eagle_kit.autotune.policy import Choice, RequestAcceptance, ShapePolicy
from eagle_kit.core.shape import NO_SPECULATION, SpecShape

GAIN = 1.03
"""Speed of drafting over plain decoding with which drafting begins."""
FIRST_CYCLES = 4
"""Cycles of each kind that a batch size begins with, and cycles of a trial."""
HOLD = 8
"""Cycles between two decisions."""
PLAIN_BEFORE_TRIAL = 96
"""Plain cycles after which drafting is tried. A trial that accepts nothing and costs half as much again takes
2 % of the time."""
DRAFTING_BEFORE_TRIAL = 192
"""Drafted cycles after which plain decoding is tried."""
NUM_TIMES = 9
"""Cycles of which the median time is taken."""
LEAST_TIMES = 2
"""Least number of times from which a median is taken."""
FIRST_LENGTH = 1.5
"""Tokens of a drafted cycle that are expected before one was observed."""
LENGTH_RATE = 1 / 32
"""Rate at which the average number of tokens of a drafted cycle follows."""
TRIAL_RATE = 1 / 8
"""Rate at which the average follows in a trial of drafting. The average is from an earlier text by then, and
the four cycles of a trial count for 41 % of the new one; at ``LENGTH_RATE`` they would count for 12 %."""


class NgramPolicy(ShapePolicy):
    """Choice between plain decoding and one shape of n-grams, for engines whose cycles are not captured.

    Args:
        shape: of the n-grams.
        batch_sizes: sizes of batches.

    Attributes:
        length: tokens of a drafted cycle for one request, on average of the last ones.
    """

    def __init__(self, shape: SpecShape, batch_sizes: Sequence[int]) -> None:
        super().__init__({size: (NO_SPECULATION, shape) for size in batch_sizes})
        self.origin = f"plain decoding or {shape}, chosen by the times of the cycles as they come"
        self.length = FIRST_LENGTH
        self._ngram_shape = shape
        self._seconds_of: defaultdict[tuple[int, SpecShape], deque[float]] = defaultdict(
            lambda: deque(maxlen=NUM_TIMES)
        )
        self._num_left = 0
        self._num_since_trial = 0
        self._num_observed = 0
        self._size = 0
        self._is_drafting = False
        self._is_trial = False

    def choose(self, requests: Sequence[RequestAcceptance], context: int) -> SpecShape:
        """Choose the shape of the next cycle of a batch."""
        size = len(requests)
        self._num_left -= 1
        self._num_since_trial += 1
        if self._num_left <= 0 or size != self._size:
            self._size = size
            self._decide(size)
        return self.shape

    def _decide(self, size: int) -> None:
        """Choose a shape for the next few cycles."""
        self._is_trial = False

        # Both kinds are timed first.
        for shape in (NO_SPECULATION, self._ngram_shape):
            if len(self._seconds_of[size, shape]) < LEAST_TIMES:
                self._begin(shape, FIRST_CYCLES)
                return

        # The other kind is tried after a while, since the text may have changed.
        most = DRAFTING_BEFORE_TRIAL if self._is_drafting else PLAIN_BEFORE_TRIAL
        if self._num_since_trial >= most:
            self._is_trial = True
            self._begin(NO_SPECULATION if self._is_drafting else self._ngram_shape, FIRST_CYCLES)
            self._num_since_trial = 0
            return

        # Drafting that is in use goes on while it pays; it begins where it clearly does.
        least = 1.0 if self._is_drafting else GAIN
        self._is_drafting = self.gain(size) > least
        self._begin(self._ngram_shape if self._is_drafting else NO_SPECULATION, HOLD)

    def _begin(self, shape: SpecShape, num_cycles: int) -> None:
        """Decode in ``shape`` for some cycles."""
        if shape != self.shape:
            self._num_since_trial = 0
        self.shape = shape
        self._num_left = num_cycles

    def gain(self, size: int) -> float:
        """Speed of drafting over plain decoding in batches of a size that has been timed."""
        plain = statistics.median(self._seconds_of[size, NO_SPECULATION])
        drafted = statistics.median(self._seconds_of[size, self._ngram_shape])
        return self.length * plain / drafted

    def observe(
        self, request: RequestAcceptance, shape: SpecShape, num_accepted: int, num_drafts: int | None = None
    ) -> None:
        """Take in a cycle of one request."""
        if shape != self._ngram_shape:
            return
        self._num_observed += 1
        rate = TRIAL_RATE if self._is_trial else LENGTH_RATE
        rate = max(rate, 1 / (1 + self._num_observed))
        self.length += rate * (1 + num_accepted - self.length)

    def observe_time(
        self, batch_size: int, shape: SpecShape, context: int, seconds: float, num_rows: int | None = None
    ) -> None:
        """Take in what a cycle of a batch took."""
        self._seconds_of[batch_size, shape].append(seconds)

    def plan(self, batch_sizes: Sequence[int], context: int = 256) -> list[Choice]:
        """What is chosen for the batch sizes that have been timed."""
        choices = []
        for size in batch_sizes:
            timed = [self._seconds_of[size, shape] for shape in (NO_SPECULATION, self._ngram_shape)]
            if min(map(len, timed)) < LEAST_TIMES:
                continue
            gain = self.gain(size)
            plain, drafted = (1e3 * statistics.median(times) for times in timed)
            if gain > GAIN:
                choices.append(Choice(size, self._ngram_shape, self.length, drafted, gain))
            else:
                choices.append(Choice(size, NO_SPECULATION, 1.0, plain, 1.0))
        return choices
