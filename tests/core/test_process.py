"""Threads of the process: how they wait for one another."""

import os
import subprocess
import sys

import pytest

from eagle_kit.core import process

VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "EAGLE_KIT_SPINCOUNT")
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
