"""SwiGLU: ``silu(gate) * up``, forward and backward.

Every layer with an MLP calls it, in serving and in training.

Legend: T rows, I intermediate size.
"""

import torch

from eagle_kit.ops.backend import Backend, uses_cpp, uses_triton
from eagle_kit.ops.swiglu import reference


def swiglu(gate_up: torch.Tensor, *, backend: Backend | None = None) -> torch.Tensor:
    """``gate_up [..., 2 I]``, the gate first -> ``[..., I]`` of the same dtype, in fp32 inside."""
    if uses_triton("swiglu", gate_up, backend):
        from eagle_kit.ops.swiglu import triton

        return triton.swiglu(gate_up.contiguous())
    if gate_up.ndim == 2 and uses_cpp(gate_up, backend=backend):
        out: torch.Tensor = torch.ops.eagle_kit_cpp.swiglu(gate_up.contiguous())
        return out
    return reference.swiglu(gate_up)
