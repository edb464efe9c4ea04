"""Jobs in processes: order, failures, stops; the jobs are lines of Python."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.core.process import interruptible
from recipes.jobs import Following, Job, run_jobs

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


def line(name, program, folder, finished=None):
    """A line of Python as a job; its name goes to ``finished``."""
    finish = (lambda: None) if finished is None else (lambda: finished.append(name))
    return Job(name, [sys.executable, "-c", program], folder / f"{name}.log", finish)


def _wait_until_begun(job):
    while not (job.log.exists() and "begun" in job.log.read_text()):
        time.sleep(0.02)


def _soon(jobs, do):
    def wait_and_do():
        for job in jobs:
            _wait_until_begun(job)
        do()

    threading.Thread(target=wait_and_do, daemon=True).start()


def test_jobs_finish_in_order_and_share_the_cores(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    say = "import os; print(os.environ['OMP_NUM_THREADS'])"
    finished = []
    jobs = [line(name, say, tmp_path, finished) for name in "abc"]
    run_jobs(jobs, 1, "test")
    cores = len(os.sched_getaffinity(0))
    assert finished == ["a", "b", "c"]
    assert {job.log.read_text().strip() for job in jobs} == {str(cores)}
    run_jobs(jobs[:1], 64, "test")
    assert jobs[0].log.read_text().split() == [str(cores), "1"]


PARENT = """
import sys
from pathlib import Path
from eagle_kit.cli.stage_commands import call
from recipes.jobs import Job
words = [sys.executable, "-c", sys.argv[2]]
if sys.argv[1] == "study":
    Job("a", words, Path(sys.argv[3]), print).start({}).wait()
else:
    call(words, print)
"""
CHILD = """
import signal, sys, time
def stop(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("begun", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the system of Linux")
@pytest.mark.parametrize("command", ["study", "make-draft"])
def test_a_job_saves_and_ends_when_its_parent_is_killed(tmp_path, command):
    """Otherwise it trains on, and the command that is given again fails, for its files are held."""
    log = tmp_path / "log"
    with log.open("w") as out:
        words = [sys.executable, "-c", PARENT, command, CHILD, str(log)]
        parent = subprocess.Popen(words, stdout=out)
    while "begun" not in log.read_text():
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    while "saved" not in log.read_text():  # for as long as a test may take
        time.sleep(0.02)


def test_what_follows_a_job_begins_while_others_still_run(tmp_path):
    """The second waits for what follows the first."""
    mark, finished = tmp_path / "mark", []
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(mark)!r}).exists(): time.sleep(0.05)"
    first = [line("a", "", tmp_path, finished), line("b", waits, tmp_path, finished)]
    behind = {"a": [line("c", f"open({str(mark)!r}, 'w')", tmp_path, finished)]}

    def take():
        return [job for name in finished for job in behind.pop(name, ())]

    run_jobs(first, 2, "test", 0, Following(take, 1))
    assert sorted(finished) == ["a", "b", "c"]


def test_a_failure_is_told_in_the_words_of_this_attempt(tmp_path):
    finished = []
    for program, words in (
        ("print('error: The first one.'); raise SystemExit(2)", r"The run a failed: The first one\."),
        ("print('prog: error: the second one'); raise SystemExit(2)", "The run a failed: the second one"),
        ("import os; os.kill(os.getpid(), 9)", "it was ended by SIGKILL"),
        ("raise SystemExit(1)", "it said nothing"),
    ):
        with pytest.raises(UserError, match=words):
            run_jobs([line("a", program, tmp_path, finished)], 1, "test")
    assert not finished


@pytest.mark.parametrize(("code", "error"), [(1, UserError), (130, KeyboardInterrupt)])
def test_one_that_fails_or_was_stopped_stops_the_others(tmp_path, code, error):
    first = line("a", f"import time; time.sleep(1); raise SystemExit({code})", tmp_path)
    started = time.monotonic()
    with pytest.raises(error):
        run_jobs([first, *(line(name, SLEEPS, tmp_path) for name in "bc")], 2, "test")
    assert time.monotonic() - started < 30 and not (tmp_path / "c.log").exists()


def test_the_deadline_stops_all(tmp_path):
    finished = []
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interruptible(1):
        run_jobs([line(name, SLEEPS, tmp_path, finished) for name in "ab"], 2, "test")
    assert time.monotonic() - started < 30 and not finished


def test_a_job_that_fails_while_it_is_stopped_is_told(tmp_path):
    jobs = [line("a", FAILS_WHEN_STOPPED, tmp_path), line("b", SLEEPS, tmp_path)]
    _soon(jobs, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(UserError, match=r"The disk is full\."), interruptible():
        run_jobs(jobs, 2, "test")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_jobs_and_the_handler_is_restored(tmp_path, number):
    before = signal.getsignal(number)
    job = line("a", SLEEPS, tmp_path)
    _soon([job], lambda: os.kill(os.getpid(), number))
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interruptible():
        run_jobs([job], 1, "test")
    assert time.monotonic() - started < 30 and signal.getsignal(number) is before
