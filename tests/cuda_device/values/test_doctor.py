"""`eagle-kit doctor --gpu` on the device in software passes, and names planted faults and their switches."""

import _thread
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.doctor.checks import TimeLimits
from eagle_kit.doctor.examination import ExaminationOptions, examine


class Examined(NamedTuple):
    """Exit code, printed lines, and the file."""

    exit_code: int
    lines: list[str]
    record: dict[str, Any]

    def state_of(self, check: str) -> str:
        """State of the check of this name."""
        [found] = [each for each in self.record["checks"] if each["check"] == check]
        state: str = found["state"]
        return state


def examined(folder: Path, fault: str, *only: str, **limits: float) -> Examined:
    """Examine the device in software with a fault of :mod:`tests.cuda_device.doctor_worker`."""
    out = folder / "doctor.json"
    lines: list[str] = []
    options = ExaminationOptions(
        out,
        only=only,
        command=(sys.executable, "-m", "tests.cuda_device.doctor_worker", fault),
        limits=TimeLimits()._replace(**limits),
        num_processes=1,
    )
    exit_code = examine(options, lines.append)
    return Examined(exit_code, lines, json.loads(out.read_text()))


@pytest.mark.nightly
def test_all_checks_pass(tmp_path):
    found = examined(tmp_path, "nothing")
    count = len(found.record["checks"])
    assert found.record["summary"] == [f"all {count} checks passed"], "\n".join(found.lines)
    assert found.exit_code == 0 and count > 80
    assert found.record["facts"]["devices"][0]["capability"] == 90


@pytest.mark.smoke
def test_checks_of_an_operation_pass(tmp_path):
    found = examined(tmp_path, "nothing", "norm, ")
    assert found.exit_code == 0, "\n".join(found.lines)
    assert found.record["summary"] == ["all 5 checks passed"]


def test_wrong_numbers_name_the_operation_and_its_switch(tmp_path):
    found = examined(tmp_path, "wrong_numbers", "norm, add", "swiglu, values")
    assert found.exit_code == 1
    assert found.state_of("norm, add, bfloat16") == "failed"
    assert found.state_of("swiglu, values, bfloat16") == "passed"
    assert "export EAGLE_KIT_DISABLE=triton:norm" in found.record["summary"]
    assert any("programmatic-launch does not help" in line for line in found.lines)


def test_a_death_hides_no_other_check(tmp_path):
    found = examined(tmp_path, "death", "commit, ", "rows, ")
    assert found.exit_code == 1
    assert found.state_of("commit, paths, float32") == "crashed"
    assert found.state_of("rows, gathered, written, appended, float32") == "passed"
    assert "export EAGLE_KIT_DISABLE=triton:commit" in found.record["summary"]
    assert any("SIGSEGV" in line for line in found.lines)


def test_a_hang_is_ended_and_shows_where(tmp_path):
    found = examined(tmp_path, "hang", "swiglu, values, float32", "rows, ", operation=15.0)
    assert found.exit_code == 1
    assert found.state_of("swiglu, values, float32") == "hung"
    assert "export EAGLE_KIT_DISABLE=triton:swiglu" in found.record["summary"]
    [hung] = [each for each in found.record["checks"] if each["state"] == "hung"]
    assert "doctor_worker.py" in hung["standard_error"]


def test_a_word_that_no_check_has_is_refused(tmp_path):
    with pytest.raises(UserError, match="narm"):
        examined(tmp_path, "nothing", "narm")


def test_an_interruption_writes_what_is_there(tmp_path, interruptible):
    out = tmp_path / "doctor.json"
    command = (sys.executable, "-m", "tests.cuda_device.doctor_worker", "nothing")
    options = ExaminationOptions(out, only=("norm, ",), command=command, num_processes=1)

    def say(line: str) -> None:
        if line.startswith("ok    norm, "):
            _thread.interrupt_main()  # as Ctrl-C does

    assert examine(options, say) == 130
    record = json.loads(out.read_text())
    assert not record["is_complete"] and "interrupted" in record["summary"][0]
    assert "norm, add, float32" in [each["check"] for each in record["checks"]]


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["failing_capture", "stale_input"])
def test_faults_of_graphs_name_their_switch(tmp_path, fault):
    found = examined(tmp_path, fault, "engine, float32")
    assert found.exit_code == 1, "\n".join(found.lines)
    assert found.state_of("engine, float32, eager") == "passed"
    assert found.state_of("engine, float32, graphs, lag 0") != "passed"
    assert "export EAGLE_KIT_DISABLE=graphs" in found.record["summary"]
