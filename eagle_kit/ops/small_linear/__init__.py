"""Linear layers of at most 64 rows, whose time is that of reading the weight once.

Models call :func:`eagle_kit.ops.linear.linear`, which uses the Triton kernel where the engine has measured it
to be faster. Layers with fp8 weights always use it, since cuBLAS has no counterpart. Gate and up of an MLP
with their SwiGLU are one launch.

Legend: M rows, N output features, K input features.
"""

import torch

from eagle_kit.ops.backend import Backend, is_differentiated, uses_triton
from eagle_kit.ops.fp8 import E4M3, FP8Weight
from eagle_kit.ops.small_linear import reference
from eagle_kit.ops.small_linear.reference import MAX_ROWS
from eagle_kit.ops.swiglu import swiglu

__all__ = ["fits_triton", "scales_fit", "small_linear", "small_linear_swiglu"]

TILE = 128
"""Largest tile of K. The number of columns that share a scale must be a multiple of it."""


def scales_fit(weight: FP8Weight) -> bool:
    """Return whether Triton kernels multiply with the scales of ``weight``: of rows, or of blocks that whole
    tiles of K lie in."""
    return weight.is_by_row or weight.block[1] % TILE == 0


def fits_triton(x: torch.Tensor, weight: torch.Tensor | FP8Weight, bias: torch.Tensor | None = None) -> bool:
    """Return whether the Triton kernel supports these inputs: at most 64 rows of a half dtype, the weight in
    the same one or in fp8 with scales of rows or of a multiple of 128 columns, no gradient."""
    if isinstance(weight, FP8Weight):
        values = weight.values
        if values.dtype != E4M3 or not scales_fit(weight):
            return False
    else:
        values = weight
        if values.dtype != x.dtype:
            return False
    return (
        x.ndim == 2
        and x.shape[0] <= MAX_ROWS
        and x.dtype in (torch.bfloat16, torch.float16)
        and values.stride(1) == 1
        and not torch.is_autocast_enabled(x.device.type)
        and not is_differentiated(x, values, bias)
    )


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor | FP8Weight,
    bias: torch.Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """``x [M, K]`` times ``weight [N, K]`` transposed, plus ``bias [N]`` -> ``[M, N]``; all of one dtype but
    for fp8 weights.

    Args:
        backend: None selects Triton on a GPU where :func:`fits_triton`; ``"triton"`` requires it.
    """
    if uses_triton("small_linear", x, backend) and (backend is not None or fits_triton(x, weight, bias)):
        from eagle_kit.ops.small_linear import triton

        return triton.small_linear(x.contiguous(), *_operands(weight, bias))
    return reference.small_linear(x, weight, bias)


def small_linear_swiglu(
    x: torch.Tensor,
    weight: torch.Tensor | FP8Weight,
    bias: torch.Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """``silu(gate) up [M, I]`` of :func:`small_linear` with a ``weight [2 I, K]`` of gate above up, without
    writing these."""
    if uses_triton("small_linear", x, backend) and (backend is not None or fits_triton(x, weight, bias)):
        from eagle_kit.ops.small_linear import triton

        return triton.small_linear_swiglu(x.contiguous(), *_operands(weight, bias))
    return swiglu(reference.small_linear(x, weight, bias), backend="reference")


def _operands(
    weight: torch.Tensor | FP8Weight, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, list[int]]:
    """Weight, scales, bias and block as Triton's operators take them; an empty block means scales of rows."""
    if not isinstance(weight, FP8Weight):
        return weight, None, bias, []
    block = [] if weight.is_by_row else list(weight.block)
    return weight.values, weight.scales, bias, block
