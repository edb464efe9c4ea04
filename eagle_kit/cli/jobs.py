"""Commands of ours as processes of their own, a few at a time, stopped together."""

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from eagle_kit.core.errors import UserError

POLL_S = 0.5
INTERRUPTED = 130


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


def run_jobs(jobs: Sequence[Job], at_once: int, deadline: float | None, what: str, done: int = 0) -> bool:
    """Run the jobs in order, under a progress bar.

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
    running: list[tuple[Job, subprocess.Popen[bytes]]] = []
    stopped = False
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # the jobs must not outlive this
    with tqdm(total=done + len(waiting), initial=done, unit="run", desc=what) as bar:
        try:
            while waiting or running:
                if deadline is not None and time.monotonic() >= deadline and not stopped:
                    stopped = True
                    _interrupt(running)
                while waiting and len(running) < at_once and not stopped:
                    job = waiting.pop(0)
                    running.append((job, _start(job)))
                    bar.set_postfix_str(", ".join(one.name for one, _ in running))
                for job, process in list(running):
                    if (code := process.poll()) is None:
                        continue
                    running.remove((job, process))
                    if code == 0:
                        job.finish()
                        bar.update()
                    elif code == INTERRUPTED or stopped:  # before its first step a job knows no good end
                        stopped = True
                    else:
                        raise UserError(
                            f"The run {job.name} failed: {_last_words(job.log)}",
                            f"Read {job.log}, correct it, and give the command again.",
                        )
                if stopped and not running:
                    break
                time.sleep(POLL_S)
        except BaseException:
            _interrupt(running)
            for _, process in running:
                process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    if stopped:
        print("Stopped; every run has saved. Give the command again to go on.")
    return not stopped


def _start(job: Job) -> subprocess.Popen[bytes]:
    """In a process group of its own, which Ctrl-C reaches through us only."""
    words = job.words()
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as file:
        return subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def _interrupt(running: Sequence[tuple[Job, subprocess.Popen[bytes]]]) -> None:
    for _, process in running:
        if process.poll() is None:
            process.terminate()  # a job saves first; in the background SIGINT may be ignored


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line for line in lines if line.startswith("error")] or lines[-1:] or ["it said nothing"]
    return said[-1].removeprefix("error: ")
