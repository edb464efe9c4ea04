"""Choice of each cycle's shape by expected tokens per second.

Expected tokens follow from a table of acceptance and an offset of each request; expected seconds from a table
of costs and the times of cycles. There are two choices:

* Every two to eight cycles a decision compares plain decoding with the best drafting shape by expected tokens
  per second. It is held until the next one. The other of the two is explored within a budget of time.
* While drafting, a single cycle may take another drafting shape, if the draft's confidence is known before
  it (in engines without lag): the one with the largest *tokens - rate x seconds*. The rate is the tokens per
  second that are reached now. A cycle of t seconds takes the time in which rate x t tokens would be emitted
  anyway, so only tokens beyond these raise the speed (renewal reward).

Read :class:`ShapeChooser` first, which decides. It uses :class:`AcceptanceModel` for tokens,
:class:`CostCorrection` for seconds, and :class:`ExplorationBudget` for explorations.

Legend: B requests, M shapes, C confidence classes, S draft steps, G offsets of the tables.
"""

import itertools
import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from eagle_kit.autotune.acceptance import AcceptanceTable
from eagle_kit.autotune.chances import chance_of, conditional_log_odds, log_odds_of, reach_of
from eagle_kit.autotune.confidence_calibration import Calibration
from eagle_kit.autotune.policy import RequestAcceptance, ShapeChoice, ShapePolicy
from eagle_kit.autotune.row_budgets import RowBudgets, expected_accepted, tokens_by_num_drafts
from eagle_kit.autotune.shapes import Seconds
from eagle_kit.core.shape import SpecShape

PLAIN = 0
"""Index of plain decoding among shapes and among candidates."""

# Decisions
HOLD = 8  # cycles for which a decision is held
FIRST_HOLD = 2  # cycles of the first decision for a new batch; each later one is held twice as long
MIN_GAIN = 1.03  # predicted speed over plain decoding with which drafting begins
MIN_CYCLE_GAIN = 0.02  # gain over a cycle's tokens with which it has another shape than the one in use
GAIN_CYCLES = 64  # of one request, over which the gain of such cycles is averaged
MIN_GAIN_CYCLES = 8  # of a batch
BACKFILL_CYCLES = 32  # drafting cycles over which the cost of a draft backfill is spread

# Acceptance, in log-odds
MAX_OFFSET = 6.0
OFFSET_STEP = 0.25
OFFSETS = np.arange(-MAX_OFFSET, MAX_OFFSET + OFFSET_STEP, OFFSET_STEP)  # of the tables
OFFSET_VARIANCE = 1.0  # of requests around the offset that they share
OFFSET_CHANGE = 0.01  # variance that a cycle adds to a request's offset
SHARED_VARIANCE = 0.25  # of the shared offset at first; OFFSET_VARIANCE with another draft's table
SHARED_CHANGE = 0.06  # variance that a new request adds to the shared offset: tasks change
FIRST_WEIGHT = 0.25  # of a request's first cycle: all responses begin alike
HISTOGRAM_RATE = 0.1  # weight of a cycle in its request's confidence histogram
SHARED_HISTOGRAM_RATE = 0.02  # and in the shared one
AVERAGE_COUNT = 16  # confidences that the histogram of another draft's table counts for

# Costs: standard deviations of logarithms of times, unless said otherwise
CONTEXT_SPAN = 256  # tokens of context over which the table's costs count as constant
DRAFTING_ERROR = 0.1  # of the cost of drafting over plain decoding in the table
SHAPE_ERROR = 0.11  # of the cost of each shape over the others
MAX_ERROR = 0.5  # of either after an outlier
LEVEL_ERROR = 2.0  # of the machine's speed before the first time
LEVEL_CHANGE = 0.03  # of the machine's speed from cycle to cycle
HALF_LIFE = 3500  # cycles in which half of the learnt corrections is forgotten
CYCLE_NOISE = 0.08  # of a single cycle at first
MAX_CYCLE_NOISE = 0.25
NOISE_RATE = 0.05  # weight of a pair of cycles in the variance of single ones
SWITCH_NOISE = 0.1  # further noise of the first cycle of a shape after another one
OUTLIER = 3.0  # standard errors beyond which a time is an outlier: it widens errors and is not learnt
SETTLED_CYCLES = 6  # after a change between plain decoding and drafting, until the machine's speed is known
LEVEL_SHIFT = 0.1  # change of the machine's speed after which the error of drafting's cost is widened
SHIFT_ERROR = 0.6  # that error over the change
OPTIMISM = 0.3  # standard errors by which a shape may cost less than the estimate, so that it is tried again

# Exploration
EXPLORATION_SHARE = 0.005  # of all time, which explorations may lose
MAX_SAVED = 1.5  # most of that time that may be saved up, in plain cycles
MAX_DEBT = 0.5  # most that may be lost beyond it, in plain cycles
EXPLORED_CYCLES = 4  # cycles of an exploration
EXPLORED_DRAFTS = 16  # requests' cycles after which an exploration of drafting may end sooner
LEAST_TIMED = 2  # times that it needs; times come late, and those of cycles without a recording are left out
MAX_EXPLORED_CYCLES = 8  # of plain decoding, while times are missing
EXPLOITED_CYCLES = 128  # cycles that profit from the result of an exploration
COMPARED_CYCLES = 16  # drafting cycles of a batch size before its first comparison with plain decoding
MAX_COMPARISONS = 4  # attempts at that, for batch sizes up to each power of two


class CycleOutcome(NamedTuple):
    """Outcome of a request's drafting cycle.

    Attributes:
        num_accepted: accepted drafts.
        log_odds: of the verified depths, by the table.
        depth_log_odds: of the verified depths, by the draft's confidence head; empty without one.
    """

    request: RequestAcceptance
    num_accepted: int
    log_odds: Sequence[float]
    depth_log_odds: Sequence[float]


class AcceptanceModel:
    """Expected tokens of cycles, learnt from outcomes.

    A shape is an index into ``shapes``. Outcomes are collected and learnt together: between two cycles Python
    is several times slower than in a loop, because the forward has emptied the processor's caches.

    Args:
        table: acceptance of average text.
        shapes: M of them, plain decoding first.
        is_average_head: the table is another draft's, so shared statistics are learnt faster.

    Attributes:
        edges: probabilities that separate the confidence classes.
        chains: steps of the shapes that are chains.
        calibration: of the draft's confidence head.
        shared_histogram: confidence histogram of new requests, ``[C]``.
        shared_offset: offset of new requests.
        shared_variance: variance of the shared offset.
    """

    def __init__(self, table: AcceptanceTable, shapes: Sequence[SpecShape], *, is_average_head: bool) -> None:
        log_odds = conditional_log_odds(table, shapes)  # [M, C, S]
        self.edges = table.edges
        self.chains = {i: shape.steps for i, shape in enumerate(shapes) if shape.steps and shape.topk == 1}
        self.calibration = Calibration()

        # Tables by offset, and plain lists of them for single cycles.
        self._survival = reach_of(log_odds, OFFSETS)  # [G, M, C, S]
        self._tokens = 1.0 + self._survival.sum(3).transpose(0, 2, 1)  # [G, C, M]
        self._token_lists: list[list[list[float]]] = self._tokens.tolist()
        unknown = conditional_log_odds(table.without_confidence(), shapes)  # [M, 1, S]
        self._log_odds: list[list[list[float]]] = []  # by shape and class, the last one for unknown classes
        for shape, by_class in zip(shapes, np.concatenate([log_odds, unknown], 1), strict=True):
            self._log_odds.append([odds[: shape.steps].tolist() for odds in by_class])

        # Statistics that requests share.
        shares = [table.shares[shape] for shape in shapes if shape.steps]
        num_classes = log_odds.shape[1]
        usual = np.mean(shares, 0) if shares else np.full(num_classes, 1.0 / num_classes)
        self.shared_histogram: Sequence[float] = usual.tolist()
        self.shared_offset = 0.0
        self.shared_variance = OFFSET_VARIANCE if is_average_head else SHARED_VARIANCE
        self._num_seen = AVERAGE_COUNT if is_average_head else round(1 / SHARED_HISTOGRAM_RATE)

        # Outcomes and confidence classes that are not learnt yet.
        self._outcomes: list[CycleOutcome] = []
        self._seen: defaultdict[RequestAcceptance, list[int]] = defaultdict(list)

    def typical_request(self) -> RequestAcceptance:
        """Return the statistics of a request without outcomes."""
        variance = OFFSET_VARIANCE + self.shared_variance
        return RequestAcceptance(self.shared_offset, variance, self.shared_histogram)

    def new_request(self, batch_size: int) -> RequestAcceptance:
        """Return the statistics that a request begins with in a batch of some size."""
        changed = self.shared_variance + SHARED_CHANGE * 4 / max(batch_size, 4)
        self.shared_variance = min(changed, OFFSET_VARIANCE)
        return self.typical_request()

    def mean_tokens(self, requests: Sequence[RequestAcceptance]) -> np.ndarray:
        """Expected tokens of each request's cycles, averaged over its confidence histogram, ``[B, M]``."""
        histograms = np.array([request.histogram for request in requests])
        tokens = self._tokens[[row_of(request) for request in requests]]  # [B, C, M]
        mean: np.ndarray = (histograms[:, None] @ tokens)[:, 0]
        return mean

    def next_tokens(self, request: RequestAcceptance) -> Sequence[float]:
        """Expected tokens of a request's next cycle, given the draft's confidence, ``[M]``."""
        if request.confidence_class is None:
            mean: list[float] = self.mean_tokens([request])[0].tolist()
            return mean
        tokens = self._token_lists[row_of(request)][request.confidence_class]
        if not request.depth_log_odds:
            return tokens
        tokens = tokens.copy()
        sums = [*itertools.accumulate(self._depth_survival(request), initial=1.0)]
        for shape_index, steps in self.chains.items():
            if steps < len(sums):
                tokens[shape_index] = sums[steps]
        return tokens

    def next_survival(self, request: RequestAcceptance, shape_index: int) -> list[float]:
        """Probability that each depth of a chain is accepted with all before it next cycle, ``[S]``."""
        steps = self.chains[shape_index]
        if len(request.depth_log_odds) >= steps:
            return self._depth_survival(request)[:steps]
        survival = self._survival[row_of(request), shape_index, :, :steps]
        if request.confidence_class is None:
            survival = np.array(request.histogram) @ survival
        else:
            survival = survival[request.confidence_class]
        found: list[float] = survival.tolist()
        return found

    def accepted_in_rows(
        self, requests: Sequence[RequestAcceptance], shape_index: int, num_drafts: int
    ) -> float:
        """Expected number of accepted drafts if only the ``num_drafts`` likeliest drafts of a batch's chains
        are verified (``row_budgets.py``)."""
        survival = self._survival[[row_of(request) for request in requests], shape_index]  # [B, C, S]
        histograms = np.array([request.histogram for request in requests])
        return expected_accepted(survival[:, :, : self.chains[shape_index]], histograms, num_drafts)

    def relative_variance(self, requests: Sequence[RequestAcceptance], shape_index: int) -> float:
        """Variance of a batch's expected tokens in a shape, over their square (delta method)."""
        # Slopes of the tokens of each request over its offset.
        rows = np.array([row_of(request) for request in requests])
        histograms = np.array([request.histogram for request in requests])
        tokens = (self._tokens[rows, :, shape_index] * histograms).sum(1)
        above = np.minimum(rows + 1, len(OFFSETS) - 1)
        slopes = (self._tokens[above, :, shape_index] * histograms).sum(1) - tokens
        slopes /= OFFSET_STEP

        # Errors of offsets have a part of their own, and one that all share.
        shared_weight = np.array([request.shared_weight for request in requests])
        own = np.array([request.variance for request in requests]) - shared_weight**2 * self.shared_variance
        variance = slopes**2 @ own.clip(0.0) + (slopes @ shared_weight) ** 2 * self.shared_variance
        return float(variance / tokens.sum() ** 2)

    def _depth_survival(self, request: RequestAcceptance) -> list[float]:
        """Probability that each depth is accepted with all before it, by the calibrated confidence head."""
        chances = [chance_of(odds) for odds in self.calibration.log_odds(request.depth_log_odds)]
        return [*itertools.accumulate(chances, lambda reached, chance: reached * chance)]

    def observe_confidence(
        self, request: RequestAcceptance, confidence: float | Sequence[float] | None
    ) -> None:
        """See :meth:`ShapePolicy.observe_confidence`."""
        request.confidence_class = None
        request.depth_log_odds = ()
        if confidence is None:
            return
        if isinstance(confidence, float):
            first = confidence
        else:
            first = confidence[0]
            request.depth_log_odds = log_odds_of(confidence)
        is_number = first == first
        if is_number and (self.edges or request.depth_log_odds):
            request.confidence_class = bisect_right(self.edges, first)
            self._seen[request].append(request.confidence_class)

    def observe(
        self, request: RequestAcceptance, shape_index: int, num_accepted: int, num_depths: int | None
    ) -> None:
        """Record a drafting cycle that verified the first ``num_depths`` depths, None for all."""
        class_index = -1 if request.confidence_class is None else request.confidence_class
        log_odds = self._log_odds[shape_index][class_index][:num_depths]
        depth_log_odds: Sequence[float] = ()
        if len(request.depth_log_odds) >= self.chains.get(shape_index, math.inf):
            depth_log_odds = request.depth_log_odds[: len(log_odds)]
        self._outcomes.append(CycleOutcome(request, num_accepted, log_odds, depth_log_odds))

    def learn(self) -> None:
        """Learn from all recorded confidences and outcomes."""
        for request, classes in self._seen.items():
            self._num_seen += len(classes)
            rate = max(SHARED_HISTOGRAM_RATE, 1 / self._num_seen)
            request.histogram = _updated(request.histogram, classes, HISTOGRAM_RATE)
            self.shared_histogram = _updated(self.shared_histogram, classes, rate)
        self._seen.clear()
        for outcome in self._outcomes:
            self._learn_offsets(outcome)
            if outcome.depth_log_odds:
                self.calibration.learn(outcome.depth_log_odds, outcome.num_accepted)
        self._outcomes = []

    def _learn_offsets(self, outcome: CycleOutcome) -> None:
        """Update a request's offset and the shared one by a Kalman filter of binary outcomes.

        The errors of the two are correlated. The correlation decreases with every cycle of a request, so a
        long response changes the shared offset little.
        """
        request, num_accepted, log_odds, _ = outcome

        # Surprise and Fisher information of the depths that were tried.
        surprise = float(num_accepted)
        information = 0.0
        for odds in log_odds[: num_accepted + 1]:
            chance = chance_of(odds + request.offset)
            surprise -= chance
            information += chance * (1.0 - chance)
        if request.is_first_cycle:
            request.is_first_cycle = False
            surprise *= FIRST_WEIGHT
            information *= FIRST_WEIGHT

        # Update both offsets and their variances.
        spread = 1.0 + request.variance * information
        covariance = request.shared_weight * self.shared_variance
        request.offset = _clipped(request.offset + request.variance * surprise / spread)
        self.shared_offset = _clipped(self.shared_offset + covariance * surprise / spread)
        self.shared_variance -= covariance**2 * information / spread
        request.shared_weight /= spread
        request.variance /= spread
        age(request, 1)


def row_of(request: RequestAcceptance) -> int:
    """Index of a request's offset in ``OFFSETS``."""
    return round((request.offset + MAX_OFFSET) / OFFSET_STEP)


def age(request: RequestAcceptance, num_cycles: int) -> None:
    """Raise the variance of a request's offset after some cycles: its text changes."""
    aged = min(request.variance + num_cycles * OFFSET_CHANGE, OFFSET_VARIANCE)
    request.variance = max(request.variance, aged)


def _clipped(offset: float) -> float:
    """The offset within the bounds of the tables."""
    return min(max(offset, -MAX_OFFSET), MAX_OFFSET)


def _updated(histogram: Sequence[float], classes: Sequence[int], rate: float) -> list[float]:
    """A histogram after further confidence classes, each of weight ``rate`` in an exponential average."""
    counts = [0.0] * len(histogram)
    weight = 1.0
    for confidence_class in reversed(classes):
        counts[confidence_class] += weight * rate
        weight *= 1.0 - rate
    return [weight * share + count for share, count in zip(histogram, counts, strict=True)]


class CostCorrection:
    """Costs of one batch size over those of the table, learnt from the times of its cycles.

    The logarithm of a time over the table's is a sum of terms: the machine's level, if the cycle drafts the
    error of drafting and that of its shape, and noise. A Kalman filter estimates all terms together, so a
    machine that is slower for all shapes changes no choice.

    Args:
        num_shapes: M, plain decoding included.

    Attributes:
        has_compared: drafting has followed plain decoding, or the reverse.
    """

    def __init__(self, num_shapes: int) -> None:
        # Terms: the level, drafting, and each shape but plain decoding. Rows of the design are shapes.
        self._design = np.zeros((num_shapes, 1 + num_shapes))
        self._design[:, 0] = 1.0
        self._design[1:, 1] = 1.0
        self._design[1:, 2:] = np.eye(num_shapes - 1)
        own = [SHAPE_ERROR**2] * (num_shapes - 1)
        self._prior = np.array([LEVEL_ERROR**2, DRAFTING_ERROR**2, *own])
        self._mean = np.zeros(len(self._prior))
        self._covariance = np.diag(self._prior)
        self._noise = CYCLE_NOISE**2
        self._last_index: int | None = None
        self._last_cycle = 0
        self._num_alike = 0  # cycles since plain decoding and drafting last followed each other
        self._settled_level = 0.0
        self.has_compared = False

    def factors(self) -> np.ndarray:
        """Factor of each shape's cost in the table, relative to plain decoding, ``[M]``."""
        factors: np.ndarray = np.exp(self._design[:, 1:] @ self._mean[1:])
        return factors

    def best_factors(self, current_shape: int) -> np.ndarray:
        """Further factor by which each shape may cost less at best, relative to the shape in use, ``[M]``.
        At best a cost is :data:`OPTIMISM` standard errors below the estimate."""
        beside = self._design - self._design[current_shape]
        variances = ((beside @ self._covariance) * beside).sum(1)
        factors: np.ndarray = np.exp(-OPTIMISM * np.sqrt(variances.clip(0.0)))
        return factors

    def variance(self, shape_index: int, cycle: int) -> float:
        """Variance of the logarithm of a drafting shape's cost over plain decoding's, at a cycle."""
        beside_plain = self._design[shape_index] - self._design[0]
        known = float(beside_plain @ self._covariance @ beside_plain)
        weight = 0.5 ** (2 * max(cycle - self._last_cycle, 0) / HALF_LIFE)
        return weight * known + (1.0 - weight) * max(known, float(beside_plain @ self._prior))

    def observe(self, shape_index: int, cycle: int, errors: Sequence[float]) -> None:
        """Learn from the last cycles of one shape, up to ``cycle``: logarithms of their times over the
        table's."""
        if cycle > self._last_cycle:
            self._forget(cycle - self._last_cycle)
            self._last_cycle = cycle
        is_switch = shape_index != self._last_index

        # Learn how much single cycles vary.
        for before, after in itertools.pairwise(errors):
            squared = min((after - before) ** 2 / 2, MAX_CYCLE_NOISE**2)
            self._noise += NOISE_RATE * (squared - self._noise)
        noise = self._noise / len(errors)
        if is_switch:
            noise += (SWITCH_NOISE / len(errors)) ** 2

        # An outlier widens the errors that may explain it. A single time may be chance and is not learnt.
        error = statistics.median(errors)
        is_learnt = self._learn(shape_index, error, noise)
        if not is_learnt:
            self._widen_for_outlier(shape_index, (error - float(self._design[shape_index] @ self._mean)) ** 2)
            if len(errors) > 1:
                self._learn(shape_index, error, noise)

        # Widen the error of drafting's cost if the machine has become slower or faster.
        was_drafting = bool(self._last_index)
        if self._last_index is None or was_drafting != bool(shape_index):
            self.has_compared |= self._last_index is not None
            self._num_alike = 0
        self._num_alike += len(errors)
        self._last_index = shape_index
        change = float(self._mean[0]) - self._settled_level
        if self._num_alike > SETTLED_CYCLES and abs(change) > LEVEL_SHIFT:
            self._widen(1, (SHIFT_ERROR * change) ** 2, was_measured=shape_index > 0)
        if self._num_alike <= SETTLED_CYCLES or abs(change) > LEVEL_SHIFT:
            self._settled_level = float(self._mean[0])

    def _learn(self, shape_index: int, error: float, noise: float) -> bool:
        """Learn an error of a shape whose variance is ``noise``. Return False for an outlier, which is not
        learnt."""
        terms = self._design[shape_index]
        surprise = error - float(terms @ self._mean)
        column = self._covariance @ terms
        spread = float(terms @ column) + noise
        if surprise**2 > OUTLIER**2 * spread:
            return False
        self._mean += column * (surprise / spread)
        self._covariance -= np.outer(column, column / spread)
        return True

    def _forget(self, num_cycles: int) -> None:
        """Let the level change, and the other terms return towards the table's costs."""
        decay = np.full(len(self._mean), 0.5 ** (num_cycles / HALF_LIFE))
        decay[0] = 1.0
        self._mean *= decay
        added = (1.0 - decay**2) * self._prior
        added[0] = min(num_cycles * LEVEL_CHANGE**2, LEVEL_ERROR**2)
        self._covariance *= np.outer(decay, decay)
        self._covariance += np.diag(added)

    def _widen_for_outlier(self, shape_index: int, variance: float) -> None:
        """Add a variance to the terms that may explain an outlier: the level if the shape is the last one,
        otherwise the terms in which the two shapes differ."""
        before = self._last_index
        if before is None or shape_index == before:
            self._covariance[0, 0] += variance
        elif shape_index and before:
            self._widen(1 + shape_index, variance)
        elif shape_index:
            self._widen(1, variance)
            self._widen(1 + shape_index, variance)
        else:
            self._widen(1, variance, was_measured=True)
            self._widen(1 + before, variance, was_measured=True)

    def _widen(self, term: int, variance: float, *, was_measured: bool = False) -> None:
        """Add a variance to a term. If the last cycles had the term (``was_measured``), the variance of its
        sum with the level stays the same."""
        direction = np.zeros(len(self._mean))
        direction[term] = 1.0
        if was_measured:
            direction[0] = -1.0
        room = max(MAX_ERROR**2 - float(self._covariance[term, term]), 0.0)
        self._covariance += min(variance, room) * np.outer(direction, direction)


class ExplorationBudget:
    """Time that explorations may lose: a share of all time. The first exploration is free."""

    def __init__(self) -> None:
        self._seconds = math.inf

    def earn(self, seconds: float) -> None:
        """Add the share of some cycles' time."""
        self._seconds += EXPLORATION_SHARE * seconds

    def spend(self, seconds: float) -> None:
        """Subtract a loss."""
        self._seconds -= seconds

    def affords(self, loss: float, plain: float) -> bool:
        """Return True if the budget covers a loss; ``plain`` is the time of a plain cycle."""
        self._seconds = min(max(self._seconds, -MAX_DEBT * plain), MAX_SAVED * plain)
        return self._seconds >= loss


def expected_saving(gain: float, error: float) -> float:
    """Part of the time of later cycles that an exploration of the slower of plain decoding and drafting is
    expected to save (the knowledge gradient of two alternatives).

    Args:
        gain: estimated speed of drafting over plain decoding.
        error: standard error of its logarithm.
    """
    distance = abs(math.log(gain))
    alternative = statistics.NormalDist(-distance, error)
    return error**2 * alternative.pdf(0.0) - distance * (1.0 - alternative.cdf(0.0))


class CycleGain:
    """Average speed of cycles whose candidates are chosen one by one, over the forecast for the candidate in
    use."""

    def __init__(self) -> None:
        self._tokens = 1.0
        self._seconds = 1.0
        self._num_cycles = 0

    @property
    def value(self) -> float:
        """The gain."""
        return self._tokens / self._seconds

    def observe(self, batch_size: int, tokens: float, seconds: float) -> None:
        """Add a cycle: its expected tokens and seconds, each over the forecast."""
        self._num_cycles += 1
        rate = min(batch_size / GAIN_CYCLES, 1 / MIN_GAIN_CYCLES)
        rate = max(rate, 1 / (MIN_GAIN_CYCLES + self._num_cycles))
        self._tokens += rate * (tokens - self._tokens)
        self._seconds += rate * (seconds - self._seconds)


class Candidate(NamedTuple):
    """What a cycle of a batch may do.

    Attributes:
        shape_index: index of its shape.
        num_rows: rows of the target's forward over the batch. They are those of whole windows, unless row
            budgets cut them, which no engine does yet (``row_budgets.py``).
    """

    shape_index: int
    num_rows: int


class Forecast(NamedTuple):
    """Expected tokens and seconds of a batch's cycle with each candidate, averaged over confidences.

    Attributes:
        candidates: plain decoding first.
        tokens: of the batch, for each candidate.
        seconds: for each candidate.
        least_seconds: seconds at best, within the errors of the costs.
    """

    candidates: Sequence[Candidate]
    tokens: np.ndarray
    seconds: np.ndarray
    least_seconds: np.ndarray

    @property
    def plain_seconds(self) -> float:
        """Seconds of a plain cycle."""
        return float(self.seconds[PLAIN])


class ShapeChooser(ShapePolicy):
    """Choice of the shape for a running batch.

    ``choose`` is called before each cycle; ``observe``, ``observe_confidence`` and ``observe_time`` after it,
    perhaps one cycle late. They record, and the next decision learns from the records.

    Args:
        seconds: time of a cycle by the table: ``(batch size, shape, context)`` -> seconds.
        acceptance: of average text.
        shapes_by_size: candidate shapes by batch size. A size that is missing has those of the next larger
            one.
        origin: source of the numbers, for users.
        backfill: time of a draft backfill: ``(batch size, tokens per request, context)`` -> seconds.
        budgets: cuts of windows to fewer rows; None verifies whole windows, as all engines do so far.
        is_average_head: the acceptance is another draft's.

    Attributes:
        num_rows: rows of the target's forward in the cycle that was chosen last, which only an engine with
            ``budgets`` needs.
    """

    def __init__(
        self,
        seconds: Seconds,
        acceptance: AcceptanceTable,
        shapes_by_size: Mapping[int, Sequence[SpecShape]],
        origin: str = "",
        backfill: Callable[[int, int, int], float] = lambda batch_size, num_tokens, context: 0.0,
        budgets: RowBudgets | None = None,
        *,
        is_average_head: bool = False,
    ) -> None:
        super().__init__(shapes_by_size)
        self.origin = origin
        self.num_rows = 0
        self.acceptance = AcceptanceModel(acceptance, self.shapes, is_average_head=is_average_head)
        self._index_of = {shape: shape_index for shape_index, shape in enumerate(self.shapes)}

        # Costs.
        self._seconds = seconds
        self._backfill = backfill
        self._budgets = budgets
        self._candidates: dict[int, list[Candidate]] = {}
        self._tables: dict[tuple[int, int], np.ndarray] = {}
        self._corrections: dict[int, CostCorrection] = {}
        self._times: defaultdict[tuple[int, int], list[float]] = defaultdict(list)  # by batch size and shape

        # The decision that is held.
        self._forecast: Forecast | None = None
        self._current = PLAIN  # index of the candidate in use
        self._break_even_tokens: Sequence[float] = ()  # of each candidate: rate x seconds
        self._batch_size = 0
        self._held = 0  # cycles until the next decision
        self._next_hold = FIRST_HOLD
        self._num_cycles = 0
        self._last_decision = 0  # cycle of it
        self._cycle_gains: defaultdict[int, CycleGain] = defaultdict(CycleGain)  # by batch size

        # Exploration.
        self._budget = ExplorationBudget()
        self._is_exploring = False
        self._is_confirming = False  # the exploration repeats what was in use before the last one
        self._switched = 0  # cycle of the last change between plain decoding and drafting
        self._num_timed = 0  # times since then
        self._num_comparisons: defaultdict[int, int] = defaultdict(int)  # by bits of the batch size
        self._drafting_loss = 0.0  # seconds of drafting beyond those of plain decoding since then
        self._seconds_each = 0.0  # of the chosen cycle, per request
        self._plain_each = 0.0  # of a plain cycle, per request

    # Calls of the engine

    def new_request(self) -> RequestAcceptance:
        """Return the statistics that a request begins with. The next decision is made soon."""
        self.learn()
        self._held = min(self._held, self._batch_size // 4)
        self._next_hold = FIRST_HOLD
        return self.acceptance.new_request(self._batch_size)

    def choose(self, requests: Sequence[RequestAcceptance], context: int) -> SpecShape:
        """Choose the shape of the next cycle of a batch with ``context`` tokens per request on average."""
        self._held -= 1
        if self._held <= 0 or len(requests) != self._batch_size or self._forecast is None:
            self._forecast = self._decide(requests, context)
        self._num_cycles += 1
        candidate_index = self._current
        if self._is_drafting:
            candidate_index = self._choose_cycle(self._forecast, requests)
            self._seconds_each = float(self._forecast.seconds[candidate_index]) / len(requests)
            self._plain_each = self._forecast.plain_seconds / len(requests)
        shape_index, self.num_rows = self._forecast.candidates[candidate_index]
        return self.shapes[shape_index]

    def observe_confidence(
        self, request: RequestAcceptance, confidence: float | Sequence[float] | None
    ) -> None:
        """See :meth:`ShapePolicy.observe_confidence`."""
        self.acceptance.observe_confidence(request, confidence)

    def observe(
        self, request: RequestAcceptance, shape: SpecShape, num_accepted: int, num_depths: int | None = None
    ) -> None:
        """See :meth:`ShapePolicy.observe`."""
        if shape.steps:
            self._drafting_loss += self._seconds_each - (1 + num_accepted) * self._plain_each
            self.acceptance.observe(request, self._index_of[shape], num_accepted, num_depths)

    def observe_time(
        self, batch_size: int, shape: SpecShape, context: int, seconds: float, num_rows: int | None = None
    ) -> None:
        """See :meth:`ShapePolicy.observe_time`."""
        shape_index = self._index_of[shape]
        candidate = Candidate(shape_index, num_rows or batch_size * shape.tokens)
        table = self._table(batch_size, context)[self.candidates(batch_size).index(candidate)]
        self._times[batch_size, shape_index].append(math.log(seconds / table))

    def learn(self) -> None:
        """Learn from all records since the last call, the times of one shape together."""
        self._num_timed += sum(len(errors) for errors in self._times.values())
        for (batch_size, shape_index), errors in self._times.items():
            if batch_size not in self._corrections:
                self._corrections[batch_size] = CostCorrection(len(self.shapes))
            self._corrections[batch_size].observe(shape_index, self._num_cycles, errors)
        self._times.clear()
        self.acceptance.learn()

    def plan(self, batch_sizes: Sequence[int], context: int = 256) -> list[ShapeChoice]:
        """Return the choice for batches of average text."""
        choices = []
        for size in batch_sizes:
            forecast = self._forecast_of([self.acceptance.typical_request()] * size, context)
            speeds = forecast.tokens / forecast.seconds
            best_index = int(speeds.argmax())
            length = float(forecast.tokens[best_index]) / size
            milliseconds = 1e3 * float(forecast.seconds[best_index])
            gain = float(speeds[best_index] / speeds[PLAIN])
            shape = self.shapes[forecast.candidates[best_index].shape_index]
            choices.append(ShapeChoice(size, shape, length, milliseconds, gain))
        return choices

    # Forecasts

    def candidates(self, batch_size: int) -> list[Candidate]:
        """Candidates for a batch size, plain decoding first."""
        if batch_size in self._candidates:
            return self._candidates[batch_size]
        found = self._candidates[batch_size] = []
        for shape in self.shapes_at(batch_size):
            shape_index = self._index_of[shape]
            found.append(Candidate(shape_index, batch_size * shape.tokens))
            if self._budgets is not None and shape_index in self.acceptance.chains:
                found += [Candidate(shape_index, rows) for rows in self._budgets.rows(batch_size, shape)]
        return found

    def _is_whole(self, candidate: Candidate, batch_size: int) -> bool:
        """True for a candidate whose target reads whole windows."""
        return candidate.num_rows == batch_size * self.shapes[candidate.shape_index].tokens

    def _table(self, batch_size: int, context: int) -> np.ndarray:
        """Seconds of a cycle with each candidate, by the table."""
        key = batch_size, context // CONTEXT_SPAN
        if key not in self._tables:
            middle = key[1] * CONTEXT_SPAN + CONTEXT_SPAN // 2
            seconds = []
            for candidate in self.candidates(batch_size):
                shape = self.shapes[candidate.shape_index]
                whole = self._seconds(batch_size, shape, middle)
                if self._budgets is not None and not self._is_whole(candidate, batch_size):
                    whole *= self._budgets.share(batch_size, shape, middle, candidate.num_rows)
                seconds.append(whole)
            self._tables[key] = np.array(seconds)
        return self._tables[key]

    def _forecast_of(self, requests: Sequence[RequestAcceptance], context: int) -> Forecast:
        """Forecast a cycle of a batch, averaged over confidence histograms."""
        # Tokens: those of whole windows, or of the likeliest drafts.
        size = len(requests)
        candidates = self.candidates(size)
        shape_indices = [candidate.shape_index for candidate in candidates]
        tokens = self.acceptance.mean_tokens(requests).sum(0)[shape_indices]
        for i, candidate in enumerate(candidates):
            if not self._is_whole(candidate, size):
                num_drafts = candidate.num_rows - size
                tokens[i] = size + self.acceptance.accepted_in_rows(
                    requests, candidate.shape_index, num_drafts
                )

        # Seconds: the table's, corrected by the times of this batch size.
        current_shape = self._index_of[self.shape]
        seconds = self._table(size, context)
        least = seconds
        correction = self._corrections.get(size)
        if correction is not None:
            seconds = seconds * correction.factors()[shape_indices]
            least = seconds * correction.best_factors(current_shape)[shape_indices]
        return Forecast(candidates, tokens, seconds, least)

    # Decisions

    def _decide(self, requests: Sequence[RequestAcceptance], context: int) -> Forecast:
        """Learn, decide between plain decoding and drafting, and return the forecast of the next cycles."""
        size = len(requests)

        # Learn from the cycles since the last decision.
        elapsed = self._num_cycles - self._last_decision
        self._last_decision = self._num_cycles
        if self._forecast is not None:
            self._budget.earn(elapsed * float(self._forecast.seconds[self._current]))
        if not self._is_drafting:
            for request in requests:
                age(request, elapsed)
        self.learn()

        # Forecast all candidates and find the best that drafts, by tokens per second.
        forecast = self._forecast_of(requests, context)
        plain_speed = float(forecast.tokens[PLAIN]) / forecast.plain_seconds
        drafting_speed = 0.0
        best_index = PLAIN
        if len(forecast.candidates) > 1:
            best_index = 1 + int((forecast.tokens / forecast.least_seconds)[1:].argmax())
            drafting_speed = float(forecast.tokens[best_index] / forecast.seconds[best_index])
            drafting_speed *= self._cycle_gains[size].value

        # Decide, unless an exploration goes on.
        self._batch_size = size
        if best_index == PLAIN:
            self._switch_to(PLAIN)
            self._is_exploring = False
            self._is_confirming = False
        elif self._has_to_explore(size):
            self._current = best_index if self._is_drafting else PLAIN
        else:
            self._decide_mode(requests, context, forecast, best_index, drafting_speed / plain_speed)

        # Single cycles are chosen by tokens - rate x seconds.
        rate = max(drafting_speed, plain_speed)
        self._break_even_tokens = (rate * forecast.least_seconds).tolist()

        # Hold the decision.
        self._held = HOLD
        if self._is_exploring:
            num_explored = self._num_cycles - self._switched
            self._held = max(self._exploration_cycles(size, self._is_drafting) - num_explored, 1)
        elif self._is_drafting:
            self._held = self._next_hold
            self._next_hold = min(2 * self._next_hold, HOLD)
        self.shape = self.shapes[forecast.candidates[self._current].shape_index]
        return forecast

    def _decide_mode(
        self,
        requests: Sequence[RequestAcceptance],
        context: int,
        forecast: Forecast,
        best_index: int,
        gain: float,
    ) -> None:
        """Decide between plain decoding and drafting; the one that is not in use may be explored.

        Args:
            best_index: the best candidate that drafts.
            gain: its estimated speed over plain decoding.
        """
        size = len(requests)
        has_explored = self._is_exploring
        needs_confirmation = has_explored and not self._is_confirming
        self._is_exploring = False
        self._is_confirming = False

        # Drafting is in use: it goes on as long as it is not slower. An exploration that finds it faster is
        # confirmed by plain cycles, because the machine may have been slower in the plain cycles before.
        # Exploring plain decoding loses what drafting would have gained, and the draft backfill after it.
        if self._is_drafting:
            loss_of_plain = EXPLORED_CYCLES * forecast.plain_seconds * (1.0 - 1.0 / max(gain, 1.0))
            if needs_confirmation and gain >= 1.0:
                self._switch_to(PLAIN)
                self._budget.spend(loss_of_plain)
                self._is_exploring = True
                self._is_confirming = True
                return
            self._switch_to(best_index if gain >= 1.0 else PLAIN)
            loss = loss_of_plain + self._backfill(size, EXPLORED_CYCLES, context)
            if self._is_drafting and self._is_worth_exploring(requests, forecast, best_index, gain, loss):
                self._switch_to(PLAIN)
                self._budget.spend(loss)
                self._is_exploring = True
            return

        # Plain decoding is in use: drafting must be faster by a margin, the draft backfill included.
        num_pending = max(request.num_pending for request in requests)
        backfill = self._backfill(size, num_pending, context) if num_pending else 0.0
        drafting_seconds = float(forecast.seconds[best_index])
        least_gain = MIN_GAIN * (1.0 + backfill / (BACKFILL_CYCLES * drafting_seconds))
        if has_explored:
            least_gain = 1.0
        if gain > least_gain:
            self._switch_to(best_index)
            return

        # Exploring drafting loses the part of its cycles by which it may be slower, and the draft backfill.
        num_cycles = self._exploration_cycles(size, is_drafting=True)
        # An exploration of plain decoding that finds drafting slower is confirmed by drafting.
        loss = num_cycles * drafting_seconds * (1.0 - min(gain, 1.0 / gain)) + backfill
        if needs_confirmation or self._is_worth_exploring(requests, forecast, best_index, gain, loss):
            self._switch_to(best_index)
            self._drafting_loss += backfill
            self._is_exploring = True
            self._is_confirming = needs_confirmation

    def _is_worth_exploring(
        self,
        requests: Sequence[RequestAcceptance],
        forecast: Forecast,
        best_index: int,
        gain: float,
        loss: float,
    ) -> bool:
        """Return True if the alternative to the candidate in use should be explored at an expected loss."""
        size = len(requests)
        correction = self._corrections.get(size)
        num_cycles = self._num_cycles - self._switched

        # The last change was long ago.
        waited = num_cycles * float(forecast.seconds[self._current])
        if EXPLORATION_SHARE * waited >= max(MAX_SAVED * forecast.plain_seconds, loss):
            return True

        # The exploration is expected to save more than it loses, and the budget covers the loss.
        if self._budget.affords(loss, forecast.plain_seconds):
            shape_index = forecast.candidates[best_index].shape_index
            variance = self.acceptance.relative_variance(requests, shape_index)
            if correction is not None:
                variance += correction.variance(shape_index, self._num_cycles)
            saving = expected_saving(gain, math.sqrt(variance) + 1e-6)
            if EXPLOITED_CYCLES * forecast.plain_seconds * saving >= loss:
                return True

        # The table may be far off: drafting is compared with plain decoding soon after it has begun.
        is_due = self._is_drafting and num_cycles >= COMPARED_CYCLES
        if not is_due or correction is None or correction.has_compared:
            return False
        self._num_comparisons[size.bit_length()] += 1
        return self._num_comparisons[size.bit_length()] <= MAX_COMPARISONS

    @property
    def _is_drafting(self) -> bool:
        """True if the candidate in use drafts."""
        return self._current != PLAIN

    @staticmethod
    def _exploration_cycles(batch_size: int, is_drafting: bool) -> int:
        """Cycles of an exploration of drafting, or of plain decoding."""
        if not is_drafting:
            return EXPLORED_CYCLES
        return min(max(EXPLORED_DRAFTS // batch_size, 2), EXPLORED_CYCLES)

    def _has_to_explore(self, batch_size: int) -> bool:
        """Return True if an exploration has cycles left, or too few times: they come late or are left out."""
        if not self._is_exploring:
            return False
        num_cycles = self._num_cycles - self._switched
        if num_cycles < self._exploration_cycles(batch_size, self._is_drafting):
            return True
        most = EXPLORED_CYCLES if self._is_drafting else MAX_EXPLORED_CYCLES
        return num_cycles < most and self._num_timed < LEAST_TIMED

    def _switch_to(self, candidate_index: int) -> None:
        """Use a candidate. When drafting ends, the time that it has lost over plain decoding is spent."""
        if (candidate_index != PLAIN) != self._is_drafting:
            if self._is_drafting:
                self._budget.spend(max(self._drafting_loss, 0.0))
            self._drafting_loss = 0.0
            self._switched = self._num_cycles
            self._num_timed = 0
            self._next_hold = FIRST_HOLD
        self._current = candidate_index

    def _choose_cycle(self, forecast: Forecast, requests: Sequence[RequestAcceptance]) -> int:
        """Index of the candidate for one cycle of drafting, given the draft's confidence. It is another than
        the one in use if its surplus, expected tokens - rate x seconds, is higher by a margin."""
        if all([request.confidence_class is None for request in requests]):
            return self._current

        # Expected tokens with each candidate.
        size = len(requests)
        by_request = [self.acceptance.next_tokens(request) for request in requests]
        by_shape = by_request[0] if size == 1 else [*map(sum, zip(*by_request, strict=True))]
        tokens = [by_shape[candidate.shape_index] for candidate in forecast.candidates]
        if self._budgets is not None:
            self._cut_to_rows(tokens, forecast, requests)

        # The one with the largest surplus, unless the one in use is nearly as good.
        pairs = zip(tokens, self._break_even_tokens, strict=True)
        surplus = [expected - break_even for expected, break_even in pairs]
        best_index = max(range(1, len(surplus)), key=surplus.__getitem__)
        if surplus[best_index] < surplus[self._current] + MIN_CYCLE_GAIN * tokens[self._current]:
            best_index = self._current
        gained_tokens = tokens[best_index] / float(forecast.tokens[self._current])
        gained_seconds = float(forecast.seconds[best_index] / forecast.seconds[self._current])
        self._cycle_gains[size].observe(size, gained_tokens, gained_seconds)
        return best_index

    def _cut_to_rows(
        self, tokens: list[float], forecast: Forecast, requests: Sequence[RequestAcceptance]
    ) -> None:
        """Set the expected ``tokens`` of candidates that verify only the likeliest drafts of the batch."""
        size = len(requests)
        sums: dict[int, list[float]] = {}
        for i, candidate in enumerate(forecast.candidates):
            shape_index = candidate.shape_index
            if self._is_whole(candidate, size):
                continue
            if shape_index not in sums:
                sums[shape_index] = tokens_by_num_drafts(
                    self.acceptance.next_survival(request, shape_index) for request in requests
                )
            tokens[i] = sums[shape_index][candidate.num_rows - size]
