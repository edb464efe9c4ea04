"""Transfer of host numbers to a device."""

from collections.abc import Sequence

import torch


def to_device(
    numbers: Sequence[float] | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Tensor ``[n]`` of ``numbers``, or a tensor of the host, on ``device``; the host does not wait for the
    copy."""
    on_host = torch.as_tensor(numbers, dtype=dtype, device="cpu")
    if device.type != "cuda":
        return on_host.to(device)
    return on_host.pin_memory().to(device, non_blocking=True)
