"""Transfer of host numbers to a device."""

from collections.abc import Sequence

import torch


def to_device(
    numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Tensor ``[n]`` of ``numbers`` on ``device``; the host does not wait for the copy."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
