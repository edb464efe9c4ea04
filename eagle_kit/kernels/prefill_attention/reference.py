"""Causal attention of a prompt chunk in torch.

Legend: T chunk tokens, C cached tokens before them, Hq / Hkv heads, D head size.
"""

import torch
from torch.nn import functional as F


def prefill_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Query t sees keys 0..C + t.

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
