"""SwiGLU in torch: what the kernel is held to."""

import torch
from torch.nn import functional as F


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``; the halves of the last dimension are gate and up. Half types round the silu."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
