"""Weights in e4m3 with fp32 scales, and their quantisation.

e4m3 has 3 bits of mantissa down to 2**-6 and steps of 2**-9 below; its largest number is 448 (arXiv
2209.05433). Legend: N outputs, K inputs of a linear layer, E experts.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

E4M3 = torch.float8_e4m3fn
MAX = torch.finfo(E4M3).max


class FP8Weight(NamedTuple):
    """Weight ``[N, K]`` in e4m3, or one of each expert ``[E, N, K]``, quantised in blocks: the value of an
    element is ``values * scale``.

    Attributes:
        values: e4m3 ``[..., N, K]``.
        scales: fp32, one for each block: ``[..., ceil(N / rows), ceil(K / columns)]``.
        block: rows and columns that share a scale; ``(1, K)`` is a scale for each output.
    """

    values: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    @property
    def is_by_row(self) -> bool:
        """True if every output has one scale, which can be multiplied after the sum over K."""
        return self.block[0] == 1 and self.scales.shape[-1] == 1

    @property
    def by_row(self) -> "FP8Weight":
        """The same weight with scales for single rows, ``[..., N, ceil(K / columns)]``."""
        scales = _repeated(self.scales, self.block[0], self.values.shape[-2], -2)
        return FP8Weight(self.values, scales.contiguous(), (1, self.block[1]))

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Weight in ``dtype``, multiplied in fp32 and rounded once; dimensions before ``[N, K]`` are kept."""
        rows, columns = self.values.shape[-2:]
        scales = _repeated(self.scales.float(), self.block[0], rows, -2)
        if scales.shape[-1] > 1:
            scales = _repeated(scales, self.block[1], columns, -1)
        return (self.values.float() * scales).to(dtype)

    def view(self, shape: tuple[int, ...]) -> "FP8Weight":
        """View the weight of experts on top of each other, ``[E N, K]``, as ``shape [E, N, K]``; N must be a
        multiple of the rows of a block. A weight that already has ``shape`` is unchanged."""
        scales = self.scales.view(*shape[:-2], -1, self.scales.shape[-1])
        return FP8Weight(self.values.view(shape), scales, self.block)

    def unbind(self) -> list["FP8Weight"]:
        """Weights ``[N, K]`` of the experts."""
        experts = zip(self.values.unbind(), self.scales.unbind(), strict=True)
        return [FP8Weight(values, scales, self.block) for values, scales in experts]

    def pieces(self, numel: int) -> Iterator[tuple[slice, "FP8Weight"]]:
        """Split the weight into pieces of at most ``numel`` elements, or of one block of rows if that has
        more: pairs of the rows and the piece."""
        block_rows = self.block[0]
        outputs, inputs = self.values.shape
        step = max(1, numel // (inputs * block_rows)) * block_rows
        for begin in range(0, outputs, step):
            rows = slice(begin, begin + step)
            blocks = slice(begin // block_rows, (begin + step) // block_rows)
            yield rows, FP8Weight(self.values[rows], self.scales[blocks], self.block)


def _repeated(scales: torch.Tensor, times: int, size: int, dim: int) -> torch.Tensor:
    """Scales repeated to one for each of ``size`` rows or columns."""
    if times == 1:
        return scales
    return scales.repeat_interleave(min(times, size), dim).narrow(dim, 0, size)


def quantize_fp8(weight: torch.Tensor) -> FP8Weight:
    """Quantise ``weight [..., N, K]`` with a scale for each row, whose largest element becomes 448.

    The error of an element is at most ``max(|w| / 16, scale / 1024)``. For normally distributed weights that
    is 2.6 % of their root mean square, and products with them have the same relative error.
    """
    wide = weight.float()
    scales = (wide.abs().amax(-1, keepdim=True) / MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return FP8Weight((wide / scales).clamp(-MAX, MAX).to(E4M3), scales, (1, weight.shape[-1]))


def stack_fp8(parts: list[FP8Weight]) -> FP8Weight:
    """Put weights of the same K and columns of scales on top of each other; blocks of rows become single
    rows where a part does not end with a whole block."""
    if len(parts) == 1:
        return parts[0]
    rows = parts[0].block[0]
    if any(part.block[0] != rows or len(part.values) % rows for part in parts):
        parts = [part.by_row for part in parts]
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(E4M3)
    return FP8Weight(values, torch.cat([part.scales for part in parts]), parts[0].block)
