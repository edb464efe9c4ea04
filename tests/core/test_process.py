"""Threads of the process: how they wait for one another."""

import os
import subprocess
import sys

import pytest

from eagle_kit.core import process

VARIABLES = (
    "GOMP_SPINCOUNT",
    "OMP_WAIT_POLICY",
    "KMP_BLOCKTIME",
    "EAGLE_KIT_SPINCOUNT",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "EAGLE_KIT_ALLOC_CONF",
)
SHOW = "; import os; print(os.environ.get('GOMP_SPINCOUNT'))"
BUSY = """
import os, warnings
{imports}
from eagle_kit.core.process import warn_of_spinning
for load, threads in ((1e6, 2), (1e6, 1), (-1e6, 2)):
    os.getloadavg = lambda: (load, 0.0, 0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_spinning(threads)
    print(*(str(each.message) for each in caught))
"""


def run(code: str, **environment: str) -> str:
    """Run a program with none of the variables but those given -> what it prints."""
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=kept | environment)
    return done.stdout.removesuffix("\n")


def test_threads_sleep_soon_unless_something_else_was_asked_for():
    assert run("import eagle_kit" + SHOW) == "1000"
    assert run("import eagle_kit.cli, sys; assert 'torch' not in sys.modules" + SHOW) == "1000"
    assert run("import eagle_kit" + SHOW, GOMP_SPINCOUNT="7") == "7"
    assert run("import eagle_kit" + SHOW, OMP_WAIT_POLICY="ACTIVE") == "None"
    assert run("import eagle_kit" + SHOW, KMP_BLOCKTIME="1") == "None"


def test_programs_of_others_wait_as_they_would_without_us():
    show = "import eagle_kit; from eagle_kit.core.process import environment_of_others as others; "
    show += "print(others().get('GOMP_SPINCOUNT'))"
    assert run(show) == "None"
    assert run(show, GOMP_SPINCOUNT="7") == "7"
    child = f"import eagle_kit, subprocess, sys; subprocess.run([sys.executable, '-c', {show!r}])"
    assert run(child) == "None", "what our parent set is ours too"


@pytest.fixture(scope="module")
def nvml(tmp_path_factory):
    """Environment in which there is a library of the name of NVIDIA's, without functions."""
    folder = tmp_path_factory.mktemp("nvml")
    command = ["gcc", "-shared", "-o", str(folder / "libnvidia-ml.so.1"), "-x", "c", "/dev/null"]
    subprocess.run(command, check=True)
    return {"LD_LIBRARY_PATH": str(folder)}


WHEN_TORCH_IS_IMPORTED = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch", os.environ.get("PYTORCH_ALLOC_CONF"))
            os._exit(0)
sys.meta_path.insert(0, Finder())
from eagle_kit.cli.app import main
main(sys.argv[1:] or {words})
"""


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["train", "CONFIG"], "expandable_segments:True"),
        (["data", "capture", "CONFIG", "--out", "states"], "expandable_segments:True"),
        (["serve", "CONFIG"], "None"),
    ],
)
def test_training_and_capture_expand_segments_before_torch_is_there(words, settings, tmp_path, nvml):
    config = tmp_path / "run.yaml"
    config.write_text(f"target: {tmp_path}\noutput_dir: {tmp_path / 'run'}\ndata: {{source: chats.jsonl}}\n")
    words = [str(config) if word == "CONFIG" else word for word in words]
    code = WHEN_TORCH_IS_IMPORTED.replace("{words}", repr(words))
    assert run(code, **nvml).splitlines()[-1] == f"torch {settings}"
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        given = "backend:native" if variable == "PYTORCH_ALLOC_CONF" else "None"
        assert run(code, **nvml, **{variable: "backend:native"}).splitlines()[-1] == f"torch {given}"


def test_segments_stay_as_they_are_without_the_library_that_torch_asks(nvml):
    show = "from eagle_kit.core import process; process.NVML = 'libmissing.so'; process.expand_segments(); "
    show += "import os; print(os.environ.get('PYTORCH_ALLOC_CONF'))"
    assert run(show, **nvml) == "None"
    assert run(show.replace("libmissing.so", "libnvidia-ml.so.1"), **nvml) == "expandable_segments:True"


def test_programs_of_others_have_the_allocator_that_the_user_set(nvml):
    show = "from eagle_kit.core import process; process.expand_segments(); "
    show += "print(process.environment_of_others().get('PYTORCH_ALLOC_CONF'))"
    assert run(show, **nvml) == "None"
    assert run(show, **nvml, PYTORCH_ALLOC_CONF="backend:native") == "backend:native"


@pytest.mark.parametrize(("imports", "is_late"), [("torch, eagle_kit", True), ("eagle_kit, torch", False)])
def test_a_late_import_is_told_where_it_costs(imports, is_late):
    """Of a busy machine, and where threads wait for others."""
    several, single, idle = run(BUSY.format(imports=f"import {imports}")).split("\n")
    assert ("torch" in several) is is_late
    assert single == idle == ""


def test_a_machine_is_busy_from_half_of_the_cores_on(monkeypatch):
    """Of the cores that this process may run on, in the last minute."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    for load, busy in ((4.01, True), (4.0, False)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 8.0 - load, 8.0 - load))
        assert process.num_cores() == 8 and process.busy_cores() == load and process.is_busy() is busy


def test_an_end_at_once_writes_what_was_printed_and_has_its_code():
    code = "import os, sys; from eagle_kit.core.process import end_at_once; sys.stderr = os.fdopen(2, 'w')\n"
    code += "print('out'); sys.stderr.write('err'); end_at_once(3)"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=buffered)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err")
