"""The process: memory that is given back."""

import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
from eagle_kit.core.process import return_free_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

blocks = [bytearray(60_000) for _ in range(4000)]
above = bytearray(60_000)  # so that the heap cannot shrink from its end
del blocks
before = resident()
return_free_memory()
print(before - resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_freed_memory_goes_back_to_the_system():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 150_000_000
