"""Commands of ours as stages of a longer one: printed, run as processes, and recorded when done."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import read_object, write_json_atomically
from eagle_kit.core.process import STOPPED, end_with_parent

KIT = "eagle-kit"
TORCHRUN = "torchrun"
MODULES = {KIT: "eagle_kit.cli", TORCHRUN: "torch.distributed.run"}
"""Programs of stages, and the modules that run them."""
COMMANDS = "commands.sh"
"""File with the commands that are done."""
NOTE_S = 10.0
"""Seconds between two notes of the time of a stage that is under way."""
SAVING_S = 3600
"""Seconds that ``torchrun`` waits for a training that saves."""


@dataclass(frozen=True)
class Stage:
    """One command of several.

    Attributes:
        name: for messages and the log.
        words: the command as it is printed; the first is one of :data:`MODULES`.
        result: called with the seconds that the command took; returns the entry of
            ``StageLog.done``.
    """

    name: str
    words: Sequence[str]
    result: Callable[[float], dict[str, Any]] = lambda seconds: {}


class StageLog:
    """JSON file with the options of a command, and with results and seconds of its stages.

    Attributes:
        choices: values that were chosen once for all stages, by name.
        done: results of the stages that are done, by name.
        spent_s: seconds of each stage, those of interrupted attempts included.
    """

    def __init__(self, path: Path, asked: dict[str, Any]) -> None:
        """Read the file where there is one.

        Raises:
            UserError: stages were done with options other than ``asked``.
        """
        self.path = path
        self._asked = asked
        found = read_object(path) if path.is_file() else {}
        before = found.get("asked")
        if before != asked and found.get("done"):
            raise UserError(
                f"{path.parent} was begun with other settings: {json.dumps(before)}.",
                "Give the same ones to go on, or another folder with --out.",
            )
        if before != asked:
            # The first stage was refused, and the user has corrected an option.
            found = {}
        self.choices: dict[str, Any] = found.get("choices", {})
        self.done: dict[str, dict[str, Any]] = found.get("done", {})
        self.spent_s: dict[str, float] = found.get("spent_s", {})

    @property
    def total_s(self) -> float:
        """Seconds of all stages."""
        return sum(self.spent_s.values())

    def save(self) -> None:
        """Write the file."""
        state = {
            "asked": self._asked,
            "choices": self.choices,
            "done": self.done,
            "spent_s": self.spent_s,
        }
        write_json_atomically(self.path, state, indent=1)


def run_stages(stages: Iterable[Stage], log: StageLog, num_stages: int) -> int:
    """Print and run the stages that are not done, one after the other.

    Args:
        stages: advanced only when the stage before is done, so a generator can read its result in ``log``.
        log: receives results and seconds. Commands that are done are appended to a file beside its
            own.
        num_stages: number of all stages, for messages.

    Returns:
        The exit code of the first that fails; 0 where all are done.

    Raises:
        KeyboardInterrupt: a command was interrupted, and has saved.
    """
    for stage in stages:
        if stage.name in log.done:
            continue

        # Print and run it.
        command = shlex.join(stage.words)
        print(f"== {len(log.done) + 1}/{num_stages} {stage.name}: {command}", flush=True)
        code = _run_timed(stage, log)
        if code in STOPPED:
            raise KeyboardInterrupt
        if code:
            print(f"{stage.name} failed; correct what it says; the same command goes on.", file=sys.stderr)
            return code

        # Remember that it is done.
        log.done[stage.name] = stage.result(log.spent_s[stage.name])
        log.save()
        with log.path.with_name(COMMANDS).open("a") as file:
            file.write(command + "\n")
    return 0


def _run_timed(stage: Stage, log: StageLog) -> int:
    """Run the command of a stage, and add its seconds to those of earlier attempts; returns its exit code."""
    program, *words = stage.words
    before = log.spent_s.get(stage.name, 0.0)
    started = time.monotonic()

    def note_time() -> None:
        log.spent_s[stage.name] = round(before + time.monotonic() - started, 1)
        log.save()

    try:
        return call([sys.executable, "-m", MODULES[program], *words], note_time)
    finally:
        note_time()


def call(words: Sequence[str], note: Callable[[], object]) -> int:
    """Run a command on this terminal, and return its exit code. When interrupted, wait until it has
    saved.

    Args:
        note: called every :data:`NOTE_S` seconds meanwhile, so that a kill loses the time of no
            more than those.
    """
    environment = {**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVING_S)}
    process = subprocess.Popen(words, start_new_session=True, env=environment, preexec_fn=end_with_parent())
    try:
        while True:
            try:
                return process.wait(NOTE_S)
            except subprocess.TimeoutExpired:
                note()
    except BaseException:
        process.terminate()  # In the background SIGINT may be ignored.
        process.wait()
        raise
