"""Weights in a layout for few rows on a CPU: in C++ where that is compiled, or in oneDNN's."""

import torch

from eagle_kit.ops.cpu import cpp
from eagle_kit.ops.linear import onednn, panels

Packed = onednn.Packed | panels.Panels


def can_pack(weight: torch.Tensor) -> bool:
    """Return whether ``weight`` can be packed."""
    is_cpu_fp32 = weight.device.type == "cpu" and weight.dtype == torch.float32
    return is_cpu_fp32 and (cpp.available() or onednn.available())


def pack(weight: torch.Tensor) -> Packed:
    """Copy ``weight [N, K]``, for which :func:`can_pack` holds, into the layout that is fastest here."""
    return panels.pack(weight) if cpp.available() else onednn.pack(weight)


def takes_packed(x: torch.Tensor, weight: Packed) -> bool:
    """Return whether rows ``x [T, K]`` are multiplied by a packed weight."""
    return (
        (isinstance(weight, panels.Panels) or x.shape[0] <= onednn.PACKED_MAX_ROWS)
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.ndim == 2
        and not torch.is_grad_enabled()
        and not isinstance(x, torch._subclasses.FakeTensor)
    )


def packed_matmul(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [T, K]``, for which :func:`takes_packed` holds -> ``[T, N]``, no gradient; a row's result does not
    depend on T."""
    if isinstance(weight, panels.Panels):
        return panels.matmul(x, weight, bias)
    return onednn.packed_matmul(x, weight, bias)
