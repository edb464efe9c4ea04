"""Jobs in processes: order, failures, stops; the jobs are lines of Python."""

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from eagle_kit.cli.jobs import run_jobs
from eagle_kit.core.errors import UserError

SLEEPS = "import time; print('begun', flush=True); time.sleep(60)"
FAILS_WHEN_STOPPED = """
import signal, sys, time
def stop(*_):
    print("error: The disk is full.")
    sys.exit(2)
signal.signal(signal.SIGTERM, stop)
print("begun", flush=True)
time.sleep(60)
"""


@dataclass
class Line:
    """A line of Python as a job."""

    name: str
    program: str
    folder: Path
    finished: list[str] = field(default_factory=list)

    @property
    def log(self):
        return self.folder / f"{self.name}.log"

    def words(self):
        return [sys.executable, "-c", self.program]

    def finish(self):
        self.finished.append(self.name)

    def wait_until_begun(self):
        while not (self.log.exists() and "begun" in self.log.read_text()):
            time.sleep(0.02)


def _soon(jobs, do):
    def wait_and_do():
        for job in jobs:
            job.wait_until_begun()
        do()

    threading.Thread(target=wait_and_do, daemon=True).start()


def test_jobs_finish_in_order_and_share_the_cores(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    say = "import os; print(os.environ['OMP_NUM_THREADS'])"
    jobs = [Line(name, say, tmp_path) for name in "abc"]
    assert run_jobs(jobs, 1, None, "test")
    cores = len(os.sched_getaffinity(0))
    assert [job.finished for job in jobs] == [["a"], ["b"], ["c"]]
    assert {job.log.read_text().strip() for job in jobs} == {str(cores)}
    assert run_jobs(jobs[:1], 64, None, "test")
    assert jobs[0].log.read_text().split()[-1] == "1"


def test_a_failure_is_told_in_the_words_of_this_attempt(tmp_path):
    job = Line("a", "print('error: The first one.'); raise SystemExit(2)", tmp_path)
    with pytest.raises(UserError, match=r"The run a failed: The first one\."):
        run_jobs([job], 1, None, "test")
    job.program = "print('prog: error: the second one'); raise SystemExit(2)"
    with pytest.raises(UserError, match="The run a failed: the second one"):
        run_jobs([job], 1, None, "test")
    job.program = "import os; os.kill(os.getpid(), 9)"
    with pytest.raises(UserError, match="it was ended by SIGKILL"):
        run_jobs([job], 1, None, "test")
    assert not job.finished


def test_a_failure_stops_the_others(tmp_path):
    other = Line("b", SLEEPS, tmp_path)
    job = Line("a", "import time; time.sleep(1); raise SystemExit(1)", tmp_path)
    started = time.monotonic()
    with pytest.raises(UserError, match="The run a failed: it said nothing"):
        run_jobs([job, other], 2, None, "test")
    assert time.monotonic() - started < 30


def test_one_that_was_stopped_stops_the_others(tmp_path):
    jobs = [Line("a", "raise SystemExit(130)", tmp_path), Line("b", SLEEPS, tmp_path)]
    started = time.monotonic()
    assert not run_jobs([*jobs, Line("c", SLEEPS, tmp_path)], 2, None, "test")
    assert time.monotonic() - started < 30 and not (tmp_path / "c.log").exists()


def test_the_deadline_stops_all(tmp_path):
    jobs = [Line(name, SLEEPS, tmp_path) for name in "ab"]
    started = time.monotonic()
    assert not run_jobs(jobs, 2, started + 1, "test")
    assert time.monotonic() - started < 30 and not jobs[0].finished


def test_a_job_that_fails_while_it_is_stopped_is_told(tmp_path):
    jobs = [Line("a", FAILS_WHEN_STOPPED, tmp_path), Line("b", SLEEPS, tmp_path)]
    _soon(jobs, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, 2, None, "test")
    jobs[0].log.unlink()
    with pytest.raises(UserError, match=r"The disk is full\."):
        run_jobs(jobs[:1], 1, time.monotonic() + 3, "test")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_jobs_and_the_handler_is_restored(tmp_path, number):
    before = signal.getsignal(number)
    job = Line("a", SLEEPS, tmp_path)
    _soon([job], lambda: os.kill(os.getpid(), number))
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_jobs([job], 1, None, "test")
    assert time.monotonic() - started < 30 and signal.getsignal(number) is before
