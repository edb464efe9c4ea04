"""Absorbed multi-head latent attention of a window of nodes (DeepSeek-V2, arXiv 2405.04434, section 2.1).

With W_UK folded into the query and W_UV into the output projection, all heads attend to one key per token:
the latent, followed by the part that carries RoPE. The value is the latent itself.
Cycles of targets and heads with latent attention call it. :mod:`.paged_wrapper` offers the plan and run
contract of FlashInfer over it.

Legend: B requests, N query nodes, H heads, L latent size, D latent + RoPE size, R rows of the store.
"""

import torch

from eagle_kit.ops.attention.mla import reference
from eagle_kit.ops.attention.variant import as_variant
from eagle_kit.ops.attention.window import compiled
from eagle_kit.ops.attention.window.plan import WindowPlan, reference_columns
from eagle_kit.ops.attention.window.recorded import columns_of
from eagle_kit.ops.backend import Backend, uses_cpp, uses_triton
from eagle_kit.ops.cpu.guards import library


def mla_window_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    plan: WindowPlan,
    scale: float,
    *,
    kv_scale: float = 1.0,
    latent_dim: int = 512,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Attention of every node to its request's prefix and to its ancestors in the window.

    Args:
        q: ``[B, N, H, D]``, the latent part first.
        rows: ``[R, D]``, the store of one layer, this window's keys included, in the dtype of ``q`` or fp8,
            whose values are multiplied by ``kv_scale``.
        plan: location and visibility of the keys.
        scale: factor of the scores, ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5`` of the full heads.
        latent_dim: L. For Triton, L and D - L are powers of two, L at least 64 and D - L at least 16.

    Returns:
        ``[B, N, H, L]`` in the dtype of ``q``.
    """
    if uses_triton("attention/mla", q, backend):
        from eagle_kit.ops.attention.mla import triton

        return triton.attend(q, rows, plan, scale, kv_scale, latent_dim)
    if type(plan) is WindowPlan and kv_scale == 1.0 and uses_cpp(q, rows, backend=backend):
        values = rows[None, :, :latent_dim]
        return compiled.window_attention(q, rows[None], values, plan, as_variant(scale))
    if plan.is_recorded_whole(backend):
        out: torch.Tensor = torch.ops.eagle_kit_cpu.mla_window_attention(
            q, rows, plan.record_columns(), scale, kv_scale, latent_dim
        )
        return out
    columns = reference_columns(plan, q, backend)
    return reference.mla_window_attention(q, rows, columns, scale, kv_scale, latent_dim)


def _recorded(
    q: torch.Tensor,
    rows: torch.Tensor,
    columns_key: torch.Tensor,
    scale: float,
    kv_scale: float,
    latent_dim: int,
) -> torch.Tensor:
    """:func:`mla_window_attention` as one recorded operation, with the columns of
    :meth:`WindowPlan.record_columns`."""
    return reference.mla_window_attention(q, rows, columns_of(columns_key), scale, kv_scale, latent_dim)


library.define(
    "mla_window_attention(Tensor q, Tensor rows, Tensor columns_key, float scale, float kv_scale, "
    "int latent_dim) -> Tensor"
)
library.impl("mla_window_attention", _recorded, "CPU")
