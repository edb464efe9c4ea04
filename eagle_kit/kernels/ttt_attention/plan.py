"""Visible keys of each training row: computed once per packed row, used by every step.

Legend: R query rows, T packed tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

BLOCK_ROWS = 256
KEPT_MASK_ENTRIES = 1 << 22
"""Largest total number of mask entries that a plan keeps (16 MB); masks of longer documents are made when
their block is computed, because together they would have R x T / 2 entries."""


class QueryBlock(NamedTuple):
    """Query rows ``start..stop-1`` (of R) against keys ``key_start..key_stop-1`` (of T) of one document.

    ``mask`` fp32 ``[stop - start, key_stop - key_start]``: 0 where the key is not after the row, else -inf.
    """

    start: int
    stop: int
    key_start: int
    key_stop: int
    mask: torch.Tensor


@dataclass(frozen=True)
class QueryPlan:
    """Visible prefix keys of query rows; each implementation derives its own representation on first use.

    Attributes:
        rows: positions of the query rows, ascending, int64 ``[R]``.
        doc_start: first token of each token's document, int64 ``[T]``.
        block_rows: maximum rows of a block.
    """

    rows: torch.Tensor
    doc_start: torch.Tensor
    block_rows: int

    @cached_property
    def spans(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``starts, stops`` int32 ``[R]``, both ascending: a row attends to keys ``starts .. stops - 1``."""
        return self.doc_start[self.rows].int(), (self.rows + 1).int()

    @cached_property
    def blocks(self) -> "QueryBlocks":
        """The rows in blocks of one document each. Masks have block x document entries, and only one mask of
        a long document exists at a time, so that no memory grows with T x T."""
        return QueryBlocks(self)


class QueryBlocks:
    """Blocks of a plan, in order; can be iterated repeatedly.

    Attributes:
        rows: rows of the plan.
        extents: ``start, stop, key_start, key_stop`` of every block.
    """

    def __init__(self, plan: QueryPlan) -> None:
        self.rows, self.extents = plan.rows, list(_extents(plan))
        entries = sum((b - a) * (d - c) for a, b, c, d in self.extents)
        self._kept = list(self._masked()) if entries <= KEPT_MASK_ENTRIES else None

    def __iter__(self) -> Iterator[QueryBlock]:
        return self._masked() if self._kept is None else iter(self._kept)

    def _masked(self) -> Iterator[QueryBlock]:
        for start, stop, key_start, key_stop in self.extents:
            mask = causal_mask(self.rows[start:stop], key_start, key_stop)
            yield QueryBlock(start, stop, key_start, key_stop, mask)


def causal_mask(rows: torch.Tensor, key_start: int, key_stop: int) -> torch.Tensor:
    """fp32 ``[n, key_stop - key_start]``: 0 where the key is not after the row, else -inf."""
    later = torch.arange(key_start, key_stop, device=rows.device)[None] > rows[:, None]
    return torch.zeros(later.shape, device=rows.device).masked_fill_(later, float("-inf"))


def _extents(plan: QueryPlan) -> Iterator[tuple[int, int, int, int]]:
    rows, doc_start = plan.rows, plan.doc_start
    if rows.numel() == 0:
        return
    start = 0
    _, counts = torch.unique_consecutive(doc_start[rows], return_counts=True)
    for count in counts.tolist():
        for first in range(start, start + count, plan.block_rows):
            stop = min(first + plan.block_rows, start + count)
            yield first, stop, int(doc_start[rows[first]]), int(rows[stop - 1]) + 1
        start += count


def plan_rows(rows: torch.Tensor, doc_start: torch.Tensor, block_rows: int = BLOCK_ROWS) -> QueryPlan:
    """Plan of ``rows`` (ascending, int64 ``[R]``) with ``doc_start`` int64 ``[T]``."""
    return QueryPlan(rows, doc_start, block_rows)
