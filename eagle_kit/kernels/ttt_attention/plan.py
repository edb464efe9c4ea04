"""Which keys each training row can see: made once a packed row, used by every step.

Legend: R query rows, T packed tokens.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

BLOCK_ROWS = 256


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
    """Prefix keys of query rows; each form of the operation makes what it needs when it first runs.

    Attributes:
        rows: positions of the query rows, ascending, int64 ``[R]``.
        doc_start: where each token's document begins, int64 ``[T]``.
        block_rows: rows of a block at most.
    """

    rows: torch.Tensor
    doc_start: torch.Tensor
    block_rows: int

    @cached_property
    def spans(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``starts, stops`` int32 ``[R]``, both ascending: a row sees keys ``starts .. stops - 1``."""
        return self.doc_start[self.rows].int(), (self.rows + 1).int()

    @cached_property
    def blocks(self) -> list[QueryBlock]:
        """The rows in blocks of one document. Masks have block x document entries, so nothing grows with T x
        T."""
        blocks: list[QueryBlock] = []
        rows, doc_start = self.rows, self.doc_start
        if rows.numel() == 0:
            return blocks
        _, counts = torch.unique_consecutive(doc_start[rows], return_counts=True)
        start = 0
        for count in counts.tolist():
            for first in range(start, start + count, self.block_rows):
                stop = min(first + self.block_rows, start + count)
                mine = rows[first:stop]
                key_start, key_stop = int(doc_start[mine[0]]), int(mine[-1]) + 1
                later = torch.arange(key_start, key_stop, device=rows.device)[None] > mine[:, None]
                mask = torch.zeros(later.shape, device=rows.device).masked_fill_(later, float("-inf"))
                blocks.append(QueryBlock(first, stop, key_start, key_stop, mask))
            start += count
        return blocks


def plan_rows(rows: torch.Tensor, doc_start: torch.Tensor, block_rows: int = BLOCK_ROWS) -> QueryPlan:
    """The plan of ``rows`` (ascending, int64 ``[R]``) with ``doc_start`` int64 ``[T]``."""
    return QueryPlan(rows, doc_start, block_rows)
