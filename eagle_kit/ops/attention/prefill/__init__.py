"""Causal attention of prompt chunks to the tokens cached before them, dense or in a paged store.

Prefill of targets and drafts calls it. Pages are read in place. ``libraries`` hands the same pages to
FlashAttention or FlashInfer, where one of them is installed and chosen.

Legend: B requests, T tokens, Hq / Hkv heads, D head size, R rows of the store.
"""

import torch

from eagle_kit.ops.attention.prefill import compiled, reference
from eagle_kit.ops.attention.prefill.libraries.library import PromptAttention
from eagle_kit.ops.attention.prefill.plan import PrefillPlan
from eagle_kit.ops.attention.prefill.reference import prefill_attention
from eagle_kit.ops.attention.variant import AttentionVariant, as_variant
from eagle_kit.ops.backend import Backend, is_differentiated, uses_cpp, uses_triton

__all__ = [
    "PrefillPlan",
    "PromptAttention",
    "chunk_attention",
    "own_attention",
    "paged_prefill_attention",
    "prefill_attention",
]


def paged_prefill_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    plan: PrefillPlan,
    variant: AttentionVariant | float,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Causal attention of every row to its request's positions up to its own.

    Args:
        q: ``[T, Hq, D]``, the rows of all requests concatenated.
        k_rows, v_rows: ``[Hkv, R, D]``, the store of one layer, these rows' keys included, in the dtype of
            ``q`` or fp8 e4m3.
        plan: location of the keys.
        variant: how the layer attends; a number is the scale of plain attention.
        k_scale, v_scale: factors of an fp8 store's values.

    Returns:
        ``[T, Hq, D]`` in the dtype of ``q``.
    """
    variant = as_variant(variant)
    if uses_triton("attention/prefill", q, backend) and not is_differentiated(q, k_rows, v_rows):
        from eagle_kit.ops.attention.prefill import triton

        return triton.paged_prefill_attention(q, k_rows, v_rows, plan, variant, k_scale, v_scale)
    assert not (variant.limits.chunk and plan.first_position), "chunks are of RoPE positions"
    has_scales = (k_scale, v_scale) != (1.0, 1.0)
    if not has_scales and uses_cpp(q, k_rows, v_rows, backend=backend):
        return compiled.paged_prefill_attention(q, k_rows, v_rows, plan, variant)
    return reference.paged_prefill_attention(q, k_rows, v_rows, plan, variant, k_scale, v_scale)


def chunk_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: AttentionVariant | float,
    *,
    start: int,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Causal attention of a chunk in the arithmetic of windows: in fp32 on a CPU a token has the same bits in
    a chunk of any size as when it is decoded.

    Args:
        q: ``[T, Hq, D]``, the queries of positions ``start``..``start + T - 1``.
        k, v: ``[Hkv, C, D]`` and ``[Hkv, C, E]``, keys of positions 0.., and finite values behind them. C is
            at least :func:`~eagle_kit.ops.cpu.summation.round_columns` of ``start + T``.
        variant: how the layer attends; a number is the scale of plain attention.

    Returns:
        ``[T, Hq, E]``.
    """
    if uses_cpp(q, k, v, backend=backend):
        return compiled.chunk_attention(q, k, v, as_variant(variant), start)
    return reference.chunk_attention(q, k, v, as_variant(variant), start)


def own_attention(plan: PrefillPlan) -> PromptAttention:
    """Return :func:`paged_prefill_attention` of planned prompts, as libraries lay theirs out."""

    def attend(
        q: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, variant: AttentionVariant
    ) -> torch.Tensor:
        return paged_prefill_attention(q, k_rows, v_rows, plan, variant)

    return attend
