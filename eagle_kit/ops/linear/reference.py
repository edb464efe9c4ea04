"""``y = x w^T + b`` by torch itself, on any device."""

import torch
from torch.nn import functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [T, K]``, ``weight [N, K]``, ``bias [N]`` -> ``[T, N]``."""
    return F.linear(x, weight, bias)
