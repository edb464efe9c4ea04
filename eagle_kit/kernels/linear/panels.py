"""``y = x w^T + b`` in fp32 on a CPU in C++ (:mod:`eagle_kit.kernels.cpp`), with the weight in panels of some
outputs, each of which stays in a core's cache while all rows are multiplied by it.

A row's result does not depend on the number of rows.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F


class Panels(NamedTuple):
    """Weight of ``num_outputs`` in ``panels [ceil(N / W), K, W]``, zeros behind the last output."""

    panels: torch.Tensor
    num_outputs: int


def pack(weight: torch.Tensor) -> Panels:
    """Copy ``weight [N, K]`` into panels for :func:`matmul`."""
    outputs, width = len(weight), torch.ops.eagle_kit_cpp.panel_width()
    padded = F.pad(weight.detach(), (0, 0, 0, -outputs % width))
    return Panels(padded.unflatten(0, (-1, width)).transpose(1, 2).contiguous(), outputs)


def matmul(x: torch.Tensor, weight: Panels, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [T, K]`` -> ``[T, N]``, no gradient."""
    out: torch.Tensor = torch.ops.eagle_kit_cpp.linear(x.contiguous(), *weight, bias)
    return out
