"""Attention of training-time test in torch operations, on any device.

Legend: R query rows, T packed tokens, J own keys of a row, Hq / Hkv heads, G = Hq / Hkv, D head size.
"""

import torch
from torch.utils.checkpoint import checkpoint

from eagle_kit.ops.attention.ttt.plan import QueryBlocks, span_mask
from eagle_kit.ops.backend import is_differentiated


def ttt_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    blocks: QueryBlocks,
    scale: float,
) -> torch.Tensor:
    """One softmax over the step-0 keys up to the row, in its document, and the row's own keys of later steps.

    Args:
        q: ``[R, Hq, D]``.
        k, v: ``[T, Hkv, D]``, step 0.
        own_k, own_v: ``[R, Hkv, J, D]``, steps 1..J of the same row; J = 0 at step 0.
        blocks: the query rows, from :func:`plan_queries`.

    Returns:
        ``[R, Hq, D]``; differentiable through autograd.
    """
    out = [q[:0]]
    for start, stop, key_start, key_stop in blocks.extents:
        rows = slice(start, stop)
        columns = slice(key_start, key_stop)
        arguments = (
            q[rows],
            k[columns],
            v[columns],
            own_k[rows],
            own_v[rows],
            blocks.firsts[rows],
            blocks.rows[rows],
            key_start,
            scale,
        )
        if is_differentiated(q, k, v, own_k, own_v):
            out.append(checkpoint(_attend, *arguments, use_reentrant=False))
        else:
            out.append(_attend(*arguments))
    return torch.cat(out)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    first_of: torch.Tensor,
    last_of: torch.Tensor,
    key_start: int,
    scale: float,
) -> torch.Tensor:
    """Attention of one block of rows; recomputed in the backward pass, where autograd would keep R x T
    scores."""
    rows = q.unflatten(1, (k.shape[1], -1)).float()
    mask = span_mask(first_of, last_of, key_start, key_start + k.shape[0])
    prefix = torch.einsum("nhgd,thd->nhgt", rows, k.float()) * scale + mask[:, None, None]
    own = torch.einsum("nhgd,nhjd->nhgj", rows, own_k.float()) * scale
    weights = torch.cat((prefix, own), -1).softmax(-1)
    on_prefix, on_own = weights.split((k.shape[0], own.shape[-1]), -1)
    out = torch.einsum("nhgt,thd->nhgd", on_prefix, v.float())
    out = out + torch.einsum("nhgj,nhjd->nhgd", on_own, own_v.float())
    return out.reshape(q.shape).to(q.dtype)
