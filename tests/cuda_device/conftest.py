"""Tests on the CUDA device in software: `make test-cuda-device`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda_device import device
from tests.cuda_device.device import LogKind

HERE = Path(__file__).parent
collect_ignore: list[str] = []
if not device.is_in_front():
    # It takes functions of the device's libraries when it is imported.
    collect_ignore += ["values/test_launches.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests in a process that does not run on the device, or in another mode than theirs."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        needs_values = HERE / "values" in item.path.parents
        if not device.is_in_front():
            item.add_marker(pytest.mark.skip(reason="no CUDA device in software: make test-cuda-device"))
        elif needs_values != device.has_values():
            item.add_marker(pytest.mark.skip(reason="needs EAGLE_KIT_DEVICE_MODE=values, or none"))


@pytest.fixture(autouse=True)
def no_illegal_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """A call that CUDA refuses is a fault, but in tests that are marked to provoke some.

    So is, in mode "values", a launch for which no computation stands.
    """
    if not device.is_in_front() or request.node.get_closest_marker("illegal_calls"):
        yield
        return
    first = device.num_calls()
    yield
    faults = [call for call in device.calls(first) if call.kind in (LogKind.ILLEGAL_CALL, LogKind.UNCOMPUTED)]
    assert not faults, "\n".join(map(str, faults))
