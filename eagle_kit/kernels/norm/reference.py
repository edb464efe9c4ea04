"""RMSNorm in torch: what the kernel is held to. Legend: T rows, H size."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in fp32 for half types."""
    if x.dtype == torch.float32:
        return torch.rms_norm(x, weight.shape, weight, eps)
    return torch.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``s = x + residual`` -> ``(rms_norm(s), s)``."""
    total = x + residual
    return rms_norm(total, weight, eps), total
