"""Commands of ours as processes of their own, a few at a time, stopped together."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from eagle_kit.core.errors import UserError
from eagle_kit.core.process import INTERRUPTED, num_cores

POLL_S = 0.5
STOPPED = (INTERRUPTED, -signal.SIGTERM, 128 + signal.SIGTERM)
TAIL_BYTES = 400


class Job(Protocol):
    """A command that can be stopped by SIGTERM and gone on with by being started again."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def log(self) -> Path:
        """The file that takes what it says."""
        ...

    def words(self) -> list[str]:
        """The command, made ready to be started."""
        ...

    def finish(self) -> None:
        """What follows a run that ended well."""
        ...


@contextmanager
def interruptible(deadline: float | None = None) -> Iterator[None]:
    """SIGTERM, a closed terminal and a deadline of ``time.monotonic`` come as Ctrl-C does, KeyboardInterrupt.

    The deadline needs SIGALRM, and signals need the main thread.
    """
    numbers = [signal.SIGTERM, signal.SIGHUP, signal.SIGALRM]
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    if deadline is not None:
        signal.setitimer(signal.ITIMER_REAL, max(deadline - time.monotonic(), 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    log_begin: int

    def said(self) -> str:
        """What it has written to its log since it was started."""
        with self.job.log.open("rb") as file:
            file.seek(self.log_begin)
            return file.read().decode("utf-8", errors="replace")

    def progress(self) -> str:
        """The newest line of its log, a redrawn one included."""
        with self.job.log.open("rb") as file:
            file.seek(max(self.log_begin, self.job.log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").replace("\r", "\n").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def failure(self, code: int) -> UserError:
        """Why it ended with ``code``, out of its own last words."""
        lines = self.said().splitlines()
        said = [line for line in lines if "error: " in line] or lines[-1:] or ["it said nothing"]
        why = said[-1].rpartition("error: ")[2]
        if code < 0:
            why = f"it was ended by {signal.Signals(-code).name}"
        return UserError(
            f"The run {self.job.name} failed: {why}",
            f"Read {self.job.log}, correct it, and give the command again.",
        )


def run_jobs(jobs: Sequence[Job], at_once: int, deadline: float | None, what: str, done: int = 0) -> bool:
    """Run the jobs in order, under a progress bar that shows the newest line of the first one that runs.

    Cores are shared out: each job gets ``OMP_NUM_THREADS``, unless it is set.

    Args:
        jobs: to do.
        at_once: how many run together.
        deadline: of ``time.monotonic``, when all are stopped.
        what: they do, in front of the bar.
        done: jobs that were done before, for the bar.

    Returns:
        False when they were stopped, by the deadline or because one of them was; each has saved then.

    Raises:
        UserError: one failed; the others were stopped.
    """
    from tqdm import tqdm

    waiting = list(jobs)
    running: list[_Running] = []
    stopped = False
    threads = {"OMP_NUM_THREADS": str(max(1, num_cores() // at_once))}
    with (
        interruptible(),
        tqdm(total=done + len(waiting), initial=done, unit="run", desc=what, dynamic_ncols=True) as bar,
    ):
        try:
            while running or (waiting and not stopped):
                if not stopped and deadline is not None and time.monotonic() >= deadline:
                    stopped = True
                    _interrupt(running)
                while waiting and len(running) < at_once and not stopped:
                    running.append(_start(waiting.pop(0), {**threads, **os.environ}))
                for one in list(running):
                    if (code := one.process.poll()) is None:
                        continue
                    running.remove(one)
                    if code == 0:
                        one.job.finish()
                        bar.update()
                    elif code in STOPPED:
                        stopped = True
                        _interrupt(running)
                    else:
                        raise one.failure(code)
                if running:
                    names = ", ".join(one.job.name for one in running)
                    bar.set_postfix_str(f"{names}: {running[0].progress()}", refresh=sys.stderr.isatty())
                    time.sleep(POLL_S)
        except BaseException:
            _interrupt(running)
            for one in running:
                one.process.wait()
            raise
    if stopped:
        print("Stopped; what was done is saved. Give the command again to go on.")
    return not stopped


def _start(job: Job, environment: dict[str, str]) -> _Running:
    """In a process group of its own, which Ctrl-C reaches through us only."""
    words = job.words()
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as file:
        begin = file.tell()
        process = subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
    return _Running(job, process, begin)


def _interrupt(running: Sequence[_Running]) -> None:
    for one in running:
        if one.process.poll() is None:
            one.process.terminate()  # a job saves first; in the background SIGINT may be ignored
