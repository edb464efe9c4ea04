"""Skips what needs a GPU where there is none, or rehearses it; new memory holds NaN, so that an unwritten
output shows."""

import os
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, and asked for by deterministic modes

import pytest
import torch

from tests.gpu import place

HERE = Path(__file__).parent
NOT_IN_SOFTWARE = {
    "test_the_host_is_done_before_the_device": "the host computes what the device would",
}
"""Tests that the CUDA device in software cannot pass, and why."""


def pytest_report_header() -> str:
    where = torch.cuda.get_device_name() if place.ON_GPU else "no CUDA device"
    return f"gpu tests: {where}, EAGLE_KIT_GPU_SEED={place.SEED}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if place.IS_TINY:
        _leave_out_repetitions(config, items)
    reason = f"no CUDA device: run `pytest {HERE.parent.name}/{HERE.name}` on a machine with one"
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore:.*deterministic"))
        missing = NOT_IN_SOFTWARE.get(item.originalname)
        if place.IN_SOFTWARE and missing is not None:
            item.add_marker(pytest.mark.skip(reason=missing))
        if item.get_closest_marker("anywhere"):
            continue
        if place.ON_GPU:
            item.add_marker(pytest.mark.gpu)
        elif not place.REHEARSED:
            item.add_marker(pytest.mark.skip(reason=reason))


def _leave_out_repetitions(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Reduce each test of this folder to cases in which every value of every parameter occurs."""
    tests: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.path.is_relative_to(HERE):
            tests.setdefault((item.path, item.originalname), []).append(item)
    left_out = {id(item) for cases in tests.values() for item in _repetitions(cases)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


def _repetitions(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Cases of one test that are not needed for every value of its parameters, chosen greedily."""
    values = [set() for _ in cases]
    for case, found in zip(cases, values, strict=True):
        if hasattr(case, "callspec"):
            found.update((name, id(value)) for name, value in case.callspec.params.items())
    missing = set().union(*values)
    kept = {0}
    missing -= values[0]
    while missing:
        most = max(range(len(cases)), key=lambda number: len(values[number] & missing))
        kept.add(most)
        missing -= values[most]
    return [case for number, case in enumerate(cases) if number not in kept]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "anywhere: of the GPU suite, but needs no GPU")


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    """Kernels of a rehearsal run under the repaired interpreter."""
    if place.REHEARSED:
        pytest.importorskip("triton")
        from kernel_lab.interpreter import repair

        repair()


@pytest.fixture
def poisoned_memory():
    """What is allocated and not written is NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device=place.DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def after_each():
    """An error of an asynchronous launch belongs to the test that made it; its memory to nobody."""
    yield
    place.synchronize()
    if place.ON_GPU:
        torch.cuda.empty_cache()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if report.failed and item.path.is_relative_to(HERE):
        report.sections.append(("inputs", f"repeat them with EAGLE_KIT_GPU_SEED={place.SEED}"))
    return report
