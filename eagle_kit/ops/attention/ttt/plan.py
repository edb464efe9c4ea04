"""Visible keys of each training row: computed once per packed sequence, used by every step.

Legend: R query rows, T packed tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

BLOCK_ROWS = 256
KEPT_MASK_ENTRIES = 1 << 22
"""Largest total number of mask entries that a plan keeps (16 MB); masks of longer documents are made when
their block is computed, because together they would have R x T / 2 entries."""


class QueryBlock(NamedTuple):
    """Query rows ``start..stop-1`` (of R) against keys ``key_start..key_stop-1`` (of T) of one document.

    ``mask`` fp32 ``[stop - start, key_stop - key_start]``: 0 where the row attends to the key, else -inf.
    """

    start: int
    stop: int
    key_start: int
    key_stop: int
    mask: torch.Tensor


@dataclass(frozen=True)
class QueryPlan:
    """Visible prefix keys of query rows; each implementation derives what it reads on first use.

    Attributes:
        rows: positions of the query rows, ascending, int64 ``[R]``.
        doc_start: first token of each token's document, int64 ``[T]``.
        block_rows: maximum rows of a block.
        reach: keys before its position that a row attends to, its own included; None for all of its document.
            In step k of training-time test a sliding window of w reaches w - k.
    """

    rows: torch.Tensor
    doc_start: torch.Tensor
    block_rows: int
    reach: int | None = None

    def with_window(self, window: int | None, step: int) -> "QueryPlan":
        """Plan of the same rows in ``step``, for a head whose layer has a sliding ``window``."""
        if window is None:
            return self
        assert window > step, "the own keys of all steps lie within the window"
        return replace(self, reach=window - step)

    @cached_property
    def firsts(self) -> torch.Tensor:
        """First key that each row attends to, int64 ``[R]``, ascending."""
        begins = self.doc_start[self.rows]
        return begins if self.reach is None else torch.maximum(begins, self.rows + 1 - self.reach)

    @cached_property
    def spans(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``starts, stops`` int32 ``[R]``, both ascending: a row attends to keys ``starts .. stops - 1``."""
        return self.firsts.int(), (self.rows + 1).int()

    @cached_property
    def blocks(self) -> "QueryBlocks":
        """The rows in blocks of one document each. Masks have block x document entries, and only one mask of
        a long document exists at a time, so that no memory grows with T x T."""
        return QueryBlocks(self)


class QueryBlocks:
    """Blocks of a plan, in order; can be iterated repeatedly.

    Attributes:
        rows, firsts: rows of the plan, and the first keys that they attend to.
        extents: ``start, stop, key_start, key_stop`` of every block.
    """

    def __init__(self, plan: QueryPlan) -> None:
        self.rows = plan.rows
        self.firsts = plan.firsts
        self.extents = list(_extents(plan))
        num_entries = 0
        for start, stop, key_start, key_stop in self.extents:
            num_entries += (stop - start) * (key_stop - key_start)
        self._stored = list(self._make()) if num_entries <= KEPT_MASK_ENTRIES else None

    def __iter__(self) -> Iterator[QueryBlock]:
        return self._make() if self._stored is None else iter(self._stored)

    def _make(self) -> Iterator[QueryBlock]:
        for start, stop, key_start, key_stop in self.extents:
            mask = span_mask(self.firsts[start:stop], self.rows[start:stop], key_start, key_stop)
            yield QueryBlock(start, stop, key_start, key_stop, mask)


def span_mask(firsts: torch.Tensor, lasts: torch.Tensor, key_start: int, key_stop: int) -> torch.Tensor:
    """fp32 ``[n, key_stop - key_start]``: 0 for the keys ``firsts .. lasts`` of a row, else -inf."""
    keys = torch.arange(key_start, key_stop, device=lasts.device)
    hidden = (keys > lasts[:, None]) | (keys < firsts[:, None])
    return torch.zeros(hidden.shape, device=lasts.device).masked_fill_(hidden, float("-inf"))


def _extents(plan: QueryPlan) -> Iterator[tuple[int, int, int, int]]:
    """``start, stop, key_start, key_stop`` of blocks: at most ``block_rows`` rows of one document each."""
    rows = plan.rows
    doc_start = plan.doc_start
    if rows.numel() == 0:
        return
    start = 0
    _, counts = torch.unique_consecutive(doc_start[rows], return_counts=True)
    for count in counts.tolist():
        for first in range(start, start + count, plan.block_rows):
            stop = min(first + plan.block_rows, start + count)
            yield first, stop, int(plan.firsts[first]), int(rows[stop - 1]) + 1
        start += count


def plan_queries(rows: torch.Tensor, doc_start: torch.Tensor, block_rows: int = BLOCK_ROWS) -> QueryPlan:
    """Plan of ``rows`` (ascending, int64 ``[R]``) with ``doc_start`` int64 ``[T]``."""
    return QueryPlan(rows, doc_start, block_rows)
