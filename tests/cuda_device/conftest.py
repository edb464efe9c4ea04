"""Tests on the CUDA device in software: `make test-cuda-device`."""

import gc
from pathlib import Path

import pytest
import torch

from tests.cuda_device import device

HERE = Path(__file__).parent
collect_ignore: list[str] = []
if not device.is_in_front():
    # They take functions of the device's libraries when they are imported.
    collect_ignore += [f"values/test_{name}.py" for name in ("launches", "poison")]


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
def choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured choices of a test are no other test's."""
    from eagle_kit.engine.measured import choice_file

    monkeypatch.setattr(choice_file, "folder", lambda: tmp_path / "choices")


@pytest.fixture
def memory_of_its_own() -> None:
    """Free what torch keeps of earlier tests, for a test of limits and peaks of memory, which count it."""
    if device.is_in_front():
        gc.collect()
        torch.cuda.empty_cache()
