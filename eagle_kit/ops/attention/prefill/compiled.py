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
    scale, soft_cap, sinks = score_arguments(variant)
    out: torch.Tensor = torch.ops.eagle_kit_cpp.prompt_attention(
        q.contiguous(),
        k_rows,
        v_rows,
        plan.page_tables.contiguous(),
        plan.cu_rows.contiguous(),
        plan.starts.contiguous(),
        [plan.page_size, plan.first_position, *variant.limits],
        scale,
        soft_cap,
        sinks,
    )
    return out


def chunk_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: AttentionVariant, start: int
) -> torch.Tensor:
    """See :func:`eagle_kit.ops.attention.prefill.chunk_attention`; the keys are one page of one request."""
    plan = PrefillPlan(
        page_tables=torch.tensor([[0]], device=q.device),
        page_size=k.shape[1],
        cu_rows=torch.tensor([0, len(q)], device=q.device),
        starts=torch.tensor([start], device=q.device),
        first_position=0,
        max_rows=len(q),
    )
    return paged_prefill_attention(q, k, v, plan, variant)
