"""SwiGLU: ``silu(gate) * up``, forward and backward. Legend: T rows, I intermediate size."""

import torch

from eagle_kit.kernels.backend import Backend, uses_triton
from eagle_kit.kernels.swiglu import reference


def swiglu(gate_up: torch.Tensor, *, backend: Backend | None = None) -> torch.Tensor:
    """``gate_up [..., 2 I]``, the gate first -> ``[..., I]`` of the same dtype, in fp32 inside."""
    if uses_triton(gate_up, backend):
        from eagle_kit.kernels.swiglu import triton

        return triton.swiglu(gate_up.contiguous())
    return reference.swiglu(gate_up)
