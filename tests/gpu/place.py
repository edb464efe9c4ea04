"""Where these tests run, and at which sizes.

They are for a GPU. With ``EAGLE_KIT_GPU_TESTS_ON=cpu`` their bodies run on a CPU instead, at tiny sizes, with
kernels under the interpreter and graphs that are replayed eagerly: that shows mistakes in the tests, not in
the kernels. Inputs of a GPU are new in every run; ``EAGLE_KIT_GPU_SEED`` repeats those of an earlier one.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
ON_GPU = torch.cuda.is_available()
REHEARSED = os.environ.get("EAGLE_KIT_GPU_TESTS_ON") == "cpu" and not ON_GPU
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SEED = int(os.environ.get("EAGLE_KIT_GPU_SEED") or (18 if REHEARSED else random.getrandbits(31)))
FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HALVES = DTYPES[1:]


def pick(on_gpu: T, on_cpu: T) -> T:
    """A size, or a table of cases."""
    return on_gpu if ON_GPU else on_cpu


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
