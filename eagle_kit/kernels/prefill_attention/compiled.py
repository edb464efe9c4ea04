"""Attention of prompts in C++ (:mod:`eagle_kit.kernels.cpp`), in the arithmetic of windows: a token has the
same bits in a chunk of any size as when it is decoded."""

import torch

from eagle_kit.kernels.backend import Backend, is_differentiated, uses_cpp
from eagle_kit.kernels.prefill_attention.plan import PrefillPlan
from eagle_kit.kernels.variant import AttentionVariant


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: Backend | None) -> bool:
    """Return whether the operations take these: fp32 without gradients."""
    is_mine = k.dtype == v.dtype == torch.float32
    return is_mine and uses_cpp(q, backend) and not is_differentiated(q, k, v)


def paged_prefill_attention(
    q: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, plan: PrefillPlan, variant: AttentionVariant
) -> torch.Tensor:
    """See :func:`eagle_kit.kernels.prefill_attention.paged_prefill_attention`; all fp32 on a CPU."""
    where = plan.page_tables, plan.cu_rows, plan.starts
    return _attend(q, k_rows, v_rows, where, [plan.page_size, plan.first_slot], variant)


def chunk_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: AttentionVariant, start: int
) -> torch.Tensor:
    """See :func:`eagle_kit.kernels.prefill_attention.chunk_attention`; the keys are one page."""
    numbers = ([[0]], [0, len(q)], [start])
    page_table, cu_rows, starts = (torch.tensor(given, device=q.device) for given in numbers)
    where = page_table, cu_rows, starts
    return _attend(q, k, v, where, [k.shape[1], 0], variant)


def _attend(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    where: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sizes: list[int],
    variant: AttentionVariant,
) -> torch.Tensor:
    cap, limits = variant.soft_cap or 0.0, [*sizes, *variant.limits]
    sinks = None if variant.sinks is None else variant.sinks.float().contiguous()
    places = (place.contiguous() for place in where)
    out: torch.Tensor = torch.ops.eagle_kit_cpp.prompt_attention(
        q.contiguous(), k_rows, v_rows, *places, limits, variant.scale, cap, sinks
    )
    return out
