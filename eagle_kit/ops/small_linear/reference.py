"""Linear layers in torch with plain or fp8 weights.

Legend: M rows, N outputs, K inputs.
"""

import torch
from torch.nn import functional as F

from eagle_kit.ops.fp8 import FP8Weight

MAX_ROWS = 64
"""Largest M of the Triton kernels."""


def small_linear(
    x: torch.Tensor, weight: torch.Tensor | FP8Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x [M, K]``, ``weight [N, K]``, ``bias [N]`` -> ``[M, N]``; an fp8 weight is multiplied by its scales
    and rounded to the dtype of ``x``."""
    return F.linear(x, weight.dense(x.dtype) if isinstance(weight, FP8Weight) else weight, bias)
