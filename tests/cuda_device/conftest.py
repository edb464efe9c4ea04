"""Tests on the CUDA device in software: `make test-cuda-device`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda_device import device
from tests.cuda_device.device import LogKind

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests in a process that does not run on the device."""
    if device.is_in_front():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="no CUDA device in software: make test-cuda-device"))


@pytest.fixture(autouse=True)
def no_illegal_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """A call that CUDA refuses is a fault, but in tests that are marked to provoke some."""
    if not device.is_in_front() or request.node.get_closest_marker("illegal_calls"):
        yield
        return
    first = device.num_calls()
    yield
    illegal = [call for call in device.calls(first) if call.kind == LogKind.ILLEGAL_CALL]
    assert not illegal, "\n".join(map(str, illegal))
