"""RMSNorm in torch, the reference of the kernel.

Legend: T rows, H size.
"""

from typing import Any

import torch

from eagle_kit.ops.backend import is_differentiated


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in fp32 for half types; a half weight
    multiplies what was rounded to its type, an fp32 one what was not."""
    if is_differentiated(x, weight):
        out: torch.Tensor = _RMSNorm.apply(x, weight, eps)
        return out
    return _forward(x, weight, eps)


def _forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype == torch.float32:
        return torch.rms_norm(x, weight.shape, weight, eps)
    return _narrowed(torch.rms_norm(x.float(), weight.shape, None, eps), x, weight) * weight


def _narrowed(normed: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return normed if weight.dtype == torch.float32 else normed.to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that keeps x only, where autograd would keep n too.

    With r = 1 / sqrt(mean(x^2) + eps) and n = x r: ``dw = sum over rows of dy n``, ``dx = r (g - n mean(g
    n))`` with ``g = dy w``.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _forward(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast(grads[0].device.type, enabled=False):  # vecdot is a matmul to it
            return _RMSNorm._gradients(ctx, *grads)

    @staticmethod
    def _gradients(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grads[0]
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = x.to(wide)
        size = x.shape[-1]
        inverse = (torch.linalg.vecdot(normed, normed)[..., None] / size + ctx.eps).rsqrt_()
        normed = normed * inverse
        dx = dw = None
        if ctx.needs_input_grad[0]:
            g = (dy * weight).to(wide)
            share = torch.linalg.vecdot(g, normed)[..., None] / size
            dx = torch.addcmul(g, normed, share, value=-1.0).mul_(inverse).to(x.dtype)
        if ctx.needs_input_grad[1]:
            products = dy * _narrowed(normed, x, weight)
            dw = products.reshape(-1, size).sum(0).to(weight.dtype)
        return dx, dw, None


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``s = x + residual`` -> ``(rms_norm(s), s)``."""
    total = x + residual
    return rms_norm(total, weight, eps), total
