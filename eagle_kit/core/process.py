"""What a process may use of the machine, and how it says that it was stopped."""

import os

INTERRUPTED = 130
"""Exit code of a command that was stopped on its way and has kept what it had."""


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
