"""RMSNorm, alone or after the addition of a residual; differentiable.

Every layer calls it, in serving and in training.

Legend: T rows, H size.
"""

import torch

from eagle_kit.ops.backend import Backend, is_differentiated, uses_cpp, uses_triton
from eagle_kit.ops.norm import reference


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: Backend | None = None
) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension of ``x [..., H]``, in fp32 inside."""
    if uses_triton("norm", x, backend):
        if is_differentiated(x, weight):
            from eagle_kit.ops.norm import triton_backward

            return triton_backward.differentiable_rms_norm(x.contiguous(), weight, eps)
        from eagle_kit.ops.norm import triton

        return triton.rms_norm(x.contiguous(), weight, eps)
    if x.numel() and uses_cpp(x, weight, backend=backend):
        normed: torch.Tensor = torch.ops.eagle_kit_cpp.rms_norm(x.contiguous(), weight.contiguous(), eps)
        return normed
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    backend: Backend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm of ``x + residual`` (both ``[..., H]``, of one dtype), and the sum."""
    if uses_triton("norm", x, backend):
        if is_differentiated(x, residual, weight):
            from eagle_kit.ops.norm import triton_backward

            if x.dtype != residual.dtype:  # under autocast
                total = x + residual
                return triton_backward.differentiable_rms_norm(total, weight, eps), total
            return triton_backward.differentiable_add_rms_norm(
                x.contiguous(), residual.contiguous(), weight, eps
            )
        from eagle_kit.ops.norm import triton

        return triton.add_rms_norm(x.contiguous(), residual.contiguous(), weight, eps)
    if x.numel() and uses_cpp(x, residual, weight, backend=backend):
        normed, total = torch.ops.eagle_kit_cpp.add_rms_norm(
            x.contiguous(), residual.contiguous(), weight.contiguous(), eps
        )
        return normed, total
    return reference.add_rms_norm(x, residual, weight, eps)
