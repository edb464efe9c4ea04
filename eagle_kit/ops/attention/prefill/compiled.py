"""Attention of prompts in C++ (:mod:`eagle_kit.ops.cpu.cpp`), in the arithmetic of windows: a token has the
same bits in a chunk of any size as when it is decoded."""

import torch

from eagle_kit.ops.attention.prefill.plan import PrefillPlan
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.attention.window.compiled import score_arguments


def paged_prefill_attention(
    q: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, plan: PrefillPlan, variant: AttentionVariant
) -> torch.Tensor:
    """See :func:`eagle_kit.ops.attention.prefill.paged_prefill_attention`; all fp32 on a CPU."""
    where = plan.page_tables, plan.cu_rows, plan.starts
    return _attend(q, k_rows, v_rows, where, [plan.page_size, plan.first_slot], variant)


def chunk_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: AttentionVariant, start: int
) -> torch.Tensor:
    """See :func:`eagle_kit.ops.attention.prefill.chunk_attention`; the keys are one page."""
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
    places = (place.contiguous() for place in where)
    limits = [*sizes, *variant.limits]
    out: torch.Tensor = torch.ops.eagle_kit_cpp.prompt_attention(
        q.contiguous(), k_rows, v_rows, *places, limits, *score_arguments(variant)
    )
    return out
