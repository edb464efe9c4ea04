"""Linear layers in torch with plain or fp8 weights.

Legend: M rows, N outputs, K inputs.
"""

import torch
from torch.nn import functional as F

MAX_ROWS = 64
"""Largest M of the Triton forms."""


def small_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [M, K]``, ``weight [N, K]``, ``bias [N]`` -> ``[M, N]``."""
    return F.linear(x, weight, bias)


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``weight [N, K]`` to e4m3 ``[N, K]`` and fp32 ``scales [N]`` with ``weight ~ scales * fp8``.

    The largest element of a row becomes 448. e4m3 has 3 bits of mantissa down to 2**-6 and steps of 2**-9
    below, so that the error of an element is at most ``max(|w| / 16, scale / 1024)``. For normally
    distributed weights that is 2.6 % of their root mean square, and products with them have the same relative
    error.
    """
    limit = torch.finfo(torch.float8_e4m3fn).max
    wide = weight.float()
    scales = (wide.abs().amax(1) / limit).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scales[:, None]).clamp(-limit, limit).to(torch.float8_e4m3fn), scales


def small_linear_fp8(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x [M, K]``, ``weight`` e4m3 ``[N, K]``, ``scales`` fp32 ``[N]`` -> ``[M, N]``. Half types
    hold an fp8 value exactly; the scale is multiplied after the sum, in fp32."""
    out = F.linear(x, weight.to(x.dtype)).float() * scales
    return (out if bias is None else out + bias.float()).to(x.dtype)
