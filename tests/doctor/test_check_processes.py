"""Processes of checks: one that dies, raises or hangs hides no other check."""

import sys
import threading
import time
from pathlib import Path

import pytest

from eagle_kit.doctor.check_processes import CheckProcesses, Lane
from eagle_kit.doctor.checks import Check, Result, TimeLimits

COMMAND = (sys.executable, str(Path(__file__).with_name("speaking_worker.py")))
LIMITS = TimeLimits(start=60, operation=1.5, engine=60)


def run(*names: str, **lane) -> list[Result]:
    """Run checks of these names in one lane."""
    checks = [Check(name, name) for name in names]
    return CheckProcesses(COMMAND, LIMITS).run([Lane(checks, **lane)], lambda result: None)


def test_checks_share_a_process_until_one_raises():
    results = run("first", "wrong numbers", "raise", "last")
    assert [result.state for result in results] == ["passed", "failed", "failed", "passed"]
    processes = [result.detail for result in results]
    assert processes[0] == processes[1] == processes[2] != processes[3]


def test_a_process_that_dies_is_started_again():
    results = run("first", "segfault", "last")
    assert [result.state for result in results] == ["passed", "crashed", "passed"]
    assert "SIGSEGV" in results[1].detail


def test_a_process_that_hangs_is_ended_and_shows_where():
    results = run("hang", "last")
    assert [result.state for result in results] == ["hung", "passed"]
    assert "speaking_worker.py" in results[0].values["standard_error"]
    assert results[0].seconds < 30


def test_processes_that_cannot_start_are_not_tried_for_each_check(monkeypatch):
    monkeypatch.setenv("SPEAKING_WORKER", "broken")
    begun = time.monotonic()
    results = run(*map(str, range(500)))
    assert {result.state for result in results} == {"crashed"} and len(results) == 500
    assert all("no driver here" in result.detail for result in results)
    assert time.monotonic() - begun < 20


def test_parts_of_a_lane_are_disabled_besides_those_of_the_user(monkeypatch):
    monkeypatch.setenv("EAGLE_KIT_DISABLE", "lag, graphs")
    [result] = run("disabled", disabled=["triton:norm", "lag"])
    assert result.detail == "lag,graphs,triton:norm"


def test_lanes_run_at_the_same_time():
    checks = [Check(f"hang {number}", "") for number in range(2)]
    processes = CheckProcesses(COMMAND, TimeLimits(60, 4.0, 60), num_processes=2)
    begun = time.monotonic()
    results = processes.run([Lane([check]) for check in checks], lambda result: None)
    assert [result.state for result in results] == ["hung"] * 2
    assert time.monotonic() - begun < 8


def test_an_interruption_ends_all_processes_at_once(interruptible):
    processes = CheckProcesses(COMMAND, TimeLimits(60, 300, 300), num_processes=2)
    found: list[Result] = []

    def interrupt(result: Result) -> None:
        found.append(result)
        threading.Timer(0.5, signal_main).start()

    lanes = [Lane([Check("first", ""), Check("hang", "")]), Lane([Check("hang", "")])]
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        processes.run(lanes, interrupt)
    assert [result.check.name for result in found] == ["first"]
    assert time.monotonic() - begun < 30


def signal_main() -> None:
    """Interrupt the main thread, as Ctrl-C does."""
    import _thread

    _thread.interrupt_main()
