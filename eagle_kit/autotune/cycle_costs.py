"""What a cycle costs now in every shape: what a table says, as this engine's cycles have corrected it."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from eagle_kit.autotune.cost_filter import QUICK_ERROR, TABLE_ERROR, CostFilter, Kind
from eagle_kit.autotune.packing import packed_counts
from eagle_kit.autotune.shapes import Seconds
from eagle_kit.core.shape import SpecShape

SPAN = 256
"""Tokens of context over which costs are taken for the same."""

OPTIMISM = 0.3
"""Standard errors by which a kind of cycle that is not in use may be better than is known."""

PackedShare = Callable[[int, SpecShape, int, int], float]
"""Time of a cycle whose windows are packed, as a part of that with whole ones: batch size, shape, context,
rows."""


class ShapeCosts(NamedTuple):
    """Seconds of a cycle in every shape, M of them, and the filter's ``version`` that they are of."""

    version: int
    seconds: list[float]


class Packings(NamedTuple):
    """Drafts of a batch that are verified together, all but none and all, the ``seconds`` of such cycles, and
    the filter's ``version`` that they are of."""

    version: int
    counts: list[int]
    seconds: list[float]

    def may_be_worth(self, least: float, size: int, whole: float, rate: float) -> bool:
        """Return False if none is worth more than ``least``, whichever drafts are accepted: of whole windows
        of ``size`` requests ``whole`` tokens are expected, and a second is worth ``rate`` tokens."""
        for count, took in zip(self.counts, self.seconds, strict=True):
            if min(size + count, whole) - rate * took > least:
                return True
        return False


class CycleCosts:
    """Costs of the cycles of one engine. Shapes are named by their numbers, plain decoding is 0.

    Args:
        shapes: M of them.
        seconds: time of a cycle of a batch size, a shape and a context, by a table.
        packed_share: None packs nothing.
        tuned_to: largest batch size whose times a long measurement has; those of larger ones are doubted
            more.

    Attributes:
        packed_share: as given.
        tuned_to: as given.
    """

    def __init__(
        self,
        shapes: Sequence[SpecShape],
        seconds: Seconds,
        packed_share: PackedShare | None,
        tuned_to: int,
    ) -> None:
        self._shapes, self._seconds = shapes, seconds
        self.packed_share, self.tuned_to = packed_share, tuned_to
        self._tables: dict[tuple[int, int], list[float]] = {}
        self._shares: dict[tuple[int, int, int, int], float] = {}
        self._costs: dict[tuple[int, int], ShapeCosts] = {}
        self._packings: dict[tuple[int, int, int], Packings] = {}
        self._filters: dict[int, CostFilter] = {}
        self._at_best: dict[int, tuple[int, Kind, dict[Kind, float]]] = {}

    def of(self, batch_size: int, context: int) -> ShapeCosts:
        """Return the costs of a batch whose requests have ``context`` tokens on average."""
        key, cost_filter = (batch_size, context // SPAN), self._filters.get(batch_size)
        version, found = -1 if cost_filter is None else cost_filter.version, self._costs.get(key)
        if found is None or found.version != version:
            seconds = self._table(batch_size, context)
            if cost_filter is not None:
                seconds = [each * math.exp(cost_filter.drift(Kind(i))) for i, each in enumerate(seconds)]
            found = self._costs[key] = ShapeCosts(version, seconds)
        return found

    def at_best(self, batch_size: int, number: int, used: Kind, *, is_packed: bool = False) -> float:
        """Return the part of its expected seconds that a cycle may take at best, by ``OPTIMISM`` beside the
        kind that is ``used``. What is chosen by that comes up again after it was slow once."""
        cost_filter = self._filters.get(batch_size)
        if cost_filter is None:
            return 1.0
        known = self._at_best.get(batch_size)
        if known is None or known[:2] != (cost_filter.num_updates, used):
            known = self._at_best[batch_size] = cost_filter.num_updates, used, {}
        kind = Kind(number, is_packed)
        if kind not in known[2]:
            known[2][kind] = math.exp(-OPTIMISM * cost_filter.standard_error(kind, used))
        return known[2][kind]

    def packings(self, batch_size: int, context: int, number: int) -> Packings:
        """Return what parts of a chain's drafts may be verified, and the costs; something must be packed."""
        key, cost_filter = (batch_size, context // SPAN, number), self._filters.get(batch_size)
        version, found = -1 if cost_filter is None else cost_filter.version, self._packings.get(key)
        if found is not None and found.version == version:
            return found
        counts = [count for count in packed_counts(batch_size, self._shapes[number].steps) if count]
        shares = [self._share(batch_size, number, context, batch_size + count) for count in counts]
        drift = 0.0 if cost_filter is None else cost_filter.drift(Kind(number, is_packed=True))
        whole = math.exp(drift) * self._table(batch_size, context)[number]
        found = self._packings[key] = Packings(version, counts, [share * whole for share in shares])
        return found

    def observe(
        self, batch_size: int, number: int, context: int, seconds: float, num_rows: int | None, cycle: int
    ) -> None:
        """Learn what a cycle took, the engine's ``cycle``-th, whose windows were packed into ``num_rows`` if
        any."""
        cost_filter = self._filters.get(batch_size)
        if cost_filter is None:
            error = TABLE_ERROR if batch_size <= self.tuned_to else QUICK_ERROR
            cost_filter = self._filters[batch_size] = CostFilter(error)
        expected, is_packed = self._table(batch_size, context)[number], False
        if num_rows is not None and self.packed_share is not None:
            expected, is_packed = expected * self._share(batch_size, number, context, num_rows), True
        cost_filter.observe(Kind(number, is_packed), cycle, math.log(seconds / expected))

    def variance(self, batch_size: int, number: int, cycle: int) -> float:
        """Return the variance of a shape's cost beside plain decoding, as a part of it."""
        cost_filter = self._filters.get(batch_size)
        return 0.0 if cost_filter is None else cost_filter.variance(Kind(number), cycle)

    def needs_comparing(self, batch_size: int) -> bool:
        """Return True if cycles of a batch size were timed, but no shape compared with plain decoding."""
        cost_filter = self._filters.get(batch_size)
        return cost_filter is not None and not cost_filter.has_compared

    def _table(self, batch_size: int, context: int) -> list[float]:
        key = batch_size, context // SPAN
        if key not in self._tables:
            middle = _middle(context)
            self._tables[key] = [float(self._seconds(batch_size, shape, middle)) for shape in self._shapes]
        return self._tables[key]

    def _share(self, batch_size: int, number: int, context: int, num_rows: int) -> float:
        key = batch_size, number, context // SPAN, num_rows
        if key not in self._shares:
            assert self.packed_share is not None
            share = self.packed_share(batch_size, self._shapes[number], _middle(context), num_rows)
            self._shares[key] = share
        return self._shares[key]


def _middle(context: int) -> int:
    """Middle of the span that a context is in."""
    return context // SPAN * SPAN + SPAN // 2
