"""Causal attention of a prompt chunk in torch.

Legend: T chunk tokens, C cached tokens before them, Hq / Hkv heads, D head size, B requests, R rows of the
store.
"""

import torch
from torch.nn import functional as F

from eagle_kit.kernels.prefill_attention.plan import PrefillPlan
from eagle_kit.kernels.summation import round_columns
from eagle_kit.kernels.window_attention.reference import attend_dense, take_rows

BLOCK = 32
"""Queries of a chunk that are computed together: few enough that their scores stay in the cache of a core."""


def prefill_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention: query t attends to keys 0..C + t.

    Args:
        q: ``[T, Hq, D]``.
        k, v: ``[C + T, Hkv, D]``, cached tokens first.

    Returns:
        ``[T, Hq, D]``.
    """
    (t, hq, _), hkv, c = q.shape, k.shape[1], k.shape[0] - q.shape[0]
    # KV heads are the batch, so that their keys are not copied for every query head of a group.
    queries = q.unflatten(1, (hkv, hq // hkv)).permute(1, 2, 0, 3)
    keys, values = (x.transpose(0, 1)[:, None].expand(-1, hq // hkv, -1, -1) for x in (k, v))
    mask = None
    if c:
        rows = torch.arange(c, c + t, device=q.device)
        mask = torch.arange(c + t, device=q.device)[None] <= rows[:, None]
    out = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def chunk_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, start: int
) -> torch.Tensor:
    """Causal attention of a chunk in the arithmetic of windows: in fp32 on a CPU a token has the same bits in
    a chunk of any size as when it is decoded.

    Args:
        q: ``[T, Hq, D]``, the queries of positions ``start``..``start + T - 1``.
        k, v: ``[Hkv, C, D]`` and ``[Hkv, C, E]``, keys of positions 0.., and finite values behind them. C is
            at least :func:`round_columns` of ``start + T``.

    Returns:
        ``[T, Hq, E]``.
    """
    blocks = []
    for first, block in enumerate(q.split(BLOCK)):
        seen = start + first * BLOCK
        columns = round_columns(seen + len(block))
        mask = torch.full((len(block), columns), float("-inf"), device=q.device).triu_(seen + 1)
        blocks.append(attend_dense(block[None], k[:, :columns], v[:, :columns], mask[None], scale)[0])
    return torch.cat(blocks)


def paged_prefill_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    plan: PrefillPlan,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Request by request, whose sizes are read on the host.

    Args:
        q: ``[T, Hq, D]``.
        k_rows, v_rows: ``[Hkv, R, D]``, the whole store of one layer; these rows' keys are already in it.
        plan: location of the keys.
        k_scale, v_scale: factors of keys and values, other than 1 for an fp8 store.

    Returns:
        ``[T, Hq, D]``.
    """
    borders, starts, size = plan.cu_rows.tolist(), plan.starts.tolist(), plan.page_size
    out = torch.empty_like(q)
    for table, start, a, b in zip(plan.page_tables, starts, borders, borders[1:], strict=False):
        stop = start + b - a
        if a == b:
            continue
        first = min(plan.first_slot, start)
        slots = torch.arange(first, stop, device=q.device)
        rows = table[slots // size] * size + slots % size
        k, v = (take_rows(x, rows, q.dtype).transpose(0, 1) for x in (k_rows, v_rows))
        if start < plan.first_slot:  # rows of unused slots attend to themselves only
            alone = min(plan.first_slot, stop) - start
            out[a : a + alone] = v[:alone].repeat_interleave(q.shape[1] // v.shape[1], 1)
            a, k, v = a + alone, k[alone:], v[alone:]
        if a < b:
            out[a:b] = prefill_attention(q[a:b], k, v, scale * k_scale)
    return out if v_scale == 1.0 else out * v_scale
