"""Where the keys of a window lie and which node sees which: computed once a forward, shared by its layers.

Legend: B requests, N query nodes, M window keys, C columns, P pages a request.
"""

from typing import NamedTuple

import torch


class WindowPlan(NamedTuple):
    """``columns`` int64 ``[B, C]``, rows of the store in the order they are attended to: the request's
    prefix, then its window keys right behind it, so that a token has the same column in a window of any size;
    unused ones point at the store's dummy row. ``mask`` ``[B, N, C]``, 0 or -inf, in the dtype of the
    queries.
    """

    columns: torch.Tensor
    mask: torch.Tensor


def plan_window(
    page_table: torch.Tensor,
    page_size: int,
    prefix_lens: torch.Tensor,
    first_slot: int,
    scratch_rows: torch.Tensor,
    ancestors: torch.Tensor,
    num_columns: int,
    dummy_row: int,
    dtype: torch.dtype,
) -> WindowPlan:
    """Lay out one window per request.

    Args:
        page_table: int64 ``[B, P]``, page of each run of ``page_size`` slots.
        prefix_lens: int64 ``[B]``, slots before the window, ``first_slot`` of which at the front hold
            nothing.
        scratch_rows: int64 ``[B, M]``, rows of the window's keys.
        ancestors: int64 ``[B, N]``, bit j set when window key j is an ancestor of the node or the node
            itself.
        num_columns: C, a bound on prefix + M known to the host.
        dummy_row: a row of the store that holds finite values.
    """
    b, m = scratch_rows.shape
    column = torch.arange(num_columns, device=page_table.device).expand(b, num_columns)
    page = (column // page_size).clamp(max=page_table.shape[1] - 1)
    slots = page_table.gather(1, page) * page_size + column % page_size
    key = column - prefix_lens[:, None]
    in_prefix, in_window = key < 0, (key >= 0) & (key < m)
    key = key.clamp(0, m - 1)
    rows = torch.where(in_prefix, slots, torch.where(in_window, scratch_rows.gather(1, key), dummy_row))
    bits = (ancestors[:, :, None] >> key[:, None]) & 1
    seen = (in_prefix & (column >= first_slot))[:, None] | (in_window[:, None] & (bits == 1))
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
    return WindowPlan(rows, mask)


def ancestor_bits(parents: torch.Tensor, depth: int) -> torch.Tensor:
    """``parents`` int64 ``[B, N]`` (root: 0, parents before children), at most ``depth`` deep -> bits ``[B,
    N]``."""
    bits = torch.ones_like(parents) << torch.arange(parents.shape[1], device=parents.device)
    for _ in range(depth):
        bits = bits | bits.gather(1, parents)
    return bits


def chain_bits(length: int, device: torch.device) -> torch.Tensor:
    """Ancestors of a chain: int64 ``[length]``, node j sees nodes 0..j."""
    ones = torch.ones(length, dtype=torch.int64, device=device) << torch.arange(length, device=device)
    return ones.cumsum(0)
