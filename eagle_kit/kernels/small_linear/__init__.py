"""Linear layers of at most 64 rows, whose time is that of reading the weight once.

Models call :func:`eagle_kit.kernels.linear.linear`, which uses the Triton kernel where a table of measured
forms says so. cuBLAS has no counterpart for fp8 weights.

Legend: M rows, N output features, K input features.
"""

import torch

from eagle_kit.kernels.backend import Backend, is_differentiated, uses_triton
from eagle_kit.kernels.small_linear import reference
from eagle_kit.kernels.small_linear.reference import MAX_ROWS, quantize_fp8
from eagle_kit.kernels.swiglu import swiglu

__all__ = ["fits_triton", "quantize_fp8", "small_linear", "small_linear_fp8", "small_linear_swiglu"]


def fits_triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Return whether the Triton kernel supports these inputs: at most 64 rows, all of one half dtype, no
    gradient."""
    return (
        x.ndim == 2
        and x.shape[0] <= MAX_ROWS
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.stride(1) == 1
        and not torch.is_autocast_enabled(x.device.type)
        and not is_differentiated(x, weight, *(() if bias is None else (bias,)))
    )


def small_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, backend: Backend | None = None
) -> torch.Tensor:
    """``x [M, K]`` times ``weight [N, K]`` transposed, plus ``bias [N]`` -> ``[M, N]``; all of one dtype.

    Args:
        backend: None selects Triton on a GPU where :func:`fits_triton`; ``"triton"`` requires it.
    """
    if uses_triton(x, backend) and (backend is not None or fits_triton(x, weight, bias)):
        from eagle_kit.kernels.small_linear import triton

        return triton.small_linear(x.contiguous(), weight, None, bias)
    return reference.small_linear(x, weight, bias)


def small_linear_swiglu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, backend: Backend | None = None
) -> torch.Tensor:
    """``silu(gate) up [M, I]`` of :func:`small_linear` with a ``weight [2 I, K]`` of gate above up, without
    writing these."""
    if uses_triton(x, backend) and (backend is not None or fits_triton(x, weight, bias)):
        from eagle_kit.kernels.small_linear import triton

        return triton.small_linear_swiglu(x.contiguous(), weight, None, bias)
    return swiglu(reference.small_linear(x, weight, bias), backend="reference")


def small_linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """:func:`small_linear` with the fp8 ``weight [N, K]`` and fp32 ``scales [N]`` of :func:`quantize_fp8`, in
    the dtype of ``x``.

    Args:
        backend: None selects Triton on a GPU where M <= 64; the reference dequantises the whole weight at
            every call. e4m3 needs compute capability 8.9.
    """
    if uses_triton(x, backend) and (backend is not None or x.shape[0] <= MAX_ROWS):
        from eagle_kit.kernels.small_linear import triton

        return triton.small_linear(x.contiguous(), weight, scales, bias)
    return reference.small_linear_fp8(x, weight, scales, bias)
