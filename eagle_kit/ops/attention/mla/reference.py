"""Absorbed multi-head latent attention in torch, the reference of the kernel.

Legend: B requests, N query nodes, H heads, L latent size, D latent + RoPE size, R rows of the store, C
columns.
"""

import torch

from eagle_kit.ops.attention.window.plan import Columns, attend_in_groups
from eagle_kit.ops.cpu.summation import pad_rows, weighted_sum


def mla_window_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    columns: list[Columns],
    scale: float,
    kv_scale: float = 1.0,
    latent_dim: int = 512,
) -> torch.Tensor:
    """``softmax(q k^T * scale + mask) k[:, :L]``: ``q [B, N, H, D]``, ``rows [R, D]`` -> ``[B, N, H, L]``, in
    fp32 inside."""

    def attend(q: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return attend_to(q, rows, keys, mask, scale, kv_scale, latent_dim)

    return attend_in_groups(columns, q, latent_dim, attend)


def attend_to(
    q: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    kv_scale: float,
    latent_dim: int,
) -> torch.Tensor:
    """Attention to the rows ``columns [B, C]`` under ``mask [B, N, C]``. The N x H query rows of a request
    are one matmul, so that every key is read once per window."""
    b, n, h, d = q.shape
    keys = rows.index_select(0, columns.reshape(-1)).float().view(b, -1, d)  # [B, C, D]
    if kv_scale != 1.0:
        keys = keys * kv_scale
    queries = pad_rows((q.float() * scale).reshape(b, n * h, d))
    scores = torch.bmm(queries, keys.transpose(1, 2))
    weights = (scores[:, : n * h].view(b, n, h, -1) + mask[:, :, None]).softmax(-1)
    out = weighted_sum(pad_rows(weights.view(b, n * h, -1)), keys[:, :, :latent_dim])[:, : n * h]
    return out.view(b, n, h, latent_dim).to(q.dtype)
