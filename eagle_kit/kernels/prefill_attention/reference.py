"""Causal attention of a prompt chunk in torch.

Legend: T chunk tokens, C cached tokens before them, Hq / Hkv heads, D head size, B requests, R rows of the
store.
"""

import torch
from torch.nn import functional as F

from eagle_kit.kernels.prefill_attention.plan import PrefillPlan
from eagle_kit.kernels.window_attention.reference import take_rows


def prefill_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention: query t attends to keys 0..C + t.

    Args:
        q: ``[T, Hq, D]``.
        k, v: ``[C + T, Hkv, D]``, cached tokens first.

    Returns:
        ``[T, Hq, D]``.
    """
    t, c = q.shape[0], k.shape[0] - q.shape[0]
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, 1).transpose(0, 1)[None]
    v = v.repeat_interleave(group, 1).transpose(0, 1)[None]
    mask = None
    if c:
        rows = torch.arange(c, c + t, device=q.device)
        mask = torch.arange(c + t, device=q.device)[None] <= rows[:, None]
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out[0].transpose(0, 1)


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
