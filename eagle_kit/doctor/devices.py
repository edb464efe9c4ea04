"""Facts of the GPUs that torch sees, and copies between them."""

import ctypes
import itertools
from collections.abc import Mapping
from typing import Any

import torch

from eagle_kit.core.switches import is_disabled
from eagle_kit.doctor.checks import CheckOutcome
from eagle_kit.ops.capability import facts_of

PROGRAMMATIC_DRIVER = 12030
"""First CUDA version of a driver, as CUDA counts, that makes programmatic edges in captured graphs."""
PEER_NUMBERS = 1 << 16
"""Numbers that are copied between two GPUs."""


def check_devices(given: Mapping[str, Any]) -> CheckOutcome:
    """List GPUs, driver and peers. It fails where the driver is too old for programmatic launches, or where a
    copy from one GPU to another arrives changed."""
    driver = driver_cuda_version()
    devices = [gpu_facts(number) for number in range(torch.cuda.device_count())]
    peers = [peer_facts(source, to) for source, to in itertools.permutations(range(len(devices)), 2)]
    values = {"driver_cuda": _version(driver), "devices": devices, "peers": peers}

    # Faults.
    capability = max(device["capability"] for device in devices)
    launches_ahead = facts_of(capability).starts_early and not is_disabled("programmatic-launch")
    if launches_ahead and driver is not None and driver < PROGRAMMATIC_DRIVER:
        detail = f"The driver is of CUDA {_version(driver)}, and programmatic launches in graphs need 12.3."
        return CheckOutcome(False, detail, values)
    changed = [f"{each['from']} to {each['to']}" for each in peers if not each["copies_arrive"]]
    if changed:
        return CheckOutcome(False, f"copies between GPUs arrive changed: {', '.join(changed)}", values)
    return CheckOutcome(True, f"{len(devices)} found, driver of CUDA {_version(driver)}", values)


def gpu_facts(number: int) -> dict[str, Any]:
    """Name, compute capability times 10, multiprocessors, and memory in bytes of a GPU."""
    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    return {
        "number": number,
        "name": properties.name,
        "capability": 10 * properties.major + properties.minor,
        "multiprocessors": properties.multi_processor_count,
        "shared_memory": getattr(properties, "shared_memory_per_block_optin", None),
        "memory_total": total,
        "memory_free": free,
    }


def peer_facts(source: int, to: int) -> dict[str, Any]:
    """Whether a GPU reads another's memory directly, and whether copies arrive."""
    sent = torch.arange(PEER_NUMBERS, device=f"cuda:{source}")
    arrived = sent.to(f"cuda:{to}").cpu()
    return {
        "from": source,
        "to": to,
        "is_direct": torch.cuda.can_device_access_peer(to, source),
        "copies_arrive": torch.equal(arrived, torch.arange(PEER_NUMBERS)),
    }


def driver_cuda_version() -> int | None:
    """CUDA version that the driver supports, as CUDA counts: 12030 is 12.3; None where it is not known."""
    version = ctypes.c_int()
    try:
        error = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if error else version.value


def _version(number: int | None) -> str:
    return "unknown" if number is None else f"{number // 1000}.{number % 1000 // 10}"
