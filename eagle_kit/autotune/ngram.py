"""Plain decoding or n-grams, chosen by times and tokens of the engine's own cycles.

The acceptance of n-grams cannot be recorded before: it depends on how much the text repeats itself. So both
kinds of cycles are timed while they serve, and the kind that is not in use is tried now and then.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence

from eagle_kit.autotune.policy import RequestAcceptance, ShapeChoice, ShapePolicy
from eagle_kit.core.shape import NO_SPECULATION, SpecShape

GAIN = 1.03
"""Speed of drafting over plain decoding with which drafting begins."""
FIRST_CYCLES = 4
"""Cycles of each kind before the first decision for a batch size, and cycles of a trial."""
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
"""Weight of a drafted cycle in the average number of its tokens."""
TRIAL_RATE = 1 / 8
"""Weight of a cycle of a trial. The average is from an earlier text by then. The four cycles of a trial count
for 41 % of the new average; at ``LENGTH_RATE`` they would count for 12 %."""


class NgramPolicy(ShapePolicy):
    """Choice between plain decoding and one shape of n-grams, for engines whose cycles are not captured.

    Args:
        shape: of the n-grams.
        batch_sizes: sizes of batches.

    Attributes:
        length: average tokens of a drafted cycle of one request.
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
            other = NO_SPECULATION if self._is_drafting else self._ngram_shape
            self._is_trial = True
            self._begin(other, FIRST_CYCLES)
            self._num_since_trial = 0
            return

        # Drafting begins if it is faster by a margin, and goes on while it is faster at all.
        least = 1.0 if self._is_drafting else GAIN
        self._is_drafting = self.gain(size) > least
        chosen = self._ngram_shape if self._is_drafting else NO_SPECULATION
        self._begin(chosen, HOLD)

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
        self, request: RequestAcceptance, shape: SpecShape, num_accepted: int, num_depths: int | None = None
    ) -> None:
        """See :meth:`ShapePolicy.observe`."""
        if shape != self._ngram_shape:
            return
        self._num_observed += 1
        rate = TRIAL_RATE if self._is_trial else LENGTH_RATE
        rate = max(rate, 1 / (1 + self._num_observed))
        self.length += rate * (1 + num_accepted - self.length)

    def observe_time(
        self, batch_size: int, shape: SpecShape, context: int, seconds: float, num_rows: int | None = None
    ) -> None:
        """See :meth:`ShapePolicy.observe_time`."""
        self._seconds_of[batch_size, shape].append(seconds)

    def plan(self, batch_sizes: Sequence[int], context: int = 256) -> list[ShapeChoice]:
        """Return the choices for the batch sizes that have been timed."""
        choices = []
        for size in batch_sizes:
            plain = self._seconds_of[size, NO_SPECULATION]
            drafted = self._seconds_of[size, self._ngram_shape]
            if min(len(plain), len(drafted)) < LEAST_TIMES:
                continue
            gain = self.gain(size)
            if gain > GAIN:
                milliseconds = 1e3 * statistics.median(drafted)
                choices.append(ShapeChoice(size, self._ngram_shape, self.length, milliseconds, gain))
            else:
                milliseconds = 1e3 * statistics.median(plain)
                choices.append(ShapeChoice(size, NO_SPECULATION, 1.0, milliseconds, 1.0))
        return choices
