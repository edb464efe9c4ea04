"""``y = x w^T + b`` in fp32 on a CPU in C++ (:mod:`eagle_kit.kernels.cpp`), with the weight in panels of some
outputs, each of which stays in a core's cache while all rows are multiplied by it.

A row's result does not depend on the number of rows.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F


class Panels(NamedTuple):
    """Weight of ``num_outputs`` in ``panels [ceil(N / W), K, W]``, with zeros behind the last output.

    In fp32, or in bfloat16 where every number is one, those of the two halves of W in turns.
    """

    panels: torch.Tensor
    num_outputs: int


def pack(weight: torch.Tensor) -> Panels:
    """Copy ``weight [N, K]``, fp32, into panels for :func:`matmul`: in bfloat16 where every number is one,
    as those of most checkpoints are, since a few rows take as long as reading the weight does."""
    outputs, width = len(weight), torch.ops.eagle_kit_cpp.panel_width()
    panels = F.pad(weight.detach(), (0, 0, 0, -outputs % width)).unflatten(0, (-1, width)).transpose(1, 2)
    short = panels.bfloat16()
    if not torch.equal(short.float(), panels):
        return Panels(panels.contiguous(), outputs)
    return Panels(short.unflatten(2, (2, -1)).transpose(2, 3).flatten(2), outputs)


def matmul(x: torch.Tensor, weight: Panels, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [T, K]`` -> ``[T, N]``, fp32, no gradient; the bits do not depend on the type of the panels."""
    out: torch.Tensor = torch.ops.eagle_kit_cpp.linear(x.contiguous(), *weight, bias)
    return out
