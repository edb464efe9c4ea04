"""CPU cores of the process, and its exit code after an interruption."""

import os

INTERRUPTED = 130
"""Exit code of a command that was interrupted and has saved its work so far."""


def num_cores() -> int:
    """Number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
