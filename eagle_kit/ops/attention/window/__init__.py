"""Attention of a window of nodes to a paged prefix and the window's own keys, masked by ancestor bits.

Decoding (N = 1), draft steps, verification and draft-extend all call it. The Triton kernel ships for heads
of 64 to 256 values and up to 16 query heads on a key head, with stores in fp32, half types and fp8. The
``AttentionVariant`` of a layer has its sliding window, chunks, soft cap and sinks.

Legend: B requests, N query nodes, Hq / Hkv heads, D head size, R rows of the store.
"""

import torch

from eagle_kit.ops.attention.variant import AttentionVariant, as_variant
from eagle_kit.ops.attention.window import compiled, reference
from eagle_kit.ops.attention.window import recorded as recorded  # registers operations
from eagle_kit.ops.attention.window.plan import WindowPlan, ancestor_bits, chain_bits, reference_columns
from eagle_kit.ops.backend import Backend, is_differentiated, uses_cpp, uses_triton

__all__ = ["WindowPlan", "ancestor_bits", "chain_bits", "window_attention"]


def window_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    plan: WindowPlan,
    variant: AttentionVariant | float,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Attention of every node to its request's prefix and to its ancestors in the window.

    Args:
        q: ``[B, N, Hq, D]``.
        k_rows, v_rows: ``[Hkv, R, D]``, the store of one layer, this window's keys included, in the dtype of
            ``q`` or fp8 e4m3.
        plan: location and visibility of the keys.
        variant: how the layer attends; a number is the scale of plain attention.
        k_scale, v_scale: factors of an fp8 store's values.

    Returns:
        ``[B, N, Hq, D]`` in the dtype of ``q``.
    """
    variant = as_variant(variant)
    if uses_triton("attention/window", q, backend) and not is_differentiated(q, k_rows, v_rows):
        from eagle_kit.ops.attention.window import triton

        return triton.window_attention(q, k_rows, v_rows, plan, variant, k_scale, v_scale)
    has_scales = (k_scale, v_scale) != (1.0, 1.0)
    if type(plan) is WindowPlan and not has_scales and uses_cpp(q, k_rows, v_rows, backend=backend):
        return compiled.window_attention(q, k_rows, v_rows, plan, variant)
    if plan.is_recorded_whole(backend):
        out: torch.Tensor = torch.ops.eagle_kit_cpu.window_attention(
            q,
            k_rows,
            v_rows,
            plan.record_columns(),
            variant.scale * k_scale,
            v_scale,
            [*variant.limits],
            variant.soft_cap,
            variant.sinks,
        )
        return out
    columns = reference_columns(plan, q, backend, variant.limits)
    return reference.window_attention(q, k_rows, v_rows, columns, variant, k_scale, v_scale)
