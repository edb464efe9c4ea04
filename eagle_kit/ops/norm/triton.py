"""RMSNorm, with or without a residual added first: one program per row, one pass over memory.

Bytes: 2 T H elements without residual, 4 T H with it. After Zhang and Sennrich (arXiv 1910.07467); half types
are rounded before a weight of theirs is multiplied, but not before an fp32 one, as in Hugging Face's models.
"""

import torch
import triton
import triton.language as tl

from eagle_kit.ops.custom_operator import custom_operator
from eagle_kit.ops.dependent_launch import launch_options, wait_for_launch


@triton.jit
def _rms_norm(
    x, residual, weight, out, total, eps, size,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm one row. Grid ``(T,)``; BLOCK is the size H rounded up to a power of 2."""
    # Load the row, and add the residual.
    wait_for_launch(PDL)
    row = tl.program_id(0).to(tl.int64) * size
    i = tl.arange(0, BLOCK)
    inside = i < size
    value = tl.load(x + row + i, inside, 0.0)
    kind: tl.constexpr = value.dtype
    value = value.to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row + i, inside, 0.0).to(tl.float32)
        rounded = value.to(kind)
        tl.store(total + row + i, rounded, inside)
        value = rounded.to(tl.float32)

    # Scale it, and multiply by the weight.
    scale = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / size + eps)
    normed = value * scale
    if weight.dtype.element_ty != tl.float32:
        normed = normed.to(kind).to(tl.float32)
    normed *= tl.load(weight + i, inside, 0.0).to(tl.float32)
    tl.store(out + row + i, normed.to(kind), inside)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    """Norm the rows of ``x``, or of ``x + residual``, which goes to ``total``, into ``out``."""
    size = x.shape[-1]
    rows = x.numel() // size
    if rows == 0:
        return
    block = triton.next_power_of_2(size)
    _rms_norm[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        out if total is None else total,
        eps,
        size,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=_num_warps(block),
        **launch_options(x.device),
    )


def _num_warps(block: int) -> int:
    return min(16, max(1, block // 512))


@custom_operator("eagle_kit::rms_norm")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x [..., H]`` contiguous, ``weight [H]`` -> the same shape and dtype as ``x``."""
    out = torch.empty_like(x)
    _launch(x, None, weight, out, None, eps)
    return out


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


@custom_operator("eagle_kit::add_rms_norm")
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both ``[..., H]`` contiguous and of one dtype -> ``(rms_norm(x + residual), x + residual)``."""
    out = torch.empty_like(x)
    total = torch.empty_like(x)
    _launch(x, residual, weight, out, total, eps)
    return out, total


@add_rms_norm.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)
