"""Blocks of torch's caching allocator without a value hold NaN, so that reading them shows.

The runtime fills a block when the allocator hands it out and when it is free again, in the order of the
block's stream, and at the replays of a graph that does the same (``native/poison.cpp``, and the section
"Poison" of ``native/runtime.c``).
"""

import ctypes
import os
from pathlib import Path

from tests.cuda_device.build import POISON
from tests.cuda_device.device import IN_FRONT


def install() -> None:
    """Attach to the allocator, for the rest of the process; torch has to have initialised CUDA."""
    library = ctypes.CDLL(str(Path(os.environ[IN_FRONT]) / POISON))
    library.poison_blocks()
