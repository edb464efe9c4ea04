"""Where these tests run, and at which sizes.

They are for a GPU. With ``EAGLE_KIT_GPU_TESTS_ON=cpu`` their bodies run on a CPU instead, at tiny sizes, with
kernels under the interpreter and graphs that are replayed eagerly: that shows mistakes in the tests, not in
the kernels. Inputs of a GPU are new in every run; ``EAGLE_KIT_GPU_SEED`` repeats those of an earlier one.

They also run on the CUDA device in software, at tiny sizes, with torch's allocator, streams and graphs::

    EAGLE_KIT_DEVICE_MODE=values python -m pytest -p tests.cuda_device.plugin tests/gpu
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
ON_GPU = torch.cuda.is_available()
IN_SOFTWARE = "EAGLE_KIT_DEVICE_LIBRARIES" in os.environ
"""The GPU is the CUDA device in software."""
REHEARSED = os.environ.get("EAGLE_KIT_GPU_TESTS_ON") == "cpu" and not ON_GPU
IS_TINY = REHEARSED or IN_SOFTWARE
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SEED = int(os.environ.get("EAGLE_KIT_GPU_SEED") or (18 if IS_TINY else random.getrandbits(31)))
FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HALVES = DTYPES[1:]


def pick(on_gpu: T, tiny: T) -> T:
    """A size, or a table of cases: of a GPU, or of a CPU and the device in software."""
    return on_gpu if ON_GPU and not IN_SOFTWARE else tiny


def generator(salt: int = 0) -> torch.Generator:
    """Of random numbers on the device."""
    return torch.Generator(DEVICE).manual_seed(SEED + salt)


def randn(*shape: int, dtype: torch.dtype = torch.float32, by: torch.Generator, scale: float = 1.0) -> Any:
    """Normal numbers on the device."""
    return (torch.randn(shape, generator=by, device=DEVICE) * scale).to(dtype)


def synchronize() -> None:
    """Wait for the device."""
    if ON_GPU:
        torch.cuda.synchronize()


def memory(name: str) -> int:
    """A number of ``torch.cuda.memory_stats``; 0 without a GPU."""
    return int(torch.cuda.memory_stats().get(name, 0)) if ON_GPU else 0


@contextmanager
def no_waiting() -> Iterator[None]:
    """Within, an operation that waits for the device raises."""
    if not ON_GPU:
        yield
        return
    synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
