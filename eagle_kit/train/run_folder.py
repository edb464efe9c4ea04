"""The run folder: what is in it, when it may be used, and which settings a resumed run may change.

run.yaml        the resolved config, versions, commands
metrics.jsonl   one row per optimiser step
judge.jsonl     one row per judgement
step-N/         a servable draft, and trainer/ with what resume needs
best/           the servable draft with the longest decoded accept length
"""

import importlib.metadata
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.train.metrics import JsonLines, write_text_atomically

FREE_TO_CHANGE = (
    "output_dir",
    "data.cache_dir",
    "data.preview",
    "training.cache_hidden_states",
    "training.cpu_threads",
    "training.save_every",
    "training.keep_last",
    "training.log_every",
    "judge",
    "tracking",
)
"""Settings, or whole sections, that a resumed run may change."""

VERSIONED_PACKAGES = ("eagle-kit", "torch", "transformers", "accelerate", "numpy", "safetensors")


class RunFolder:
    """One run's folder. Nothing is created before :meth:`start` or :meth:`resume`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = JsonLines(self.path / "metrics.jsonl")
        self.judgements = JsonLines(self.path / "judge.jsonl")

    def check_unused(self) -> None:
        """Raise UserError when the folder holds something already."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UserError(
                f"The output folder {self.path} exists and is not empty.",
                "Add --resume to go on with that run, or set another one with output_dir=FOLDER.",
            )

    def check_resumable(self, config: TrainConfig) -> None:
        """Raise UserError unless the folder holds a run of this config."""
        if not (self.path / "run.yaml").exists():
            raise UserError(
                f"There is no run to resume in {self.path}: run.yaml is missing.",
                "Start without --resume, or set output_dir to the run's folder.",
            )
        before = flatten(self._read()["config"])
        now = flatten(config.model_dump(mode="json"))
        changed = [
            key for key in sorted(before | now) if before.get(key) != now.get(key) and not _is_free(key)
        ]
        if changed:
            what = ", ".join(f"{key} ({before.get(key)} -> {now.get(key)})" for key in changed)
            raise UserError(
                f"The run in {self.path} cannot be resumed with other settings: {what}.",
                "Restore them, or start a new run with output_dir=FOLDER.",
            )

    def start(self, config: TrainConfig, command: str) -> None:
        """Create the folder and write ``run.yaml``."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._write({"command": command, "versions": versions(), "config": config.model_dump(mode="json")})

    def resume(self, config: TrainConfig, command: str, step: int) -> None:
        """Note the resumed run in ``run.yaml`` and drop rows after ``step``."""
        run = self._read()
        run["config"] = config.model_dump(mode="json")
        run.setdefault("resumed", []).append({"step": step, "command": command, "versions": versions()})
        self._write(run)
        self.metrics.truncate(step)
        self.judgements.truncate(step)

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Complete checkpoints as (step, folder), oldest first."""
        found = []
        for folder in self.path.glob("step-*"):
            match = re.fullmatch(r"step-(\d+)", folder.name)
            if match and (folder / "trainer" / "state.json").exists():
                found.append((int(match[1]), folder))
        return sorted(found)

    def rotate(self, keep: int) -> None:
        """Delete all but the last ``keep`` checkpoints."""
        for _, folder in self.checkpoints()[:-keep]:
            shutil.rmtree(folder)

    def _read(self) -> dict[str, Any]:
        return yaml.safe_load((self.path / "run.yaml").read_text(encoding="utf-8"))

    def _write(self, run: dict[str, Any]) -> None:
        write_text_atomically(self.path / "run.yaml", yaml.safe_dump(run, sort_keys=False))


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def versions() -> dict[str, str]:
    """Python, platform and the packages that decide the figures."""
    found = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for package in VERSIONED_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE_TO_CHANGE)
