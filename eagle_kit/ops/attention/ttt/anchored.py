"""Attention of blocks of rows behind anchors (DFlash, arXiv 2602.06036): the prefix up to an anchor, and the
block's own keys, which all of its rows share.

The rows of a block attend to the same keys, as the query heads of one key head do. So a block is one row of
:func:`~eagle_kit.ops.attention.ttt.ttt_attention` with B times as many query heads, and needs no kernel of
its own. Under a sliding window, which begins at another key for each row, every row is one by itself.

Legend: A anchors, B rows of a block, T packed tokens, Hq / Hkv heads, D head size.
"""

import torch

from eagle_kit.ops.attention.ttt import ttt_attention
from eagle_kit.ops.attention.ttt.plan import QueryPlan
from eagle_kit.ops.backend import Backend


def anchored_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    plan: QueryPlan,
    scale: float,
    window: int | None = None,
    *,
    is_causal: bool = False,
    backend: Backend | None = None,
) -> torch.Tensor:
    """One softmax over the prefix and the block's own keys, for every row of every block.

    Args:
        q: ``[A, B, Hq, D]``.
        k, v: ``[T, Hkv, D]``, of the text.
        own_k, own_v: ``[A, B, Hkv, D]``, of the blocks.
        plan: of the rows before the anchors; a block attends to its row and to all rows before that.
        window: number of keys that a row attends to, its own included; None for the whole prefix and the
            whole block.
        is_causal: a row attends to the rows of its block up to itself only; needs a ``window``.

    Returns:
        ``[A, B, Hq, D]``; differentiable through autograd.
    """
    assert window is not None or not is_causal
    count, size, heads, _ = q.shape
    own_k = own_k.transpose(1, 2)
    own_v = own_v.transpose(1, 2)

    # Under a window, row j of all blocks at a time.
    if window is not None:
        rows = []
        for j in range(size):
            num_own = j + 1 if is_causal else size
            own_keys = own_k[:, :, :num_own]
            own_values = own_v[:, :, :num_own]
            row_plan = plan.with_window(window, j + 1)
            rows.append(ttt_attention(q[:, j], k, v, own_keys, own_values, row_plan, scale, backend=backend))
        return torch.stack(rows, 1)

    # The rows of a block are query heads of one row.
    grouped = q.unflatten(2, (k.shape[1], -1)).permute(0, 2, 3, 1, 4)  # [A, Hkv, G, B, D]
    folded = grouped.reshape(count, heads * size, -1)
    out = ttt_attention(folded, k, v, own_k, own_v, plan, scale, backend=backend)
    return out.view(grouped.shape).permute(0, 3, 1, 2, 4).reshape(q.shape)
