"""Runs of a tiny target for the tests of the loop, here or in forked processes."""

import json
import os
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from tiny_run import make_config

from eagle_kit.train.__main__ import main


class Run:
    """A config in a folder of its own, and what a run of it left behind."""

    def __init__(self, folder: Path, config: Path) -> None:
        self.folder, self.config, self.output = folder, config, folder / "run"

    def __call__(self, *arguments: str) -> int:
        from accelerate.state import AcceleratorState

        try:
            return main([str(self.config), *arguments])
        finally:  # accelerate keeps the first run's precision for the whole process
            AcceleratorState._reset_state(reset_partial_state=True)

    @property
    def num_steps(self) -> int:
        """Rows of metrics.jsonl, which is there or not yet."""
        path = self.output / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def metrics(self, output: str = "run") -> list[dict[str, Any]]:
        """Rows of metrics.jsonl without what depends on the clock."""
        lines = (self.folder / output / "metrics.jsonl").read_text().splitlines()
        clocked = ("tokens_per_s", "seconds")
        return [{k: v for k, v in json.loads(line).items() if k not in clocked} for line in lines]


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """``make_run(training={...}, validation={...})`` -> a :class:`Run` that has not started."""
    monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path / "cache"))

    def make(**sections: Any) -> Run:
        return Run(tmp_path, make_config(tmp_path, **sections))

    return make


@contextmanager
def signalled_when(condition: Callable[[], bool], number: signal.Signals) -> Iterator[None]:
    """Context in which this process gets a signal once ``condition`` is true."""
    is_over = threading.Event()

    def watch() -> None:
        while not condition():
            if is_over.wait(0.002):
                return
        os.kill(os.getpid(), number)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


@pytest.fixture
def signalled() -> Callable[..., AbstractContextManager[None]]:
    """:func:`signalled_when`."""
    return signalled_when


SESSION_RUNS: dict[str, dict[str, Any]] = {
    "two steps": {"training": {"save_every": 4}},
    "judged": {"validation": {"every": 2, "max_tokens": 8}, "training": {"save_every": 2, "keep_last": 2}},
}
"""Sections of the configs of runs that are made once a session; the second makes six steps."""


@pytest.fixture(scope="session")
def session_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """``session_run(name)`` -> a run of :data:`SESSION_RUNS` that has ended. It is not to be changed."""

    @cache
    def make(name: str) -> Run:
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        run = Run(folder, make_config(folder, **SESSION_RUNS[name]))
        assert run("--max-steps", "2" if name == "two steps" else "6") == 0
        return run

    return make


@pytest.fixture
def copy_run(session_run: Callable[[str], Run], tmp_path: Path) -> Callable[[str], Run]:
    """``copy_run(name)`` -> a copy of :func:`session_run`, with the target and the data of the original."""

    def copy(name: str) -> Run:
        original = session_run(name)
        shutil.copytree(original.output, tmp_path / "run")
        config = yaml.safe_load(original.config.read_text())
        config["output_dir"] = str(tmp_path / "run")
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        return Run(tmp_path, path)

    return copy


class Child:
    """A forked process that runs ``work`` and ends with 0, or with 1 and a traceback where that fails. It has
    all that is imported here, and one thread."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            torch.set_num_threads(1)
            code = 1
            try:
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    @property
    def has_ended(self) -> bool:
        """True when it ended, and :meth:`wait` returns at once."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def kill(self) -> None:
        """End it as ``kill -9`` does, if it has not ended."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit code, or minus the number of the signal that ended it."""
        if self.status is None:
            _, status = os.waitpid(self.pid, 0)
            self.status = os.waitstatus_to_exitcode(status)
        return self.status


class Moment(NamedTuple):
    """When a process is to be killed: before or after ``owner.name`` is called for the n-th time."""

    owner: Any
    name: str
    times: int
    is_after: bool = False

    def arm(self) -> None:
        """Let this process be killed then."""
        real = getattr(self.owner, self.name)
        calls = [0]

        def patched(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == self.times and not self.is_after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if calls[0] == self.times:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(self.owner, self.name, patched)


@pytest.fixture
def run_until_killed(fork: Callable[..., Child]) -> Callable[..., None]:
    """``run_until_killed(work, owner, name, times, is_after)``: run ``work`` in a forked process, which must
    be killed at this moment, see :class:`Moment`."""

    def run(work: Callable[[], object], *moment: Any) -> None:
        def armed() -> None:
            Moment(*moment).arm()
            work()

        assert fork(armed).wait() == -signal.SIGKILL

    return run


@pytest.fixture
def fork() -> Iterator[Callable[[Callable[[], object]], Child]]:
    """``fork(work)`` -> a :class:`Child`, which is killed when the test ends."""
    import accelerate  # noqa: F401

    from eagle_kit.train.run import loop  # noqa: F401  # here, or every child imports them for itself

    children: list[Child] = []

    def start(work: Callable[[], object]) -> Child:
        child = Child(work)
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
