"""Weights in e4m3 with fp32 scales: what they are, and how they are made.

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
        grown = _grown(self.scales, self.block[0], self.values.shape[-2], -2)
        return FP8Weight(self.values, grown.contiguous(), (1, self.block[1]))

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Weight in ``dtype``, multiplied in fp32 and rounded once; dimensions before ``[N, K]`` are kept."""
        rows, columns = self.values.shape[-2:]
        grown = _grown(self.scales.float(), self.block[0], rows, -2)
        if grown.shape[-1] > 1:
            grown = _grown(grown, self.block[1], columns, -1)
        return (self.values.float() * grown).to(dtype)

    def view(self, shape: tuple[int, ...]) -> "FP8Weight":
        """The weight of experts on top of each other, ``[E N, K]``, as ``shape [E, N, K]``, whose N is a
        multiple of the rows of a block; a weight that has its shape already is the same."""
        scales = self.scales.view(*shape[:-2], -1, self.scales.shape[-1])
        return FP8Weight(self.values.view(shape), scales, self.block)

    def unbind(self) -> list["FP8Weight"]:
        """Weights ``[N, K]`` of the experts."""
        both = zip(self.values.unbind(), self.scales.unbind(), strict=True)
        return [FP8Weight(values, scales, self.block) for values, scales in both]

    def pieces(self, numel: int) -> Iterator[tuple[slice, "FP8Weight"]]:
        """Consecutive rows of at most ``numel`` elements, or one block of rows where that is more, with their
        place."""
        rows = self.block[0]
        outputs, inputs = self.values.shape
        step = max(1, numel // (inputs * rows)) * rows
        for begin in range(0, outputs, step):
            place = slice(begin, begin + step)
            blocks = slice(begin // rows, (begin + step) // rows)
            yield place, FP8Weight(self.values[place], self.scales[blocks], self.block)


def _grown(scales: torch.Tensor, times: int, size: int, dim: int) -> torch.Tensor:
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
