"""State of a batch between two decode cycles; a drafter's own state, such as ``DraftState``, is in it."""

from typing import NamedTuple

import torch

from eagle_kit.kv.dp_latents import ShardRequests


class CycleState(NamedTuple):
    """Per-request state at the start of a cycle.

    Attributes:
        page_table: int64 ``[B, P]``.
        seq_lens: int64 ``[B]``, tokens in the pool.
        roots: int64 ``[B]``, the last emitted token, at position ``seq_lens``; the target's pool has no entry
            of it yet.
        active: bool ``[B]``, False for padding, whose state does not change.
        draft: the drafter's own state, a named tuple of tensors with B rows; None without a draft model.
        slot_ids: int64 ``[B]``, slots of the requests, also indices of their recurrent states; None outside
            an engine.
        shard: requests that this rank computes attention for, in data-parallel attention; else None.
    """

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    roots: torch.Tensor
    active: torch.Tensor
    draft: tuple[torch.Tensor, ...] | None
    slot_ids: torch.Tensor | None = None
    shard: ShardRequests | None = None
