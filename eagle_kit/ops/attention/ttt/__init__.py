"""Attention of training-time test (EAGLE-3, arXiv 2503.01840, section 3): the prefix of step 0 and the row's
own keys of later steps.

The trainer calls it. Forward and backward have Triton kernels.
"""

from typing import Literal

import torch

from eagle_kit.ops.attention.ttt import cpu, reference
from eagle_kit.ops.attention.ttt.plan import QueryPlan, plan_queries
from eagle_kit.ops.backend import Backend, uses_triton

__all__ = ["QueryPlan", "plan_queries", "ttt_attention"]


def ttt_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    plan: QueryPlan,
    scale: float,
    *,
    backend: Backend | Literal["cpu"] | None = None,
) -> torch.Tensor:
    """See :func:`eagle_kit.ops.attention.ttt.reference.ttt_attention`.

    Args:
        plan: :func:`plan_queries` of the query rows.
        backend: as for other operations, or ``"cpu"``: flash attention in fp32 for inputs of any dtype, the
            default on a CPU.
    """
    if backend != "cpu" and uses_triton("attention/ttt", q, backend):
        from eagle_kit.ops.attention.ttt import triton

        return triton.ttt_attention(q, k, v, own_k, own_v, *plan.spans, scale)
    if backend == "cpu" or (backend is None and q.device.type == "cpu" and q.shape[0] > 0):
        tensors = (x.float() for x in (q, k, v, own_k, own_v))
        with torch.autocast("cpu", enabled=False):
            return cpu.TTTAttention.apply(*tensors, plan.blocks, scale).to(q.dtype)
    return reference.ttt_attention(q, k, v, own_k, own_v, plan.blocks, scale)
