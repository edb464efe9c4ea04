"""Expandable segments of torch's allocator, which training uses: memory follows its peak."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.cuda_device.device import ROOT, environment

EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "EAGLE_KIT_DEVICE_NVML": "1"}
GROWING = """
# Every tensor is a little larger than the one before it.
for megabytes in range(64, 512, 16):
    kept = torch.empty(megabytes << 20, dtype=torch.uint8, device="cuda")
    del kept
print(json.dumps({"peak": torch.cuda.max_memory_reserved(), "used": device.bytes_used()}))
"""
GRAPHS = """
graph = torch.cuda.CUDAGraph()
given = torch.ones(1 << 20, device="cuda")
with torch.cuda.graph(graph):
    doubled = given * 2
    for _ in range(8):
        doubled = doubled + given
graph.replay()
torch.cuda.synchronize()
held = device.bytes_used()
del graph, doubled, given
torch.cuda.empty_cache()
print(json.dumps({"held": held, "left": device.bytes_used()}))
"""
TOO_MUCH = """
first = torch.empty(700 << 20, dtype=torch.uint8, device="cuda")
try:
    torch.empty(700 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
del first
torch.empty(900 << 20, dtype=torch.uint8, device="cuda")
print(json.dumps({"out_of_memory": device.counts()["out_of_memory"]}))
"""


def run(code: str, settings: dict[str, str]) -> dict[str, Any]:
    """Run a program on a device of its own -> what it prints; no call of it may be illegal."""
    code = f"import json, torch\nfrom tests.cuda_device import device\ndevice.start()\n{code}\n"
    code += "assert not device.counts()['illegal_calls'], [str(call) for call in device.calls()]"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment({"PYTHONPATH": str(ROOT), **settings}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.smoke
def test_tensors_of_growing_sizes_take_the_memory_of_the_largest():
    fixed = run(GROWING, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"})
    expandable = run(GROWING, EXPANDABLE)
    assert fixed["peak"] > 10 * (496 << 20)
    assert expandable["peak"] < 1.1 * (496 << 20) and expandable["used"] == expandable["peak"]


def test_graphs_have_expandable_segments_of_their_own_and_give_them_back():
    found = run(GRAPHS, EXPANDABLE)
    assert found["held"] >= 10 << 22
    assert found["left"] < found["held"] / 2


def test_memory_that_ends_is_out_of_memory_and_is_used_again():
    found = run(TOO_MUCH, {**EXPANDABLE, "EAGLE_KIT_DEVICE_MEMORY_GB": "1"})
    assert found["out_of_memory"] > 0
