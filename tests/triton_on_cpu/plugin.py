"""Plugin of pytest (``-p tests.triton_on_cpu.plugin``): Triton kernels run as C++ on CPU tensors.

It takes the place of Triton's interpreter in tests that launch kernels on CPU tensors. Programs of a launch
run in an order drawn from a seed; an access outside of the storages of its tensors raises. Each kernel that
was launched is listed at the end, with the tests that launched it: how many there are, and how many failed.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"  # read when Triton and the kernels are imported

from collections import Counter
from collections.abc import Generator

import pytest

from tests.triton_on_cpu import host_backend

host_backend.install(seed=18)
OF_THE_INTERPRETER = {
    "test_hardened.py": "tests the interpreter's own checks and races",
    "test_a_block_of_query_rows_loads_each_key_once": "counts loads of the interpreter",
    "test_a_gpu_without_e4m3_takes_its_bits": "breaks a function that a compiled kernel has inlined",
}
"""Tests, and files of tests, that need kernels to be interpreted, and why."""
_tests: Counter[str] = Counter()
_failed_tests: Counter[str] = Counter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what only the interpreter shows."""
    for item in items:
        name = getattr(item, "originalname", item.name)
        reason = OF_THE_INTERPRETER.get(name) or OF_THE_INTERPRETER.get(item.path.name)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Note which kernels a test launches, and whether it fails."""
    before = Counter(host_backend.launches)
    try:
        yield
    except Exception:
        _failed_tests.update((host_backend.launches - before).keys())
        raise
    finally:
        _tests.update((host_backend.launches - before).keys())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the kernels that were launched."""
    terminalreporter.section("kernels that ran as C++")
    for name, number in sorted(host_backend.launches.items()):
        failed = f", {_failed_tests[name]} failed" if _failed_tests[name] else ""
        terminalreporter.line(f"{name}: {number} launches in {_tests[name]} tests{failed}")
