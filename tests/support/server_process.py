"""Servers in processes of their own that cost no imports: they are forked from one that has made them."""

import os
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

from fork_server import FORK_SERVER


class ServerProcess:
    """``eagle-kit serve`` with ``words``, whose standard error goes to the file ``log``."""

    def __init__(self, *words: object, log: Path) -> None:
        self.log = log
        log.touch()
        self._process: BaseProcess = FORK_SERVER.Process(
            target=_serve, args=([str(word) for word in words], log), daemon=True
        )
        self._process.start()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    @property
    def said(self) -> str:
        """What it has written to standard error."""
        return self.log.read_text(encoding="utf-8")

    def terminate(self) -> None:
        """Send SIGTERM."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, and wait."""
        self._process.kill()
        self._process.join()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end -> its exit code; None where it has not ended in time."""
        self._process.join(timeout_s)
        return self._process.exitcode


def _serve(words: list[str], log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)

    from eagle_kit.cli import app

    sys.exit(app.main(["serve", *words]))
