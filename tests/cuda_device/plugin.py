"""Plugin of pytest that starts the interpreter again with the device's libraries in front.

Use: ``python -m pytest -p tests.cuda_device.plugin``. The libraries have to be there before torch loads
CUDA's, so they are named in LD_PRELOAD, which is read when a process starts. The command is the same; the
environment tells the second process that it is the second one.
"""

import os
import sys
from collections.abc import Iterator

import pytest

from tests.cuda_device import device
from tests.cuda_device.device import LogKind

if not device.is_in_front():
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], device.environment())
device.start()


def pytest_report_header() -> str:
    """Say what device this is."""
    import torch

    total = torch.cuda.mem_get_info()[1]
    return f"CUDA device: {torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {total / 1e9:.0f} GB"


@pytest.fixture(autouse=True)
def no_illegal_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """A call that CUDA refuses is a fault, but in tests that are marked to provoke some.

    So is, in mode "values", a launch for which no computation stands.
    """
    if request.node.get_closest_marker("illegal_calls"):
        yield
        return
    first = device.num_calls()
    yield
    faults = [call for call in device.calls(first) if call.kind in (LogKind.ILLEGAL_CALL, LogKind.UNCOMPUTED)]
    assert not faults, "\n".join(map(str, faults))
