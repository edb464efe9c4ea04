"""Processes that run checks, several at once: started again behind a death, ended behind a time limit."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import IO, Any, NamedTuple

from eagle_kit.core.errors import cut, in_seconds
from eagle_kit.core.switches import VARIABLE
from eagle_kit.doctor.checks import SHOW_STACK, Check, Result, TimeLimits

COMMAND = (sys.executable, "-m", "eagle_kit.doctor.check_worker")
"""Command of a process that runs checks."""
SECONDS_OF_STACK = 1.0
"""Time for a process that hangs to write its stacks."""
SECONDS_OF_END = 10.0
END_OF_OUTPUT = 6000
"""Characters of the standard error of a process that died that go into the file."""


class Lane(NamedTuple):
    """Checks for one process after another, in their order.

    Attributes:
        checks: what to run.
        disabled: names for ``EAGLE_KIT_DISABLE`` besides those that are already in it.
        given: argument of the checks.
    """

    checks: Sequence[Check]
    disabled: Sequence[str] = ()
    given: Mapping[str, Any] = {}


class CheckProcesses:
    """Runs lanes of checks, each in a process of its own, several at once.

    Args:
        command: command of a process; it speaks as :mod:`eagle_kit.doctor.check_worker` does.
        limits: seconds of a check.
        num_processes: most processes at once.
    """

    def __init__(
        self,
        command: Sequence[str] = COMMAND,
        limits: TimeLimits = TimeLimits(),  # noqa: B008
        num_processes: int = 1,
    ) -> None:
        self.command = command
        self.limits = limits
        self.num_processes = num_processes
        self._processes: set[_Process] = set()
        self._lock = threading.Lock()
        self._is_stopped = False

    def run(self, lanes: Iterable[Lane], on_result: Callable[[Result], None]) -> list[Result]:
        """Run lanes; return the results in the order of their ends.

        Args:
            on_result: called with each result, by one thread at a time.

        Raises:
            KeyboardInterrupt: behind Ctrl-C; all processes have been ended.
        """
        results: list[Result] = []

        # Once all processes are ended, their checks have no results.
        def finish(result: Result) -> None:
            with self._lock:
                if not self._is_stopped:
                    results.append(result)
                    on_result(result)

        # A thread for each lane. Short waits let Ctrl-C through.
        with ThreadPoolExecutor(self.num_processes) as pool:
            futures = [pool.submit(self._run_lane, lane, finish) for lane in lanes]
            try:
                while wait_for(futures, timeout=0.2).not_done:
                    pass
            except BaseException:
                self._stop()
                raise

        # Errors of the threads.
        for future in futures:
            future.result()
        return results

    def _stop(self) -> None:
        """End all processes, and start none any more."""
        with self._lock:
            self._is_stopped = True
            processes = list(self._processes)
        for process in processes:
            process.kill()

    def _run_lane(self, lane: Lane, finish: Callable[[Result], None]) -> None:
        """Run the checks of a lane. Where a process cannot start, the checks behind are not tried."""
        process: _Process | None = None
        failure: str | None = None
        for check in lane.checks:
            if self._is_stopped:
                break
            if failure is not None:
                finish(Result(check, "crashed", failure, 0.0))
                continue

            # Start a process, at first and behind one that has ended.
            if process is None:
                process = self._new_process([*lane.disabled, *check.disabled])
                failure = process.start(self.limits.start)
                if failure is not None:
                    finish(Result(check, "crashed", failure, 0.0, process.output()))
                    self._forget(process)
                    process = None
                    continue

            # Run the check.
            limit = self.limits.engine if check.is_long else self.limits.operation
            result = process.run(check, lane.given, limit)
            finish(result)
            if process.has_ended:
                self._forget(process)
                process = None
        if process is not None:
            self._forget(process)

    def _new_process(self, disabled: Sequence[str]) -> "_Process":
        """A process that is ended at once where all have been stopped meanwhile."""
        process = _Process(self.command, lane_environment(disabled))
        with self._lock:
            self._processes.add(process)
            is_stopped = self._is_stopped
        if is_stopped:
            process.kill()
        return process

    def _forget(self, process: "_Process") -> None:
        process.kill()
        with self._lock:
            self._processes.discard(process)


def lane_environment(disabled: Iterable[str]) -> dict[str, str]:
    """Environment of a process in which parts are disabled, besides those that the user has disabled."""
    given = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    names = list(dict.fromkeys([*given, *disabled]))
    return {**os.environ, VARIABLE: ",".join(names)}


class _Process:
    """A process that runs checks, and a thread that reads its answers.

    It has a session of its own, so that Ctrl-C ends it by :meth:`kill` only.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.has_ended = False
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        reader.start()

    def _read(self, output: IO[str]) -> None:
        """Pass on what the process writes, and None at its end."""
        for line in output:
            self._answers.put(line)
        self._answers.put(None)

    def start(self, limit_s: float) -> str | None:
        """Wait until the process is ready; return what went wrong, or None."""
        answer = self._next(limit_s)
        if isinstance(answer, dict):
            return None
        self.has_ended = True
        if answer == "hung":
            return f"a process with torch on the GPU was not ready within {in_seconds(limit_s)}"
        return f"a process with torch on the GPU could not start: {self._how_it_died()}"

    def run(self, check: Check, given: Mapping[str, Any], limit_s: float) -> Result:
        """Run a check; behind one that crashed, hung or raised, ``has_ended`` is true."""
        # Send the request.
        assert self._process.stdin is not None
        begun = time.perf_counter()
        try:
            self._process.stdin.write(json.dumps({"check": check.name, "given": given}) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has died, and its answer is the end of its output

        # Wait for the outcome.
        answer = self._next(limit_s)
        seconds = time.perf_counter() - begun
        if isinstance(answer, dict):
            self.has_ended = answer["raised"]
            state = "passed" if answer["passed"] else "failed"
            return Result(check, state, answer["detail"], answer["seconds"], answer["values"])  # type: ignore[arg-type]

        # There is none.
        self.has_ended = True
        if answer == "hung":
            self._show_stack()
            detail = f"no end within {in_seconds(limit_s)}; its process was ended"
            return Result(check, "hung", detail, seconds, self.output())
        return Result(check, "crashed", self._how_it_died(), seconds, self.output())

    def _next(self, limit_s: float) -> "dict[str, Any] | str":
        """The next answer; ``"hung"`` behind the time limit, and ``"died"`` where the process ended."""
        try:
            line = self._answers.get(timeout=limit_s)
        except queue.Empty:
            return "hung"
        if line is None:
            return "died"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _show_stack(self) -> None:
        """Let a process that hangs write its stacks, and end it."""
        try:
            self._process.send_signal(SHOW_STACK)
            self._process.wait(SECONDS_OF_STACK)
        except (OSError, subprocess.TimeoutExpired):
            pass
        self.kill()

    def _how_it_died(self) -> str:
        """One line of how the process ended."""
        try:
            code = self._process.wait(SECONDS_OF_END)
        except subprocess.TimeoutExpired:
            return "its process closed its output and did not end"
        if code < 0:
            return f"its process died by {signal.Signals(-code).name}"
        lines = self._end_of_errors().strip().splitlines()
        last = f": {cut(lines[-1])}" if lines else ""
        return f"its process ended with exit code {code}{last}"

    def output(self) -> dict[str, str]:
        """End of what the process wrote to its standard error."""
        return {"standard_error": self._end_of_errors()}

    def _end_of_errors(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - END_OF_OUTPUT))
        return self._errors.read().decode(errors="replace")

    def kill(self) -> None:
        """End the process at once. One that the driver does not let go is left behind."""
        self.has_ended = True
        self._process.kill()
        try:
            self._process.wait(SECONDS_OF_END)
        except subprocess.TimeoutExpired:
            return
