"""Choice of the graphs that an engine may have, within a budget of device memory.

Graphs are chosen in units: a batch size and a kind of batch, with all shapes of that size. Units that come up
often are chosen first. A batch whose unit is left out is padded to a larger one, or runs eagerly.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from eagle_kit.engine.graphs.batch_kind import GRAMMAR_KINDS, LOGPROBS_KINDS, USUAL_KINDS, BatchKind

MOST_LISTED = 6
"""Batch sizes that a message lists; of more it has the first and the last."""


class GraphUnit(NamedTuple):
    """Graphs that are chosen or left out together.

    Attributes:
        size: requests of the padded batch.
        kind: kind of the batch.
    """

    size: int
    kind: BatchKind


class UnitCost(NamedTuple):
    """Cost of the graphs of a unit.

    Attributes:
        number: how many graphs these are.
        launches: launches in all of them.
        tensor_bytes: bytes of the tensors that they keep.
    """

    number: int = 0
    launches: int = 0
    tensor_bytes: int = 0

    def __add__(self, other: "UnitCost") -> "UnitCost":  # type: ignore[override]
        return UnitCost(
            number=self.number + other.number,
            launches=self.launches + other.launches,
            tensor_bytes=self.tensor_bytes + other.tensor_bytes,
        )

    def num_bytes(self, bytes_of_launch: float) -> int:
        """Bytes of device memory."""
        return int(self.launches * bytes_of_launch) + self.tensor_bytes


class GraphSelection:
    """Units that may have graphs, and the measured memory of the graphs that were captured.

    Args:
        costs: cost of each wanted unit, the most frequent one first (:func:`by_frequency`).
        budget: bytes that graphs may take; None chooses all units.
        bytes_of_launch: estimated device memory of a launch in a graph.

    Attributes:
        budget: see above.
        chosen: units that may have graphs.
    """

    def __init__(
        self, costs: Mapping[GraphUnit, UnitCost], budget: int | None, bytes_of_launch: float
    ) -> None:
        self._costs = costs
        self.budget = budget
        self._estimated = bytes_of_launch

        # Units with graphs, and those for which memory was missing.
        self._captured: set[GraphUnit] = set()
        self._too_large: set[GraphUnit] = set()

        # Measured graphs.
        self._measured = UnitCost()
        self._measured_bytes = 0
        self.chosen: frozenset[GraphUnit] = frozenset()
        self._choose()

    @property
    def is_measured(self) -> bool:
        """True once the memory of graphs has been measured."""
        return self._measured.launches > 0

    @property
    def bytes_of_launch(self) -> float:
        """Device memory of a launch in a graph: measured, or estimated before any graph was measured."""
        if not self.is_measured:
            return self._estimated
        return self._measured_bytes / self._measured.launches

    @property
    def planned_node_bytes(self) -> int:
        """Device memory that was planned for the launches of the graphs that were captured."""
        return int(self.cost(self._captured).launches * self._estimated)

    def cost(self, units: Collection[GraphUnit]) -> UnitCost:
        """Sum of the costs of ``units``."""
        return sum((self._costs[unit] for unit in units), start=UnitCost())

    def may_capture(self, unit: GraphUnit) -> bool:
        """Return whether a batch of ``unit`` may have graphs. Units that were not asked for may."""
        return unit in self.chosen or unit not in self._costs

    def serving(self, unit: GraphUnit, sizes: Sequence[int]) -> GraphUnit:
        """Unit whose graphs a batch of ``unit`` uses.

        It is the batch's own if that is chosen, else the smallest chosen one that contains it: of a larger
        size, a higher level, or both. Without any it is the batch's own, which then runs eagerly.

        Args:
            sizes: batch sizes with graphs of the shape of the batch, ascending.
        """
        if self.may_capture(unit):
            return unit
        for size in sizes:
            if size < unit.size:
                continue
            for kind in unit.kind.containing():
                if GraphUnit(size, kind) in self.chosen:
                    return GraphUnit(size, kind)
        return unit

    def reserve(self, num_bytes: int) -> None:
        """Take ``num_bytes`` off the budget, and choose again."""
        if self.budget is not None and num_bytes:
            self.budget -= num_bytes
            self._choose()

    def note_captured(self, unit: GraphUnit, node_bytes: int | None) -> None:
        """Note that all graphs of ``unit`` are there, and choose again by what is known now.

        Args:
            node_bytes: device memory that the driver took for them, beside their tensors; None if some of
                the graphs were there before.
        """
        self._captured.add(unit)
        if node_bytes is not None:
            self._measured += self._costs[unit]
            self._measured_bytes += node_bytes
        self._choose()

    def note_out_of_memory(self, unit: GraphUnit) -> None:
        """Leave out ``unit``, and all units that need at least as much memory: those of its size or a larger
        one whose kind contains its kind or computes more."""
        self._too_large.add(unit)
        self._choose()

    def left_out(self, kinds: Collection[BatchKind]) -> list[GraphUnit]:
        """Wanted units of ``kinds`` that are not chosen."""
        return [unit for unit in self._costs if unit.kind in kinds and unit not in self.chosen]

    def _choose(self) -> None:
        """Choose units, the most frequent first, until the budget is spent."""
        spent = self.cost(self._captured)
        chosen = set(self._captured)
        for unit, cost in self._costs.items():
            if unit in self._captured or self._is_too_large(unit):
                continue
            total = spent + cost
            if self.budget is not None and total.num_bytes(self.bytes_of_launch) > self.budget:
                break
            chosen.add(unit)
            spent = total
        self.chosen = frozenset(chosen)

    def _is_too_large(self, unit: GraphUnit) -> bool:
        return any(
            unit.size >= failed.size and unit.kind.computes_all_of(failed.kind) for failed in self._too_large
        )


def by_frequency(sizes: Sequence[int], kinds: Collection[BatchKind]) -> list[GraphUnit]:
    """List the units of ``sizes`` and ``kinds``, the most frequent first.

    All kinds come before sizes between powers of two: such a size saves padding only, and a batch whose kind
    is left out has no graph at all. Log-probabilities and grammars are the last kinds.
    """
    main = main_sizes(sizes)
    between = [size for size in sizes if size not in main]
    order = [kind for kind in (*USUAL_KINDS, *LOGPROBS_KINDS, *GRAMMAR_KINDS) if kind in kinds]
    return [GraphUnit(size, kind) for part in (main, between) for kind in order for size in part]


def main_sizes(sizes: Sequence[int]) -> list[int]:
    """The powers of two among ``sizes``, and the largest."""
    return [size for size in sizes if size & (size - 1) == 0 or size == max(sizes)]


def describe(units: Collection[GraphUnit]) -> Iterator[str]:
    """Iterate over phrases for units: kinds with the same batch sizes together."""
    sizes: dict[BatchKind, list[int]] = {}
    for unit in units:
        sizes.setdefault(unit.kind, []).append(unit.size)
    kinds: dict[tuple[int, ...], list[BatchKind]] = {}
    for kind, found in sizes.items():
        kinds.setdefault(tuple(sorted(found)), []).append(kind)
    for found_sizes, found_kinds in kinds.items():
        names = ", ".join(kind.name for kind in found_kinds)
        yield f"batches of {_listed(found_sizes)} requests ({names})"


def _listed(sizes: Sequence[int]) -> str:
    if len(sizes) <= MOST_LISTED:
        return ", ".join(map(str, sizes))
    return f"{sizes[0]}, {sizes[1]} .. {sizes[-1]} ({len(sizes)} sizes)"
