"""SwiGLU in torch, the reference of the kernel."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from eagle_kit.ops.backend import is_differentiated


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``; the halves of the last dimension are gate and up. Half types round the silu."""
    if is_differentiated(gate_up):
        out: torch.Tensor = _SwiGLU.apply(gate_up)
        return out
    return _forward(gate_up)


def _forward(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    """SwiGLU that keeps ``gate_up`` only, where autograd would keep the silu too."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return _forward(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, -1)
        d_gate.copy_(torch.ops.aten.silu_backward(grads[0] * up, gate))
        torch.mul(grads[0], F.silu(gate), out=d_up)
        return d_gate_up
