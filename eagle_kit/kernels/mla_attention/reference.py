"""Absorbed multi-head latent attention in torch: what the kernel is held to.

Legend: B requests, N query nodes, H heads, L latent size, D latent + RoPE size, R rows of the store, C
columns.
"""

import torch

from eagle_kit.kernels.window_attention.plan import WindowPlan


def mla_window_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    plan: WindowPlan,
    scale: float,
    kv_scale: float = 1.0,
    latent_dim: int = 512,
) -> torch.Tensor:
    """``softmax(q k^T * scale + mask) k[:, :L]``: ``q [B, N, H, D]``, ``rows [R, D]`` -> ``[B, N, H, L]``, in
    fp32 inside. The N x H query rows of a request are one matmul, so a key is read once a window."""
    b, n, h, d = q.shape
    columns, mask = plan.layout
    keys = rows.index_select(0, columns.view(-1)).float().view(b, -1, d)  # [B, C, D]
    if kv_scale != 1.0:
        keys = keys * kv_scale
    queries = (q.float() * scale).reshape(b, n * h, d)
    scores = torch.bmm(queries, keys.transpose(1, 2)).view(b, n, h, -1) + mask[:, :, None]
    out = torch.bmm(scores.softmax(-1).view(b, n * h, -1), keys[:, :, :latent_dim])
    return out.view(b, n, h, latent_dim).to(q.dtype)
