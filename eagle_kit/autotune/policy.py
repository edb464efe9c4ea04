"""Shape of each cycle, as an engine asks for it: the base of all policies, and what they exchange with it."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eagle_kit.core.shape import NO_SPECULATION, SpecShape


@dataclass(frozen=True)
class Choice:
    """A shape for a batch size: its expected tokens per cycle and request, milliseconds of a cycle, and its
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


@dataclass(eq=False)
class RequestAcceptance:
    """Acceptance statistics of one request. Policies that learn nothing leave them as they are.

    Attributes:
        offset: log-odds by which each of its drafts is likelier to be accepted than the table says.
        variance: of the offset.
        histogram: share of its cycles in each confidence class, ``[C]``.
        newness: correlation of its offset's error with the shared offset's, 1 at first.
        confidence_class: class of the draft's confidence in its next token; None if it is unknown.
        depth_log_odds: log-odds of each depth by the draft's confidence head; empty without one.
        num_pending: tokens that the draft has not read; set by the engine.
        is_first_cycle: no drafting cycle was learnt from.
    """

    offset: float = 0.0
    variance: float = 0.0
    histogram: Sequence[float] = ()
    newness: float = 1.0
    confidence_class: int | None = None
    depth_log_odds: Sequence[float] = ()
    num_pending: int = 0
    is_first_cycle: bool = True


class ShapePolicy:
    """Shape of every cycle, set by its owner: a measurement, or the first rank of tensor parallelism.

    Args:
        candidates: shapes by batch size, plain decoding included. A size has those of the next larger one.
        shape: of the next cycles.

    Attributes:
        shape: as given; it may be set between two cycles.
        shapes: all candidates, plain decoding first.
        origin: source of the choice, for users.
    """

    def __init__(
        self, candidates: Mapping[int, Sequence[SpecShape]], shape: SpecShape = NO_SPECULATION
    ) -> None:
        drafting = {each for shapes in candidates.values() for each in shapes if each.steps}
        self.shape = shape
        self.shapes = [NO_SPECULATION, *sorted(drafting)]
        self.origin = ""
        self._sizes = sorted(candidates)
        self._by_size = {
            size: [each for each in self.shapes if not each.steps or each in candidates[size]]
            for size in self._sizes
        }

    @property
    def menus(self) -> dict[int, list[SpecShape]]:
        """Candidate shapes of the batch sizes that have their own."""
        return dict(self._by_size)

    def menu(self, batch_size: int) -> list[SpecShape]:
        """List the candidate shapes for a batch size, plain decoding first."""
        if not self._sizes:
            return [NO_SPECULATION]
        at = min(bisect_left(self._sizes, batch_size), len(self._sizes) - 1)
        return self._by_size[self._sizes[at]]

    def new_request(self) -> RequestAcceptance:
        """Return the statistics that a request begins with."""
        return RequestAcceptance()

    def choose(self, requests: Sequence[RequestAcceptance], context: int) -> SpecShape:
        """Choose the shape of the next cycle of a batch with ``context`` tokens per request on average."""
        return self.shape

    def see(self, request: RequestAcceptance, confidence: float | Sequence[float] | None) -> None:
        """Take in the draft's probability of a request's next token, or of each depth with all before it;
        None if the draft has not read the request's last tokens."""

    def observe(
        self, request: RequestAcceptance, shape: SpecShape, num_accepted: int, num_drafts: int | None = None
    ) -> None:
        """Take in a cycle of one request, whose first ``num_drafts`` depths were verified, None for all."""

    def observe_time(
        self, batch_size: int, shape: SpecShape, context: int, seconds: float, num_rows: int | None = None
    ) -> None:
        """Take in the time of a cycle of a batch, with ``num_rows`` of the target's forward, None for all."""

    def plan(self, batch_sizes: Sequence[int], context: int = 256) -> list[Choice]:
        """Return what is chosen for batches of average text; empty where nothing is known of it."""
        return []
