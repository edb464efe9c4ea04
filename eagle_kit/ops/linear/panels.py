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
"""Rows of a weight that are looked at together: of one that is not of bfloat16 the first ones tell."""


class Panels(NamedTuple):
    """Weight of ``num_outputs`` in ``panels [ceil(N / W), K, W]``, with zeros behind the last output.

    In fp32, or in bfloat16 where every number is one, those of the two halves of W in turns.
    """

    panels: torch.Tensor
    num_outputs: int


def pack(weight: torch.Tensor) -> Panels:
    """Copy ``weight [N, K]``, fp32, into panels for :func:`matmul`: in bfloat16 where every number is one,
    as those of most checkpoints are, since a few rows take as long as reading the weight does."""
    outputs = len(weight)
    width = torch.ops.eagle_kit_cpp.panel_width()
    is_short = _is_bfloat16(weight.detach())
    numbers = weight.detach().bfloat16() if is_short else weight.detach()
    panels = F.pad(numbers, (0, 0, 0, -outputs % width)).unflatten(0, (-1, width)).transpose(1, 2)
    return Panels(in_large_pages(cpp.halves_in_turns(panels) if is_short else panels.contiguous()), outputs)


def _is_bfloat16(weight: torch.Tensor) -> bool:
    """Return True if every number of an fp32 weight is one of bfloat16."""
    parts = weight.contiguous().view(torch.int32).split(ROWS)
    return not any((part & 0xFFFF).any() for part in parts)


def matmul(x: torch.Tensor, weight: Panels, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [T, K]`` -> ``[T, N]``, fp32, no gradient; the bits do not depend on the type of the panels."""
    out: torch.Tensor = torch.ops.eagle_kit_cpp.linear(x.contiguous(), *weight, bias)
    return out
