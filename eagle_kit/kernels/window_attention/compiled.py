"""Window attention in C++ (:mod:`eagle_kit.kernels.cpp`): keys are read where they lie, and a node's result
depends on its own keys alone, whatever window, batch or tree it is in."""

import torch

from eagle_kit.kernels.backend import Backend, is_differentiated, uses_cpp
from eagle_kit.kernels.variant import AttentionVariant
from eagle_kit.kernels.window_attention.plan import WindowPlan


def fits(
    q: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, plan: WindowPlan, backend: Backend | None
) -> bool:
    """Return whether :func:`window_attention` takes these: fp32, and a window whose keys lie in a scratch."""
    is_mine = type(plan) is WindowPlan and k_rows.dtype == v_rows.dtype == torch.float32
    return is_mine and uses_cpp(q, backend) and not is_differentiated(q, k_rows, v_rows)


def window_attention(
    q: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, plan: WindowPlan, variant: AttentionVariant
) -> torch.Tensor:
    """See :func:`eagle_kit.kernels.window_attention.window_attention`; all fp32 on a CPU."""
    places = plan.page_size, plan.first_slot, plan.scratch_start, plan.scratch_stride, plan.num_keys
    out: torch.Tensor = torch.ops.eagle_kit_cpp.window_attention(
        q.contiguous(),
        k_rows,
        v_rows,
        plan.page_table.contiguous(),
        plan.prefix_lens.contiguous(),
        plan.ancestors.contiguous(),
        [*places, *variant.limits],
        variant.scale,
        variant.soft_cap or 0.0,
        None if variant.sinks is None else variant.sinks.float().contiguous(),
    )
    return out
