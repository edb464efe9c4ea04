"""``y = x w^T + b`` in fp32 on a CPU in C++ (:mod:`eagle_kit.ops.cpu.cpp`), with the weight in panels of some
outputs, each of which stays in a core's cache while all rows are multiplied by it.

A row's result does not depend on the number of rows.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from eagle_kit.ops.cpu import cpp
from eagle_kit.ops.cpu.memory import in_large_pages

ROWS = 256
"""Rows of a weight that are compared with bfloat16 at a time: the first ones usually decide."""


class Panels(NamedTuple):
    """Weight of ``num_outputs`` N in ``panels [ceil(N / W), K, W]``, with zeros behind the last output.

    The panels are fp32, or bfloat16 if every number of the weight is one. In bfloat16 the numbers of the two
    halves of W alternate.
    """

    panels: torch.Tensor
    num_outputs: int


def pack(weight: torch.Tensor) -> Panels:
    """Copy ``weight [N, K]``, fp32, into panels for :func:`matmul`.

    They are bfloat16 if every number is one, as those of most checkpoints are: with few rows the time of a
    product is that of reading the weight.
    """
    weight = weight.detach()
    outputs = len(weight)
    width = torch.ops.eagle_kit_cpp.panel_width()
    is_bfloat16 = _is_bfloat16(weight)
    if is_bfloat16:
        weight = weight.bfloat16()
    panels = F.pad(weight, (0, 0, 0, -outputs % width)).unflatten(0, (-1, width)).transpose(1, 2)
    panels = cpp.halves_in_turns(panels) if is_bfloat16 else panels.contiguous()
    return Panels(in_large_pages(panels), outputs)


def _is_bfloat16(weight: torch.Tensor) -> bool:
    """Return True if every number of an fp32 weight is one of bfloat16."""
    parts = weight.contiguous().view(torch.int32).split(ROWS)
    return not any((part & 0xFFFF).any() for part in parts)


def matmul(x: torch.Tensor, weight: Panels, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [T, K]`` -> ``[T, N]``, fp32, no gradient; the bits do not depend on the type of the panels."""
    out: torch.Tensor = torch.ops.eagle_kit_cpp.linear(
        x.contiguous(), weight.panels, weight.num_outputs, bias
    )
    return out
