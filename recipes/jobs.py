"""Commands of ours as processes of their own, a few at a time, stopped together."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_kit.core.errors import UserError
from eagle_kit.core.process import STOPPED, end_with_parent, num_cores

POLL_S = 0.5


@dataclass
class Job:
    """A command that saves when SIGTERM stops it, and goes on when it is started again.

    Attributes:
        name: for messages, unique.
        words: the command.
        log: file that takes its output, start after start.
        finish: called when it ended well.
    """

    name: str
    words: Sequence[str]
    log: Path
    finish: Callable[[], object]
    begin: int = 0
    """Size of the log when it was started last."""

    def start(self, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start it in a process group of its own, which Ctrl-C reaches through us only."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as file:
            self.begin = file.tell()
            return subprocess.Popen(
                self.words,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
                preexec_fn=end_with_parent(),
            )

    def failure(self, code: int) -> UserError:
        """The error of an exit ``code``, in the last words of its log."""
        lines = self.log.read_bytes()[self.begin :].decode(errors="replace").splitlines()
        said = [line for line in lines if "error: " in line] or lines[-1:] or ["it said nothing"]
        why = said[-1].rpartition("error: ")[2]
        if code < 0:
            why = f"it was ended by {signal.Signals(-code).name}"
        return UserError(
            f"The run {self.name} failed: {why}",
            f"Read {self.log}, correct it, and give the command again.",
        )


@dataclass
class Following:
    """Jobs that can begin only when others have ended: ``take`` hands over those that can now, once each, and
    ``count`` is how many there will be."""

    take: Callable[[], Sequence[Job]] = tuple
    count: int = 0


def run_jobs(
    jobs: Sequence[Job], at_once: int, what: str, num_done: int = 0, following: Following | None = None
) -> None:
    """Run jobs in their order under a progress bar, ``at_once`` together; when one ends otherwise than well,
    or an exception comes, the others are stopped and waited for.

    Cores are shared out: each job gets ``OMP_NUM_THREADS``, unless it is set.

    Args:
        what: title of the bar.
        num_done: jobs that were done before, for the bar.
        following: jobs behind these.

    Raises:
        UserError: one failed.
        KeyboardInterrupt: one was stopped.
    """
    from tqdm import tqdm

    following = following or Following()
    waiting, total = list(jobs), num_done + len(jobs) + following.count
    running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}
    environment = {"OMP_NUM_THREADS": str(max(1, num_cores() // at_once)), **os.environ}
    with tqdm(total=total, initial=num_done, unit="run", desc=what, dynamic_ncols=True) as bar:
        try:
            waiting += following.take()
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.pop(0)
                    running[job.name] = job, job.start(environment)
                bar.set_postfix_str(", ".join(running), refresh=sys.stderr.isatty())
                time.sleep(POLL_S)
                for job, process in list(running.values()):
                    if process.poll() is None:
                        continue
                    del running[job.name]
                    if process.returncode in STOPPED:
                        raise KeyboardInterrupt
                    if process.returncode:
                        raise job.failure(process.returncode)
                    job.finish()
                    bar.update()
                    waiting += following.take()
        finally:
            for _, process in running.values():
                process.terminate()  # a job saves first; in the background SIGINT may be ignored
            for job, process in running.values():
                if process.wait() not in (0, *STOPPED):
                    raise job.failure(process.returncode)
