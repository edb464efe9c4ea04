"""Linear layers whose weight stays in e4m3.

For up to 64 rows of a half dtype on a GPU, Triton reads the weight as it is
(:mod:`eagle_kit.ops.small_linear`). More rows are also rounded to e4m3, with a scale for each, and multiplied
by ``torch._scaled_mm`` if GPU and scales allow it. Otherwise the weight is widened and multiplied a piece at
a time.

Legend: T rows, N outputs, K inputs.
"""

import torch
from torch import nn

from eagle_kit.ops.backend import is_differentiated, uses_triton
from eagle_kit.ops.capability import device_facts
from eagle_kit.ops.fp8 import E4M3, FP8Weight, quantize_fp8
from eagle_kit.ops.linear.plain import linear
from eagle_kit.ops.small_linear import fits_triton, small_linear, small_linear_swiglu
from eagle_kit.ops.swiglu import swiglu

PIECE = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements of a weight that are widened at once: a megabyte, which stays in a CPU's cache, or 32."""
SCALES_ROWS = (89, 90, 100, 103)
"""Compute capabilities for which torch multiplies e4m3 with scales of rows and columns (from its tests)."""
ALIGNED = 16
"""N and K are multiples of this in ``torch._scaled_mm``."""


def fp8_linear(x: torch.Tensor, weight: FP8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [T, K]`` times ``weight [N, K]`` transposed, plus ``bias [N]`` -> ``[T, N]`` in the dtype of ``x``;
    differentiable in ``x`` and ``bias``."""
    if x.shape[0] and uses_triton("small_linear", x) and fits_triton(x, weight, bias):
        return small_linear(x, weight, bias, backend="triton")
    if _multiplies_in_fp8(x, weight, bias):
        return scaled_matmul(x, weight, bias)
    parts = []
    for rows, piece in weight.pieces(PIECE[x.device.type]):
        piece_bias = None if bias is None else bias[rows]
        parts.append(linear(x, _widened(piece, x), piece_bias))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def working_bytes(device: torch.device) -> int:
    """Bytes that widening a piece takes: values, scales and products in fp32, and the rounded products."""
    return PIECE[device.type] * 14


def scaled_matmul(x: torch.Tensor, weight: FP8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`fp8_linear` with ``x``, bf16, rounded to e4m3 with a scale for each row, and ``weight`` with
    scales of rows; summed in fp32."""
    rows = quantize_fp8(x)
    return torch._scaled_mm(
        rows.values,
        weight.values.t(),
        scale_a=rows.scales,
        scale_b=weight.scales.t(),
        bias=bias,
        out_dtype=x.dtype,
    )


def _multiplies_in_fp8(x: torch.Tensor, weight: FP8Weight, bias: torch.Tensor | None) -> bool:
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and weight.is_by_row
        and all(size % ALIGNED == 0 for size in weight.values.shape)
        and device_facts(x.device).capability in SCALES_ROWS
        and not is_differentiated(x, bias)
    )


def _widened(weight: FP8Weight, x: torch.Tensor) -> torch.Tensor:
    """``weight`` in the dtype of ``x``. A CPU takes finite numbers apart by their bits, as the Triton kernel
    does for fp16, which is three times as fast as torch's conversion."""
    if x.device.type != "cpu":
        return weight.dense(x.dtype)
    moved = (weight.values.view(torch.int8).to(torch.int32) << 20).bitwise_and_(-0x78100000)
    return FP8Weight(moved.view(torch.float32), weight.scales * 2.0**120, weight.block).dense(x.dtype)


class FP8Linear(nn.Module):
    """Linear layer over ``[T, K]`` rows that holds an :class:`~eagle_kit.ops.fp8.FP8Weight` of finite
    numbers, in place of a :class:`~eagle_kit.ops.linear.Linear`; not trained.

    Attributes:
        weight: e4m3 ``[N, K]``.
        scales: fp32, see ``FP8Weight``.
        bias: ``[N]``, or None.
    """

    def __init__(self, weight: FP8Weight, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        assert weight.values.dtype == E4M3
        self.out_features, self.in_features = weight.values.shape
        self.block = weight.block
        self.weight = nn.Parameter(weight.values, requires_grad=False)
        self.scales = nn.Parameter(weight.scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def quantized(self) -> FP8Weight:
        """The weight."""
        return FP8Weight(self.weight, self.scales, self.block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in_features]`` -> ``[T, out_features]``."""
        return fp8_linear(x, self.quantized, self.bias)

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`Linear.swiglu <eagle_kit.ops.linear.Linear.swiglu>`."""
        weight = self.quantized
        if x.shape[0] and uses_triton("small_linear", x) and fits_triton(x, weight, self.bias):
            return small_linear_swiglu(x, weight, self.bias, backend="triton")
        return swiglu(self(x))

    def extra_repr(self) -> str:
        """Sizes, as ``nn.Linear`` shows them."""
        return f"in_features={self.in_features}, out_features={self.out_features}, block={self.block}"
