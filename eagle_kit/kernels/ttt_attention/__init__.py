"""Attention of training-time test (EAGLE-3, arXiv 2503.01840, section 3): prefix of step 0 plus the row's own
keys."""

import torch

from eagle_kit.kernels.ttt_attention import cpu, reference
from eagle_kit.kernels.ttt_attention.plan import QueryBlock, plan_rows

__all__ = ["QueryBlock", "plan_rows", "ttt_attention"]


def ttt_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    blocks: list[QueryBlock],
    scale: float,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """See :func:`eagle_kit.kernels.ttt_attention.reference.ttt_attention`.

    Args:
        backend: ``"auto"`` takes flash attention for fp32 on a CPU and the reference otherwise;
            ``"reference"`` or ``"cpu"`` force one.
    """
    fits = q.device.type == "cpu" and q.dtype == torch.float32 and q.shape[0] > 0
    run = cpu if backend == "cpu" or (backend == "auto" and fits) else reference
    return run.ttt_attention(q, k, v, own_k, own_v, blocks, scale)
