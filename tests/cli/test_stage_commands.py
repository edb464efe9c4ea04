"""Stages of a longer command: their order, their times, failures, and what a second call goes on with."""

import errno
import json
import shlex
import signal
import subprocess

import pytest

from eagle_kit.cli import stage_commands
from eagle_kit.cli.stage_commands import COMMANDS, Stage, StageLog, run_stages
from eagle_kit.core.errors import UserError

ASKED = {"target": "small"}
WAITS = """
import json, sys, time
from pathlib import Path

for _ in range(200):
    if Path(sys.argv[1]).exists():
        sys.exit(0 if json.loads(Path(sys.argv[1]).read_text())["spent_s"]["waits"] >= 0 else 4)
    time.sleep(0.05)
sys.exit(3)
"""
"""A stage that ends when the time it took so far is on the disk."""
ENDS = """
import sys, time

time.sleep(0.15)
sys.exit(int(sys.argv[1]))
"""
"""A stage that takes more than the tenth of a second to which times are rounded."""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """`waits LOG` and `ends CODE` as programs of stages."""
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "ends.py").write_text(ENDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(stage_commands.MODULES, "waits", "waits")
    monkeypatch.setitem(stage_commands.MODULES, "ends", "ends")
    monkeypatch.setattr(stage_commands, "NOTE_S", 0.01)


@pytest.fixture
def log(tmp_path):
    return StageLog(tmp_path / "log.json", ASKED)


def test_the_time_of_a_stage_is_noted_while_it_runs(programs, log):
    assert run_stages([Stage("waits", ["waits", str(log.path)])], log, 1) == 0


def test_a_disk_that_is_full_meanwhile_ends_the_stage_too(programs, log, monkeypatch):
    start = subprocess.Popen
    started = []

    def full(*args, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    def noted(*args, **named):
        started.append(start(*args, **named))
        return started[-1]

    monkeypatch.setattr(stage_commands, "write_json_atomically", full)
    monkeypatch.setattr(stage_commands.subprocess, "Popen", noted)
    with pytest.raises(OSError, match="No space"):
        run_stages([Stage("waits", ["waits", str(log.path)])], log, 1)
    assert started[0].returncode == -signal.SIGTERM


def test_a_stage_that_fails_is_run_again_and_those_before_it_are_not(programs, log, capsys):
    results = []

    def stages(code):
        yield Stage("first", ["ends", "0"], lambda seconds: results.append(seconds) or {"number": 5})
        assert log.done["first"] == {"number": 5}, "its result is known when the second is made"
        yield Stage("second one", ["ends", str(code)])

    assert run_stages(stages(3), log, 2) == 3
    printed = capsys.readouterr()
    assert "== 1/2 first: ends 0\n" in printed.out and "== 2/2 second one: ends 3\n" in printed.out
    assert "second one failed" in printed.err

    # As another call goes on.
    before = log.spent_s["second one"]
    log = StageLog(log.path, ASKED)
    assert run_stages(stages(0), log, 2) == 0
    assert len(results) == 1 and log.spent_s["second one"] > before > 0
    assert log.total_s == pytest.approx(sum(log.spent_s.values()))
    lines = log.path.with_name(COMMANDS).read_text().splitlines()
    assert [shlex.split(line) for line in lines] == [["ends", "0"], ["ends", "0"]]


@pytest.mark.parametrize("code", [130, 143])
def test_an_interrupted_stage_interrupts_all(programs, log, code):
    with pytest.raises(KeyboardInterrupt):
        run_stages([Stage("first", ["ends", str(code)]), Stage("second", ["ends", "0"])], log, 2)
    assert not log.done and list(log.spent_s) == ["first"]


def test_other_settings_are_refused_once_a_stage_is_done(programs, log):
    run_stages([Stage("first", ["ends", "2"])], log, 1)
    assert StageLog(log.path, {"target": "large"}).spent_s == {}, "nothing was done yet"
    run_stages([Stage("first", ["ends", "0"])], log, 1)
    with pytest.raises(UserError, match="begun with other settings"):
        StageLog(log.path, {"target": "large"})
    assert list(json.loads(log.path.read_text())["done"]) == ["first"]
