"""Window attention in C++ (:mod:`eagle_kit.ops.cpu.cpp`): keys are read where they lie, and a node's result
depends on its own keys alone, whatever window, batch or tree it is in."""

import torch

from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.attention.window.plan import WindowPlan


def score_arguments(variant: AttentionVariant) -> tuple[float, float, torch.Tensor | None]:
    """Scale, soft cap (0 for none) and sinks of a variant, as the operations take them."""
    sinks = None if variant.sinks is None else variant.sinks.float().contiguous()
    return variant.scale, variant.soft_cap or 0.0, sinks


def window_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    plan: WindowPlan,
    variant: AttentionVariant,
) -> torch.Tensor:
    """See :func:`eagle_kit.ops.attention.window.window_attention`; all fp32 on a CPU."""
    sizes = [
        plan.page_size,
        plan.first_position,
        plan.scratch_start,
        plan.scratch_stride,
        plan.num_keys,
        *variant.limits,
    ]
    scale, soft_cap, sinks = score_arguments(variant)
    out: torch.Tensor = torch.ops.eagle_kit_cpp.window_attention(
        q.reshape(-1, *q.shape[-2:]).contiguous(),
        k_rows,
        v_rows,
        plan.page_table.contiguous(),
        plan.prefix_lens.contiguous(),
        plan.words.contiguous(),
        sizes,
        scale,
        soft_cap,
        sinks,
    )
    return out.view(*q.shape[:-1], -1)
