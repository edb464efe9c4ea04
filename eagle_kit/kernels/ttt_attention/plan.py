"""Which keys each block of training rows can see: made once a packed row, used by every step.

Legend: R query rows, T packed tokens.
"""

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


def plan_rows(rows: torch.Tensor, doc_start: torch.Tensor, block_rows: int = BLOCK_ROWS) -> list[QueryBlock]:
    """Cut ``rows`` (ascending, int64 ``[R]``) into blocks of one document and at most ``block_rows`` rows.

    Masks have block x document entries, so nothing grows with T x T.
    """
    blocks: list[QueryBlock] = []
    if rows.numel() == 0:
        return blocks
    _, counts = torch.unique_consecutive(doc_start[rows], return_counts=True)
    start = 0
    for count in counts.tolist():
        for first in range(start, start + count, block_rows):
            stop = min(first + block_rows, start + count)
            mine = rows[first:stop]
            key_start, key_stop = int(doc_start[mine[0]]), int(mine[-1]) + 1
            later = torch.arange(key_start, key_stop, device=rows.device)[None] > mine[:, None]
            mask = torch.zeros(later.shape, device=rows.device).masked_fill_(later, float("-inf"))
            blocks.append(QueryBlock(first, stop, key_start, key_stop, mask))
        start += count
    return blocks
