"""Choice of each cycle's shape by expected tokens per second.

Expected tokens follow from a table of acceptance and an offset of each request; expected seconds from a table
of costs and the times of cycles. A decision is held for some cycles, and alternatives are explored within a
budget of time.

Legend: B requests, M shapes, C confidence classes, S draft steps, G offsets of the tables.
"""

import itertools
import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eagle_kit.autotune.acceptance import AcceptanceTable
from eagle_kit.autotune.calibration import Calibration
from eagle_kit.autotune.chances import chance_of, conditional_log_odds, log_odds_of, reach_of
from eagle_kit.autotune.policy import Choice, RequestAcceptance, ShapePolicy
from eagle_kit.autotune.shapes import Seconds
from eagle_kit.core.shape import SpecShape

# Decisions
HOLD = 8  # cycles for which a decision is held
FIRST_HOLD = 2  # cycles of the first decision for a new batch; each later one is held twice as long
MIN_GAIN = 1.03  # predicted speed over plain decoding with which drafting begins
MIN_CYCLE_GAIN = 0.02  # share of a cycle's tokens for which it has another shape than the one in use
GAIN_CYCLES = 64  # of one request, over which the gain of such cycles is averaged
MIN_GAIN_CYCLES = 8  # of a batch
BACKFILL_CYCLES = 32  # drafting cycles that have to pay for a draft backfill

# Acceptance, in log-odds
MAX_OFFSET = 6.0
OFFSET_STEP = 0.25
OFFSETS = np.arange(-MAX_OFFSET, MAX_OFFSET + OFFSET_STEP, OFFSET_STEP)  # of the tables
OFFSET_VARIANCE = 1.0  # of requests around the offset that they share
OFFSET_CHANGE = 0.01  # variance that a cycle adds to a request's offset
SHARED_VARIANCE = 0.25  # of the shared offset at first; OFFSET_VARIANCE with another draft's table
SHARED_CHANGE = 0.06  # variance that a new request adds to the shared offset: tasks change
FIRST_WEIGHT = 0.25  # of a request's first cycle: replies begin alike, whatever follows
HISTOGRAM_RATE = 0.1  # of a request's confidence histogram
SHARED_HISTOGRAM_RATE = 0.02
AVERAGE_COUNT = 16  # confidences for which the histogram of another draft's table counts

# Costs, relative errors
CONTEXT_SPAN = 256  # tokens of context over which the table's costs count as constant
DRAFTING_ERROR = 0.1  # of all drafting beside plain decoding in the table
SHAPE_ERROR = 0.11  # of each shape beside the others
MAX_DOUBT = 0.5  # of either behind a surprise
LEVEL_ERROR = 2.0  # of the machine's speed where nothing is known of it
LEVEL_CHANGE = 0.03  # of the machine's speed from cycle to cycle
HALF_LIFE = 3500  # cycles in which half of what was learnt is forgotten
CYCLE_NOISE = 0.08  # of a single cycle at first
MAX_CYCLE_NOISE = 0.25
NOISE_RATE = 0.05
SWITCH_NOISE = 0.1  # further noise of the first cycle behind another shape's
OUTLIER = 3.0  # standard errors beyond which a time raises doubt in place of being learnt
SETTLED_CYCLES = 6  # of plain decoding or drafting behind the other, until the machine's speed is known
LEVEL_SHIFT = 0.1  # change of the machine's speed behind which drafting's cost is doubted
SHIFT_ERROR = 0.6  # that doubt over the change
OPTIMISM = 0.3  # standard errors by which a shape may cost less than is known, so that it is tried again

# Exploration
EXPLORATION_SHARE = 0.005  # of all time, which explorations may lose
MAX_SAVED = 1.5  # most of that time that may be saved up, in plain cycles
MAX_DEBT = 0.5
EXPLORED_CYCLES = 4
EXPLORED_DRAFTS = 16  # requests' cycles after which an exploration of drafting may end sooner
LEAST_TIMED = 2  # of them; times come late, and those of cycles without a recording are left out
MAX_EXPLORED_CYCLES = 8  # of plain decoding until then
EXPLOITED_CYCLES = 128  # cycles for which the result of an exploration is of use
COMPARED_CYCLES = 16  # drafting cycles of a batch size before its first comparison with plain decoding
MAX_COMPARISONS = 4  # attempts at that, for batch sizes up to each power of two


class Outcome(NamedTuple):
    """Drafting cycle of a request: number of accepted drafts, and the log-odds of the verified depths by the
    table and by the draft's confidence head."""

    request: RequestAcceptance
    num_accepted: int
    log_odds: Sequence[float]
    depth_log_odds: Sequence[float]


class AcceptanceModel:
    """Expected tokens of cycles, learnt from outcomes. Shapes are named by their index.

    Outcomes are kept and learnt together: between two cycles Python is several times slower than in a loop,
    because the forward has emptied the processor's caches.

    Args:
        table: acceptance of average text.
        shapes: M of them, plain decoding first.
        is_average: the table is another draft's, so that what requests share is learnt faster.
    """

    def __init__(self, table: AcceptanceTable, shapes: Sequence[SpecShape], *, is_average: bool) -> None:
        log_odds = conditional_log_odds(table, shapes)  # [M, C, S]
        self.edges = table.edges
        self.chains = {i: shape.steps for i, shape in enumerate(shapes) if shape.steps and shape.topk == 1}
        self.calibration = Calibration()

        # Tables by offset, and plain lists of them for single cycles.
        self._survival = reach_of(log_odds, OFFSETS)  # [G, M, C, S]
        self._tokens = 1.0 + self._survival.sum(3).transpose(0, 2, 1)  # [G, C, M]
        self._token_lists: list[list[list[float]]] = self._tokens.tolist()
        average = conditional_log_odds(table.average(), shapes)  # [M, 1, S]
        self._log_odds: list[list[list[float]]] = []  # by shape and class, the last one for unknown classes
        for shape, by_class in zip(shapes, np.concatenate([log_odds, average], 1), strict=True):
            self._log_odds.append([odds[: shape.steps].tolist() for odds in by_class])

        # What requests share.
        shares = [table.shares[shape] for shape in shapes if shape.steps]
        num_classes = log_odds.shape[1]
        usual = np.mean(shares, 0) if shares else np.full(num_classes, 1.0 / num_classes)
        self.shared_histogram: Sequence[float] = usual.tolist()
        self.shared_offset = 0.0
        self.shared_variance = OFFSET_VARIANCE if is_average else SHARED_VARIANCE
        self._num_seen = AVERAGE_COUNT if is_average else round(1 / SHARED_HISTOGRAM_RATE)

        # What was taken in and is not learnt yet.
        self._outcomes: list[Outcome] = []
        self._seen: defaultdict[RequestAcceptance, list[int]] = defaultdict(list)

    def average_request(self) -> RequestAcceptance:
        """Return the statistics of a request of which nothing is known."""
        variance = OFFSET_VARIANCE + self.shared_variance
        return RequestAcceptance(self.shared_offset, variance, self.shared_histogram)

    def new_request(self, batch_size: int) -> RequestAcceptance:
        """Return the statistics that a request begins with in a batch of some size."""
        changed = self.shared_variance + SHARED_CHANGE * 4 / max(batch_size, 4)
        self.shared_variance = min(changed, OFFSET_VARIANCE)
        return self.average_request()

    def mean_tokens(self, requests: Sequence[RequestAcceptance]) -> np.ndarray:
        """Expected tokens of each request's cycles on average, ``[B, M]``."""
        histograms = np.array([request.histogram for request in requests])
        tokens = self._tokens[[row_of(request) for request in requests]]  # [B, C, M]
        mean: np.ndarray = (histograms[:, None] @ tokens)[:, 0]
        return mean

    def next_tokens(self, request: RequestAcceptance) -> Sequence[float]:
        """Expected tokens of a request's next cycle by the draft's confidence, ``[M]``."""
        if request.confidence_class is None:
            mean: list[float] = self.mean_tokens([request])[0].tolist()
            return mean
        tokens = self._token_lists[row_of(request)][request.confidence_class]
        if not request.depth_log_odds:
            return tokens
        tokens = tokens.copy()
        sums = [*itertools.accumulate(self._depth_survival(request), initial=1.0)]
        for number, steps in self.chains.items():
            if steps < len(sums):
                tokens[number] = sums[steps]
        return tokens

    def next_survival(self, request: RequestAcceptance, number: int) -> list[float]:
        """Probability of each depth of a chain to be accepted with all before it, next cycle, ``[S]``."""
        steps = self.chains[number]
        if len(request.depth_log_odds) >= steps:
            return self._depth_survival(request)[:steps]
        survival = self._survival[row_of(request), number, :, :steps]
        if request.confidence_class is None:
            survival = np.array(request.histogram) @ survival
        else:
            survival = survival[request.confidence_class]
        found: list[float] = survival.tolist()
        return found

    def likeliest(self, requests: Sequence[RequestAcceptance], number: int, count: int) -> float:
        """Mean number of accepted drafts if the ``count`` likeliest of a batch's chains are verified."""
        survival = self._survival[[row_of(request) for request in requests], number]  # [B, C, S]
        survival = survival[:, :, : self.chains[number]]
        histograms = np.array([request.histogram for request in requests])
        shares = np.broadcast_to(histograms[:, :, None], survival.shape).ravel()
        order = (-survival).ravel().argsort()
        before = shares[order].cumsum() - shares[order]
        return float(np.clip(count - before, 0.0, shares[order]) @ survival.ravel()[order])

    def relative_variance(self, requests: Sequence[RequestAcceptance], number: int) -> float:
        """Variance of a batch's expected tokens in a shape, over their square (delta method)."""
        rows = np.array([row_of(request) for request in requests])
        histograms = np.array([request.histogram for request in requests])
        tokens = (self._tokens[rows, :, number] * histograms).sum(1)
        above = np.minimum(rows + 1, len(OFFSETS) - 1)
        slopes = (self._tokens[above, :, number] * histograms).sum(1) - tokens
        slopes /= OFFSET_STEP
        newness = np.array([request.newness for request in requests])
        own = np.array([request.variance for request in requests]) - newness**2 * self.shared_variance
        variance = slopes**2 @ own.clip(0.0) + (slopes @ newness) ** 2 * self.shared_variance
        return float(variance / tokens.sum() ** 2)

    def _depth_survival(self, request: RequestAcceptance) -> list[float]:
        """Survival of each depth by the draft's confidence head, calibrated."""
        chances = [chance_of(odds) for odds in self.calibration.log_odds(request.depth_log_odds)]
        return [*itertools.accumulate(chances, lambda reached, chance: reached * chance)]

    def see(self, request: RequestAcceptance, confidence: float | Sequence[float] | None) -> None:
        """Take in the draft's probability of its next token, or of each depth with all before it."""
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
        self, request: RequestAcceptance, number: int, num_accepted: int, num_drafts: int | None
    ) -> None:
        """Take in a drafting cycle that verified the first ``num_drafts`` depths, None for all."""
        which = -1 if request.confidence_class is None else request.confidence_class
        log_odds = self._log_odds[number][which][:num_drafts]
        depth_log_odds: Sequence[float] = ()
        if len(request.depth_log_odds) >= self.chains.get(number, math.inf):
            depth_log_odds = request.depth_log_odds[: len(log_odds)]
        self._outcomes.append(Outcome(request, num_accepted, log_odds, depth_log_odds))

    def learn(self) -> None:
        """Learn from what was taken in."""
        for request, classes in self._seen.items():
            self._num_seen += len(classes)
            rate = max(SHARED_HISTOGRAM_RATE, 1 / self._num_seen)
            request.histogram = _counted(request.histogram, classes, HISTOGRAM_RATE)
            self.shared_histogram = _counted(self.shared_histogram, classes, rate)
        self._seen.clear()
        for outcome in self._outcomes:
            self._learn_offsets(outcome)
            if outcome.depth_log_odds:
                self.calibration.learn(outcome.depth_log_odds, outcome.num_accepted)
        self._outcomes = []

    def _learn_offsets(self, outcome: Outcome) -> None:
        """Move a request's offset and the shared one, whose errors are correlated (a Kalman filter of binary
        outcomes). The longer a request is, the less it shows of others."""
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
        covariance = request.newness * self.shared_variance
        request.offset = _within(request.offset + request.variance * surprise / spread)
        self.shared_offset = _within(self.shared_offset + covariance * surprise / spread)
        self.shared_variance -= covariance**2 * information / spread
        request.newness /= spread
        request.variance /= spread
        age(request, 1)


def row_of(request: RequestAcceptance) -> int:
    """Index of a request's offset in ``OFFSETS``."""
    return round((request.offset + MAX_OFFSET) / OFFSET_STEP)


def age(request: RequestAcceptance, num_cycles: int) -> None:
    """Doubt a request's offset more behind some cycles: its text changes."""
    aged = min(request.variance + num_cycles * OFFSET_CHANGE, OFFSET_VARIANCE)
    request.variance = max(request.variance, aged)


def _within(offset: float) -> float:
    return min(max(offset, -MAX_OFFSET), MAX_OFFSET)


def _counted(histogram: Sequence[float], classes: Sequence[int], rate: float) -> list[float]:
    """Histogram, an average of the classes that came up at a rate, behind some more of them."""
    counts = [0.0] * len(histogram)
    weight = 1.0
    for confidence_class in reversed(classes):
        counts[confidence_class] += weight * rate
        weight *= 1.0 - rate
    return [weight * share + count for share, count in zip(histogram, counts, strict=True)]


class CostCorrection:
    """Costs of one batch size beside the table's, learnt from the times of its cycles.

    The logarithm of a time over the table's is the machine's level, plus drafting's error and the shape's own
    if the cycle drafts, plus noise. A Kalman filter estimates all of them at once, so that a machine that is
    slower for all shapes changes no choice.

    Args:
        num_shapes: M, plain decoding included.

    Attributes:
        has_compared: drafting has followed plain decoding, or the reverse.
    """

    def __init__(self, num_shapes: int) -> None:
        # Terms: the level, drafting, and each shape but plain decoding. Rows say which a shape has.
        self._design = np.zeros((num_shapes, 1 + num_shapes))
        self._design[:, 0] = 1.0
        self._design[1:, 1] = 1.0
        self._design[1:, 2:] = np.eye(num_shapes - 1)
        own = [SHAPE_ERROR**2] * (num_shapes - 1)
        self._prior = np.array([LEVEL_ERROR**2, DRAFTING_ERROR**2, *own])
        self._mean = np.zeros(len(self._prior))
        self._covariance = np.diag(self._prior)
        self._noise = CYCLE_NOISE**2
        self._last_number: int | None = None
        self._last_cycle = 0
        self._num_alike = 0  # cycles since plain decoding and drafting last followed each other
        self._settled_level = 0.0
        self.has_compared = False

    def factors(self) -> np.ndarray:
        """Cost of each shape beside plain decoding's over the table's, ``[M]``."""
        factors: np.ndarray = np.exp(self._design[:, 1:] @ self._mean[1:])
        return factors

    def best_factors(self, used: int) -> np.ndarray:
        """Part of its cost that each shape may have at best beside the one in use, ``[M]``."""
        beside = self._design - self._design[used]
        variances = ((beside @ self._covariance) * beside).sum(1)
        factors: np.ndarray = np.exp(-OPTIMISM * np.sqrt(variances.clip(0.0)))
        return factors

    def variance(self, number: int, cycle: int) -> float:
        """Variance of a drafting shape's cost beside plain decoding's, at a cycle."""
        beside_plain = self._design[number] - self._design[0]
        known = float(beside_plain @ self._covariance @ beside_plain)
        kept = 0.5 ** (2 * max(cycle - self._last_cycle, 0) / HALF_LIFE)
        return kept * known + (1.0 - kept) * max(known, float(beside_plain @ self._prior))

    def observe(self, number: int, cycle: int, errors: Sequence[float]) -> None:
        """Learn from the last cycles of one shape, up to ``cycle``: logarithms of their times over the
        table's."""
        if cycle > self._last_cycle:
            self._forget(cycle - self._last_cycle)
            self._last_cycle = cycle
        is_switch = number != self._last_number

        # How much do single cycles vary?
        for before, after in itertools.pairwise(errors):
            squared = min((after - before) ** 2 / 2, MAX_CYCLE_NOISE**2)
            self._noise += NOISE_RATE * (squared - self._noise)
        noise = self._noise / len(errors)
        if is_switch:
            noise += (SWITCH_NOISE / len(errors)) ** 2

        # An error that is far off contradicts what is known. A single time may be chance.
        error = statistics.median(errors)
        is_learnt = self._learn(number, error, noise)
        if not is_learnt:
            self._doubt_surprise(number, (error - float(self._design[number] @ self._mean)) ** 2)
            if len(errors) > 1:
                self._learn(number, error, noise)

        # Doubt drafting's cost if the machine has become slower or faster.
        was_drafting = bool(self._last_number)
        if self._last_number is None or was_drafting != bool(number):
            self.has_compared |= self._last_number is not None
            self._num_alike = 0
        self._num_alike += len(errors)
        self._last_number = number
        change = float(self._mean[0]) - self._settled_level
        if self._num_alike > SETTLED_CYCLES and abs(change) > LEVEL_SHIFT:
            self._doubt(1, (SHIFT_ERROR * change) ** 2, was_measured=number > 0)
        if self._num_alike <= SETTLED_CYCLES or abs(change) > LEVEL_SHIFT:
            self._settled_level = float(self._mean[0])

    def _learn(self, number: int, error: float, noise: float) -> bool:
        """Learn an error of a shape whose variance is ``noise``, unless it is far off."""
        terms = self._design[number]
        surprise = error - float(terms @ self._mean)
        column = self._covariance @ terms
        spread = float(terms @ column) + noise
        if surprise**2 > OUTLIER**2 * spread:
            return False
        self._mean += column * (surprise / spread)
        self._covariance -= np.outer(column, column / spread)
        return True

    def _forget(self, num_cycles: int) -> None:
        """Let the level change, and the other errors go back to the table's."""
        kept = np.full(len(self._mean), 0.5 ** (num_cycles / HALF_LIFE))
        kept[0] = 1.0
        self._mean *= kept
        added = (1.0 - kept**2) * self._prior
        added[0] = min(num_cycles * LEVEL_CHANGE**2, LEVEL_ERROR**2)
        self._covariance *= np.outer(kept, kept)
        self._covariance += np.diag(added)

    def _doubt_surprise(self, number: int, variance: float) -> None:
        """Doubt what may explain a surprise: the level, or the errors of a shape that follows another."""
        before = self._last_number
        if before is None or number == before:
            self._covariance[0, 0] += variance
        elif number and before:
            self._doubt(1 + number, variance)
        elif number:
            self._doubt(1, variance)
            self._doubt(1 + number, variance)
        else:
            self._doubt(1, variance, was_measured=True)
            self._doubt(1 + before, variance, was_measured=True)

    def _doubt(self, term: int, variance: float, *, was_measured: bool = False) -> None:
        """Add a variance to a term. If the last cycles had it, its sum with the level stays as known."""
        direction = np.zeros(len(self._mean))
        direction[term] = 1.0
        if was_measured:
            direction[0] = -1.0
        room = max(MAX_DOUBT**2 - float(self._covariance[term, term]), 0.0)
        self._covariance += min(variance, room) * np.outer(direction, direction)


class ExplorationBudget:
    """Time that explorations may lose: a share of all time. The first exploration is free."""

    def __init__(self) -> None:
        self._seconds = math.inf

    def earn(self, seconds: float) -> None:
        """Add the share of some cycles' time."""
        self._seconds += EXPLORATION_SHARE * seconds

    def spend(self, seconds: float) -> None:
        """Take off what was lost."""
        self._seconds -= seconds

    def affords(self, loss: float, plain: float) -> bool:
        """Return True if the budget has room for a loss; ``plain`` is the time of a plain cycle."""
        self._seconds = min(max(self._seconds, -MAX_DEBT * plain), MAX_SAVED * plain)
        return self._seconds >= loss


def expected_saving(gain: float, doubt: float) -> float:
    """Part of later cycles' time that is saved by exploring the alternative of plain decoding and drafting
    (the knowledge gradient of two alternatives).

    Args:
        gain: of drafting over plain decoding, as far as is known.
        doubt: standard error of its logarithm.
    """
    distance = abs(math.log(gain))
    alternative = statistics.NormalDist(-distance, doubt)
    return doubt**2 * alternative.pdf(0.0) - distance * (1.0 - alternative.cdf(0.0))


@dataclass(frozen=True)
class RowBudgets:
    """Numbers of rows to which the target's forward over a batch's chains may be cut, the likeliest drafts of
    the batch first.

    Attributes:
        rows: numbers of rows for a batch size and a chain, roots included, fewer than whole windows have.
        share: time of such a cycle over that with whole windows: batch size, chain, context, rows.
    """

    rows: Callable[[int, SpecShape], Sequence[int]]
    share: Callable[[int, SpecShape, int, int], float]


class CycleGain:
    """Speed of cycles that are chosen one by one over the forecast for the candidate in use, on average."""

    def __init__(self) -> None:
        self._tokens = 1.0
        self._seconds = 1.0
        self._num_cycles = 0

    @property
    def value(self) -> float:
        """The gain."""
        return self._tokens / self._seconds

    def observe(self, batch_size: int, tokens: float, seconds: float) -> None:
        """Take in what is expected of a cycle over what is forecast."""
        self._num_cycles += 1
        rate = min(batch_size / GAIN_CYCLES, 1 / MIN_GAIN_CYCLES)
        rate = max(rate, 1 / (MIN_GAIN_CYCLES + self._num_cycles))
        self._tokens += rate * (tokens - self._tokens)
        self._seconds += rate * (seconds - self._seconds)


class Candidate(NamedTuple):
    """Index of a shape, and rows of the target's forward over the batch."""

    number: int
    num_rows: int


class Forecast(NamedTuple):
    """What a cycle of a batch is expected to give and to take with each of its ``candidates``, plain decoding
    first, on average: ``tokens``, ``seconds``, and the ``least_seconds`` that it may take at best."""

    candidates: Sequence[Candidate]
    tokens: np.ndarray
    seconds: np.ndarray
    least_seconds: np.ndarray

    @property
    def plain(self) -> float:
        """Seconds of a plain cycle."""
        return float(self.seconds[0])


class ShapeChooser(ShapePolicy):
    """Choice of the shape for a running batch.

    ``choose`` is called before each cycle; ``observe``, ``see`` and ``observe_time`` behind it, perhaps one
    cycle late. What they bring is learnt at the next decision.

    Args:
        seconds: time of a cycle by a table: batch size, shape, context.
        acceptance: of average text.
        menus: candidate shapes by batch size. A size has those of the next larger one.
        origin: source of the numbers, for users.
        backfill: time of a draft backfill: batch size, tokens per request, context.
        budgets: of rows; None verifies whole windows.
        is_average: the acceptance is another draft's.

    Attributes:
        num_rows: rows of the target's forward in the cycle that was chosen last.
    """

    def __init__(
        self,
        seconds: Seconds,
        acceptance: AcceptanceTable,
        menus: Mapping[int, Sequence[SpecShape]],
        origin: str = "",
        backfill: Callable[[int, int, int], float] = lambda batch_size, num_tokens, context: 0.0,
        budgets: RowBudgets | None = None,
        *,
        is_average: bool = False,
    ) -> None:
        super().__init__(menus)
        self.origin = origin
        self.num_rows = 0
        self.acceptance = AcceptanceModel(acceptance, self.shapes, is_average=is_average)
        self._index = {shape: number for number, shape in enumerate(self.shapes)}

        # Costs.
        self._seconds = seconds
        self._backfill = backfill
        self._budgets = budgets
        self._candidates: dict[int, list[Candidate]] = {}
        self._tables: dict[tuple[int, int], np.ndarray] = {}
        self._corrections: dict[int, CostCorrection] = {}
        self._times: defaultdict[tuple[int, int], list[float]] = defaultdict(list)  # by batch size and shape

        # The decision that is held: the candidate in use, by its index in a forecast.
        self._forecast: Forecast | None = None
        self._used = 0
        self._prices: Sequence[float] = ()
        self._batch_size = 0
        self._held = 0
        self._next_hold = FIRST_HOLD
        self._num_cycles = 0
        self._last_decision = 0
        self._cycle_gains: defaultdict[int, CycleGain] = defaultdict(CycleGain)

        # Exploration.
        self._budget = ExplorationBudget()
        self._is_exploring = False
        self._is_confirming = False  # the exploration tries again what was in use before the one before it
        self._switched = 0
        self._num_timed = 0
        self._num_comparisons: defaultdict[int, int] = defaultdict(int)
        self._drafting_loss = 0.0
        self._seconds_each = 0.0
        self._plain_each = 0.0

    # Calls of the engine

    def new_request(self) -> RequestAcceptance:
        """Return the statistics that a request begins with; the next decision comes soon."""
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
        chosen = self._used
        if chosen:
            chosen = self._choose_cycle(self._forecast, requests)
            self._seconds_each = float(self._forecast.seconds[chosen]) / len(requests)
            self._plain_each = self._forecast.plain / len(requests)
        number, self.num_rows = self._forecast.candidates[chosen]
        return self.shapes[number]

    def see(self, request: RequestAcceptance, confidence: float | Sequence[float] | None) -> None:
        """Take in the draft's confidence, see :meth:`AcceptanceModel.see`."""
        self.acceptance.see(request, confidence)

    def observe(
        self, request: RequestAcceptance, shape: SpecShape, num_accepted: int, num_drafts: int | None = None
    ) -> None:
        """Take in a cycle of one request, whose first ``num_drafts`` depths were verified, None for all."""
        if shape.steps:
            self._drafting_loss += self._seconds_each - (1 + num_accepted) * self._plain_each
            self.acceptance.observe(request, self._index[shape], num_accepted, num_drafts)

    def observe_time(
        self, batch_size: int, shape: SpecShape, context: int, seconds: float, num_rows: int | None = None
    ) -> None:
        """Take in the time of a cycle of a batch, with ``num_rows`` of the target's forward, None for all."""
        number = self._index[shape]
        candidate = Candidate(number, num_rows or batch_size * shape.tokens)
        table = self._table(batch_size, context)[self.candidates(batch_size).index(candidate)]
        self._times[batch_size, number].append(math.log(seconds / table))

    def learn(self) -> None:
        """Learn from what was taken in, the times of one shape together."""
        self._num_timed += sum(len(errors) for errors in self._times.values())
        for (batch_size, number), errors in self._times.items():
            if batch_size not in self._corrections:
                self._corrections[batch_size] = CostCorrection(len(self.shapes))
            self._corrections[batch_size].observe(number, self._num_cycles, errors)
        self._times.clear()
        self.acceptance.learn()

    def plan(self, batch_sizes: Sequence[int], context: int = 256) -> list[Choice]:
        """Return the choice for batches of average text."""
        choices = []
        for size in batch_sizes:
            forecast = self._forecast_of([self.acceptance.average_request()] * size, context)
            speeds = forecast.tokens / forecast.seconds
            best = int(speeds.argmax())
            length = float(forecast.tokens[best]) / size
            milliseconds = 1e3 * float(forecast.seconds[best])
            gain = float(speeds[best] / speeds[0])
            shape = self.shapes[forecast.candidates[best].number]
            choices.append(Choice(size, shape, length, milliseconds, gain))
        return choices

    # Forecasts

    def candidates(self, batch_size: int) -> list[Candidate]:
        """List the candidates for a batch size, plain decoding first."""
        if batch_size in self._candidates:
            return self._candidates[batch_size]
        found = self._candidates[batch_size] = []
        for shape in self.menu(batch_size):
            number = self._index[shape]
            found.append(Candidate(number, batch_size * shape.tokens))
            if self._budgets is not None and number in self.acceptance.chains:
                found += [Candidate(number, rows) for rows in self._budgets.rows(batch_size, shape)]
        return found

    def _is_whole(self, candidate: Candidate, batch_size: int) -> bool:
        return candidate.num_rows == batch_size * self.shapes[candidate.number].tokens

    def _table(self, batch_size: int, context: int) -> np.ndarray:
        """Seconds of a cycle with each candidate by the table."""
        key = batch_size, context // CONTEXT_SPAN
        if key not in self._tables:
            middle = key[1] * CONTEXT_SPAN + CONTEXT_SPAN // 2
            seconds = []
            for candidate in self.candidates(batch_size):
                shape = self.shapes[candidate.number]
                whole = self._seconds(batch_size, shape, middle)
                if self._budgets is not None and not self._is_whole(candidate, batch_size):
                    whole *= self._budgets.share(batch_size, shape, middle, candidate.num_rows)
                seconds.append(whole)
            self._tables[key] = np.array(seconds)
        return self._tables[key]

    def _forecast_of(self, requests: Sequence[RequestAcceptance], context: int) -> Forecast:
        """Forecast a cycle of a batch on average over its confidence histograms."""
        size = len(requests)
        candidates = self.candidates(size)
        numbers = [candidate.number for candidate in candidates]
        tokens = self.acceptance.mean_tokens(requests).sum(0)[numbers]
        for i, candidate in enumerate(candidates):
            if not self._is_whole(candidate, size):
                drafts = candidate.num_rows - size
                tokens[i] = size + self.acceptance.likeliest(requests, candidate.number, drafts)
        used = self._index[self.shape]
        seconds = self._table(size, context)
        least = seconds
        correction = self._corrections.get(size)
        if correction is not None:
            seconds = seconds * correction.factors()[numbers]
            least = seconds * correction.best_factors(used)[numbers]
        return Forecast(candidates, tokens, seconds, least)

    # Decisions

    def _decide(self, requests: Sequence[RequestAcceptance], context: int) -> Forecast:
        """Learn, decide between plain decoding and drafting, and return the forecast of the next cycles."""
        size = len(requests)

        # Learn from the cycles since the last decision.
        elapsed = self._num_cycles - self._last_decision
        self._last_decision = self._num_cycles
        if self._forecast is not None:
            self._budget.earn(elapsed * float(self._forecast.seconds[self._used]))
        if not self._used:
            for request in requests:
                age(request, elapsed)
        self.learn()

        # Forecast all candidates and find the best that drafts.
        forecast = self._forecast_of(requests, context)
        plain = float(forecast.tokens[0]) / forecast.plain
        best = 0
        drafting = 0.0
        if len(forecast.candidates) > 1:
            best = 1 + int((forecast.tokens / forecast.least_seconds)[1:].argmax())
            drafting = float(forecast.tokens[best] / forecast.seconds[best])
            drafting *= self._cycle_gains[size].value

        # Decide, unless an exploration goes on.
        self._batch_size = size
        if not best:
            self._use(0)
            self._is_exploring = False
            self._is_confirming = False
        elif self._has_to_explore(size):
            self._used = best if self._used else 0
        else:
            self._decide_mode(requests, context, forecast, best, drafting / plain)

        # Hold the decision.
        self._prices = (max(drafting, plain) * forecast.least_seconds).tolist()
        self._held = HOLD
        if self._is_exploring:
            self._held = max(self._least_explored(size) - (self._num_cycles - self._switched), 1)
        elif self._used:
            self._held = self._next_hold
            self._next_hold = min(2 * self._next_hold, HOLD)
        self.shape = self.shapes[forecast.candidates[self._used].number]
        return forecast

    def _decide_mode(
        self, requests: Sequence[RequestAcceptance], context: int, forecast: Forecast, best: int, gain: float
    ) -> None:
        """Decide between plain decoding and the ``best`` candidate that drafts, whose speed is ``gain`` times
        as high as far as is known; one of them may be explored."""
        size = len(requests)
        has_explored = self._is_exploring
        needs_confirmation = has_explored and not self._is_confirming
        self._is_exploring = False
        self._is_confirming = False
        loss_of_plain = EXPLORED_CYCLES * forecast.plain * (1.0 - 1.0 / max(gain, 1.0))

        # Drafting is in use. An exploration of it that says that it is worth while is confirmed by plain cycles.
        if self._used:
            if needs_confirmation and gain >= 1.0:
                self._use(0)
                self._budget.spend(loss_of_plain)
                self._is_exploring = True
                self._is_confirming = True
                return
            self._use(best if gain >= 1.0 else 0)
            loss = loss_of_plain + self._backfill(size, EXPLORED_CYCLES, context)
            if self._used and self._is_worth_exploring(requests, forecast, best, gain, loss):
                self._use(0)
                self._budget.spend(loss)
                self._is_exploring = True
            return

        # Drafting has to pay for the backfill of the tokens that the draft has not read.
        num_pending = max(request.num_pending for request in requests)
        backfill = self._backfill(size, num_pending, context) if num_pending else 0.0
        drafting = float(forecast.seconds[best])
        least = MIN_GAIN * (1.0 + backfill / (BACKFILL_CYCLES * drafting))
        if gain > (1.0 if has_explored else least):
            self._use(best)
            return

        # An exploration of plain decoding that says that drafting is not worth while is confirmed by drafting:
        # the machine may have been slower before it.
        loss = self._least_explored(size, best) * drafting * (1.0 - min(gain, 1.0 / gain)) + backfill
        if needs_confirmation or self._is_worth_exploring(requests, forecast, best, gain, loss):
            self._use(best)
            self._drafting_loss += backfill
            self._is_exploring = True
            self._is_confirming = needs_confirmation

    def _is_worth_exploring(
        self,
        requests: Sequence[RequestAcceptance],
        forecast: Forecast,
        best: int,
        gain: float,
        loss: float,
    ) -> bool:
        """Return True if the alternative to what is in use is to be explored at an expected loss."""
        size = len(requests)
        correction = self._corrections.get(size)
        num_cycles = self._num_cycles - self._switched

        # It has waited for long, or it is expected to save more than it loses.
        waited = num_cycles * float(forecast.seconds[self._used])
        if EXPLORATION_SHARE * waited >= max(MAX_SAVED * forecast.plain, loss):
            return True
        if self._budget.affords(loss, forecast.plain):
            number = forecast.candidates[best].number
            variance = self.acceptance.relative_variance(requests, number)
            if correction is not None:
                variance += correction.variance(number, self._num_cycles)
            saving = expected_saving(gain, math.sqrt(variance) + 1e-6)
            if EXPLOITED_CYCLES * forecast.plain * saving >= loss:
                return True

        # The table may be far off: drafting that begins is compared with plain decoding.
        is_due = self._used and num_cycles >= COMPARED_CYCLES
        if not is_due or correction is None or correction.has_compared:
            return False
        self._num_comparisons[size.bit_length()] += 1
        return self._num_comparisons[size.bit_length()] <= MAX_COMPARISONS

    def _least_explored(self, batch_size: int, candidate: int | None = None) -> int:
        """Cycles of an exploration of what is in use, or of a candidate."""
        is_drafting = self._used if candidate is None else candidate
        if not is_drafting:
            return EXPLORED_CYCLES
        return min(max(EXPLORED_DRAFTS // batch_size, 2), EXPLORED_CYCLES)

    def _has_to_explore(self, batch_size: int) -> bool:
        """Return True if an exploration has cycles left, or lacks times, which come late or are left out."""
        if not self._is_exploring:
            return False
        num_cycles = self._num_cycles - self._switched
        if num_cycles < self._least_explored(batch_size):
            return True
        most = EXPLORED_CYCLES if self._used else MAX_EXPLORED_CYCLES
        return num_cycles < most and self._num_timed < LEAST_TIMED

    def _use(self, candidate: int) -> None:
        """Use a candidate. What drafting has lost beside plain decoding is paid for when it ends."""
        if bool(candidate) != bool(self._used):
            if self._used:
                self._budget.spend(max(self._drafting_loss, 0.0))
            self._drafting_loss = 0.0
            self._switched = self._num_cycles
            self._num_timed = 0
            self._next_hold = FIRST_HOLD
        self._used = candidate

    def _choose_cycle(self, forecast: Forecast, requests: Sequence[RequestAcceptance]) -> int:
        """Index of the candidate for a single cycle of drafting, by the draft's confidence: another than the
        one in use if it is worth more tokens, of which its time costs some."""
        if all([request.confidence_class is None for request in requests]):
            return self._used

        # Expected tokens with each candidate.
        size = len(requests)
        by_request = [self.acceptance.next_tokens(request) for request in requests]
        by_shape = by_request[0] if size == 1 else [*map(sum, zip(*by_request, strict=True))]
        tokens = [by_shape[candidate.number] for candidate in forecast.candidates]
        if self._budgets is not None:
            self._cut_to_rows(tokens, forecast, requests)

        # The best of them.
        worth = [each - price for each, price in zip(tokens, self._prices, strict=True)]
        best = max(range(1, len(worth)), key=worth.__getitem__)
        if worth[best] < worth[self._used] + MIN_CYCLE_GAIN * tokens[self._used]:
            best = self._used
        gained_tokens = tokens[best] / float(forecast.tokens[self._used])
        gained_seconds = float(forecast.seconds[best] / forecast.seconds[self._used])
        self._cycle_gains[size].observe(size, gained_tokens, gained_seconds)
        return best

    def _cut_to_rows(
        self, tokens: list[float], forecast: Forecast, requests: Sequence[RequestAcceptance]
    ) -> None:
        """Replace the expected tokens of candidates that verify only the likeliest drafts of the batch."""
        size = len(requests)
        sums: dict[int, list[float]] = {}
        for i, candidate in enumerate(forecast.candidates):
            number = candidate.number
            if self._is_whole(candidate, size):
                continue
            if number not in sums:
                survival = [self.acceptance.next_survival(request, number) for request in requests]
                ranked = sorted(itertools.chain(*survival), reverse=True)
                sums[number] = [*itertools.accumulate(ranked, initial=float(size))]
            tokens[i] = sums[number][candidate.num_rows - size]
