"""NVLink between the GPUs of several ranks, without which there is no one-shot all-reduce.

In that all-reduce each rank reads the memory of all others. GPUs on PCIe may offer access to their peers too,
but more than two of them are slow at it, and on some machines the values are wrong.
"""

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

import torch

UNKNOWN = "NVLink between the GPUs cannot be detected."


class GPULinks(NamedTuple):
    """A GPU and the NVLinks that it has.

    Attributes:
        uuid: of the GPU.
        links: number of NVLinks to each GPU that the process sees, by uuid. Those through an NVSwitch count.
    """

    uuid: str
    links: Mapping[str, int]


def links_of(device: torch.device) -> GPULinks | None:
    """NVLinks of a CUDA device, as NVML counts them; None if torch or the driver does not report them."""
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

        matrix = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
        uuids = [
            str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())
        ]
    except (ImportError, AttributeError, RuntimeError):  # an older torch, or no NVML
        return None
    own = torch.cuda.current_device() if device.index is None else device.index
    if own >= len(matrix) or len(matrix[own]) != len(uuids):
        return None
    return GPULinks(uuids[own], dict(zip(uuids, matrix[own], strict=True)))


def missing_nvlink(ranks: Sequence[GPULinks | None]) -> str | None:
    """Sentence on why the GPUs of ``ranks``, one of each rank, are not all connected; None if they are.

    GPUs of two machines, and those that a process does not see, count as not connected.
    """
    known = [each for each in ranks if each is not None]
    if len(known) < len(ranks):
        return UNKNOWN
    for one, other in permutations(range(len(known)), 2):
        if not known[one].links.get(known[other].uuid, 0):
            return f"The GPUs of rank {one} and of rank {other} have no NVLink to each other."
    return None
