"""State of a batch between two decode cycles, and where target and draft keep the entries of its tokens.

The pool keeps the entries (keys and values) of committed tokens, the scratch those of a window's nodes for
one cycle. A token's position is its index in its request. This request has the tokens A B C D in the target's
pool, the root R (the last emitted token), and the drafts x y z of an EAGLE head in 3 steps:

    position            0     1     2     3     4     5     6     7
    token               A     B     C     D     R     x     y     z
    target, pool        A     B     C     D                             seq_lens = 4
    target, scratch                             R     x     y     z     the window, until it is verified
    EAGLE, pool               B     C     D     R                       ends before seq_lens + 1
    EAGLE, scratch                                    x     y           z is proposed, and needs no entry
      made of feature         g(A)  g(B)  g(C)  g(D)  a(R)  a(x)        the one of the position before
      RoPE position           0     1     2     3     4     5           position - first_position

An EAGLE entry is made of its token's embedding and of the feature of the position before: g of the target's
states, or a of the head's own step. So position 0 has none (``first_position`` is 1), and the draft has an
entry of the root before the target has. A whole model as draft has an entry of A too (``first_position`` 0).
"""

from typing import NamedTuple

import torch

from eagle_kit.kv.dp_latents import ShardRequests


class CycleState(NamedTuple):
    """Per-request state at the start of a cycle.

    Attributes:
        page_table: int64 ``[B, P]``.
        seq_lens: int64 ``[B]``, tokens in the target's pool.
        roots: int64 ``[B]``, the last emitted token, at position ``seq_lens``. The target's pool has no entry
            of it yet; that of an EAGLE draft has one,
            unless the request has pending draft tokens.
        active: bool ``[B]``, False for padding, whose state does not change.
        draft: the drafter's own state, a named tuple of tensors with B rows, such as ``DraftState``; None
            without a draft model.
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
