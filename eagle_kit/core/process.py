"""CPU cores and memory of the process, and its exit code after an interruption."""

import ctypes
import os
from contextlib import suppress

INTERRUPTED = 130
"""Exit code of a command that was interrupted and has saved its work so far."""


def num_cores() -> int:
    """Number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def return_free_memory() -> None:
    """Return what the allocator keeps of freed memory to the system; takes a millisecond or two. Large
    objects of a moment, such as parsed bodies, otherwise stay in resident memory, a peak in every thread.
    Only glibc can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
