"""The kernels' own tests, which run under the interpreter elsewhere, on the GPU: a process for each file, so
that an access beyond memory, which ends a process's use of the device, fails one file and not all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.place import IN_SOFTWARE, REHEARSED, pick

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests" / "ops").rglob("test_*_triton.py"))
OPTIONS: list[str] = []
if REHEARSED:
    OPTIONS = ["--collect-only"]
if IN_SOFTWARE:
    OPTIONS = ["-p", "tests.cuda_device.plugin", "--tier", "quick"]


@pytest.mark.parametrize("file", pick(FILES, FILES[:1]), ids=lambda file: file.stem)
def test_they_pass_on_the_device(file):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # their poisoned memory comes with deterministic modes
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", *OPTIONS, str(file)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=420)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"


@pytest.mark.anywhere
def test_every_kernel_has_such_a_file():
    kernels = {path.parent.name for path in (ROOT / "eagle_kit" / "ops").rglob("triton.py")}
    assert kernels == {file.parent.name for file in FILES}
