"""Interface between an engine and a policy that chooses the shape of each cycle; the policy of one shape."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eagle_kit.core.shape import NO_SPECULATION, SpecShape


@dataclass(frozen=True)
class ShapeChoice:
    """Shape that a policy chooses for a batch size.

    Attributes:
        length: expected tokens per cycle and request.
        milliseconds: expected time of a cycle.
        gain: expected speed over plain decoding.
    """

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
        offset: added to the table's log-odds that a draft of this request is accepted.
        variance: of the offset.
        histogram: share of its cycles in each confidence class, ``[C]``.
        shared_weight: weight of the error of the shared offset in that of its own (their covariance over the
            variance of the shared one), 1 at first.
        confidence_class: class of the draft's confidence in its next token; None if it is unknown.
        depth_log_odds: log-odds of each depth by the draft's confidence head; empty without one.
        num_pending: pending draft tokens; set by the engine.
        is_first_cycle: True until the policy has learnt from a drafting cycle.
    """

    offset: float = 0.0
    variance: float = 0.0
    histogram: Sequence[float] = ()
    shared_weight: float = 1.0
    confidence_class: int | None = None
    depth_log_odds: Sequence[float] = ()
    num_pending: int = 0
    is_first_cycle: bool = True


class ShapePolicy:
    """Shape of every cycle. This policy chooses nothing: its owner sets ``shape``, in a measurement or on a
    follower of tensor parallelism. Subclasses choose.

    Args:
        candidates: shapes by batch size; plain decoding is always one. A size that is missing has those of
            the next larger one, or of the largest.
        shape: of the next cycles.

    Attributes:
        shape: of the next cycles; it may be set between two cycles.
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
        self._by_size: dict[int, list[SpecShape]] = {}
        for size in self._sizes:
            self._by_size[size] = [s for s in self.shapes if not s.steps or s in candidates[size]]

    @property
    def shapes_by_size(self) -> dict[int, list[SpecShape]]:
        """Candidate shapes of the batch sizes that have their own."""
        return dict(self._by_size)

    def shapes_at(self, batch_size: int) -> list[SpecShape]:
        """Candidate shapes for a batch size, plain decoding first."""
        if not self._sizes:
            return [NO_SPECULATION]
        index = min(bisect_left(self._sizes, batch_size), len(self._sizes) - 1)
        return self._by_size[self._sizes[index]]

    def new_request(self) -> RequestAcceptance:
        """Return the statistics that a request begins with."""
        return RequestAcceptance()

    def choose(self, requests: Sequence[RequestAcceptance], context: int) -> SpecShape:
        """Choose the shape of the next cycle of a batch with ``context`` tokens per request on average."""
        return self.shape

    def observe_confidence(
        self, request: RequestAcceptance, confidence: float | Sequence[float] | None
    ) -> None:
        """Record the draft's confidence before a cycle of a request.

        Args:
            confidence: probability of the first drafted token, or, of a confidence head, that each depth is
                accepted with all before it; None if the draft has pending tokens.
        """

    def observe(
        self, request: RequestAcceptance, shape: SpecShape, num_accepted: int, num_depths: int | None = None
    ) -> None:
        """Record the outcome of a cycle of one request.

        Args:
            num_accepted: accepted drafts.
            num_depths: how many of the first depths were verified; None for all. Only cuts to fewer rows
                (``row_budgets.py``) leave depths out, and no engine makes them yet.
        """

    def observe_time(
        self, batch_size: int, shape: SpecShape, context: int, seconds: float, num_rows: int | None = None
    ) -> None:
        """Record the time of a cycle of a batch.

        Args:
            context: tokens per request, on average.
            num_rows: rows of the target's forward; None for whole windows.
        """

    def plan(self, batch_sizes: Sequence[int], context: int = 256) -> list[ShapeChoice]:
        """Return the choices for batches of average text; empty if the policy predicts none."""
        return []
