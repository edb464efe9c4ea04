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
        backend: ``"auto"`` takes flash attention on a CPU, in fp32 whatever the dtype of the inputs, and the
            reference otherwise; ``"reference"`` or ``"cpu"`` force one.
    """
    if backend == "cpu" or (backend == "auto" and q.device.type == "cpu" and q.shape[0] > 0):
        with torch.autocast("cpu", enabled=False):
            out = cpu.ttt_attention(
                q.float(), k.float(), v.float(), own_k.float(), own_v.float(), blocks, scale
            )
        return out.to(q.dtype)
    return reference.ttt_attention(q, k, v, own_k, own_v, blocks, scale)
