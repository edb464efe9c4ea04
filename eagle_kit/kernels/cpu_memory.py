"""Keep glibc from handing big freed blocks back to the kernel."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_large_blocks() -> bool:
    """Make ``malloc`` reuse large freed blocks instead of unmapping them; returns whether it could.

    Every tensor above 32 MiB is otherwise a fresh mapping whose pages fault in one by one, which costs more
    than the matmul that fills it. Changes the whole process, so programs call it at their start (trainer,
    engine, benchmark) and libraries do not. Does nothing outside Linux with glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(_M_MMAP_MAX, 0)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
    except (OSError, AttributeError):
        return False


def release_free_memory() -> bool:
    """Give freed memory back to the kernel, tens of milliseconds; returns whether anything was given back.

    With :func:`keep_large_blocks` a program whose tensors change size from step to step slowly fills its
    heap with free gaps. Called every few steps, this bounds them and costs little.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL("libc.so.6").malloc_trim(0))
    except (OSError, AttributeError):
        return False
