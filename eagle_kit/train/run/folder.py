"""Run folder: its files, when it may be used, and the settings that a resumed run may change.

run.yaml        the resolved config, versions, commands
metrics.jsonl   one row per optimiser step
judge.jsonl     one row per judgement
step-N/         a servable draft, and trainer/ with what resume needs
best/           the servable draft with the longest decoded accept length
.lock           while a trainer writes here
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eagle_kit.config.drafts import HEADS
from eagle_kit.config.loading.yaml_file import dump_mapping, read_mapping
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import check_writable, sole_writer, write_text_atomically, writing_remedy
from eagle_kit.report.environment import describe_versions
from eagle_kit.train.run.metrics import JsonLines

FORMER_DEFAULTS = {"head.draft_vocab_size": 8192}
"""Settings of earlier versions that are null now and mean the same."""
FREE_TO_CHANGE = (
    "output_dir",
    "data.cache_dir",
    "data.max_broken_lines",
    "data.num_workers",
    "data.decontaminate",
    "data.store",
    "data.preview",
    "training.cache_hidden_states",
    "training.cpu_threads",
    "training.peer_timeout_s",
    "training.gradient_checkpointing",
    "training.target_placement",
    "training.save_every",
    "training.keep_last",
    "training.log_every",
    "judge",
    "tracking",
)
"""Settings, or whole sections, that a resumed run may change; for the judge's see :func:`measure`. Other rows
than those that were learned from are refused all the same."""
LOCK = ".lock"
HALF_BEGUN = ".run.yaml.*.partial"
ANOTHER_RUN = "Restore it, or start a new run with output_dir=FOLDER."


class RunFolder:
    """One run's folder. Nothing that stays is created before :meth:`start` or :meth:`resume`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = JsonLines(self.path / "metrics.jsonl")
        self.judgements = JsonLines(self.path / "judge.jsonl")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Context of the only trainer here. Raises UserError for a second one, or a read-only folder."""
        check_writable(
            self.path, "Give yourself the right to write there, or set another one with output_dir=FOLDER."
        )
        with sole_writer(self.path, self.path / LOCK):
            yield

    @property
    def has_run(self) -> bool:
        """True when a run was begun here; one that was killed early has no checkpoint yet."""
        return (self.path / "run.yaml").exists()

    def check_unused(self) -> None:
        """Raise UserError when the folder holds something already."""
        if self._is_used():
            raise UserError(
                f"The output folder {self.path} exists and is not empty.",
                "Add --resume to go on with that run, or set another one with output_dir=FOLDER.",
            )

    def check_resumable(self, config: TrainConfig) -> None:
        """Raise UserError unless the folder holds a run of this config, or can take one that begins."""
        if not self.has_run:
            if self._is_used():
                raise UserError(
                    f"There is no run to resume in {self.path}, but other files: run.yaml is missing.",
                    "Set output_dir to the run's folder, or to a new one.",
                )
            return
        before, now = _with_defaults(self._read()["config"]), config.model_dump(mode="json")
        changed = differences(before, now)
        changed = {key: pair for key, pair in changed.items() if pair != (FORMER_DEFAULTS.get(key), None)}
        if self.judgements.rows():
            old, new = measure(flatten(before)), measure(flatten(now))
            changed |= {key: (old[key], new[key]) for key in old if old[key] != new[key]}
        if changed:
            raise UserError(
                f"The run in {self.path} cannot be resumed with other settings: {list_changes(changed)}.",
                "Restore them, or start a new run with output_dir=FOLDER.",
            )

    def start(self, config: TrainConfig, command: str) -> None:
        """Create the folder and write ``run.yaml``. Raises UserError when that is impossible."""
        run = {"command": command, "versions": describe_versions(), "config": config.model_dump(mode="json")}
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self._tidy()
            self._write(run)

    def discard(self) -> None:
        """Take a :meth:`start` back: the run could not begin."""
        shutil.rmtree(self.path, ignore_errors=True)

    def resume(self, config: TrainConfig, command: str, step: int) -> None:
        """Note the resumed run in ``run.yaml``, drop rows after ``step`` and whatever is half-written."""
        run = self._read()
        run["config"] = config.model_dump(mode="json")
        run.setdefault("resumed", []).append(
            {"step": step, "command": command, "versions": describe_versions()}
        )
        with self._writing():
            self._tidy()
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
            going = folder.with_name(f".{folder.name}.partial.old")  # killed meanwhile, it is half a one
            shutil.rmtree(going, ignore_errors=True)
            folder.rename(going)
            shutil.rmtree(going)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an OSError inside into a UserError."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"The output folder {self.path} cannot be written: {error.strerror or error}.",
                writing_remedy(error, "set another one with output_dir=FOLDER"),
            ) from error

    def _tidy(self) -> None:
        """Remove what is half-written; put back a ``best/`` that was set aside for a new one."""
        for old in self.path.glob(".best.*.old"):
            if not (self.path / "best").exists():
                old.rename(self.path / "best")
        for pattern in (".best.*", ".step-*.partial*", "..step-*.partial"):
            for leftover in self.path.glob(pattern):
                shutil.rmtree(leftover, ignore_errors=True)
        for leftover in self.path.glob(HALF_BEGUN):
            leftover.unlink()

    def _is_used(self) -> bool:
        """True when there is more than a run leaves that was killed before it wrote ``run.yaml``."""
        if not self.path.is_dir():
            return self.path.exists()
        return any(not (path.name == LOCK or path.match(HALF_BEGUN)) for path in self.path.iterdir())

    def _read(self) -> dict[str, Any]:
        path = self.path / "run.yaml"
        try:
            run = read_mapping(path)
        except UserError as error:
            raise UserError(error.cause, ANOTHER_RUN) from None
        if not isinstance(run.get("config"), dict):
            raise UserError(f"{path} does not hold the config of a run.", ANOTHER_RUN)
        return run

    def _write(self, run: dict[str, Any]) -> None:
        write_text_atomically(self.path / "run.yaml", dump_mapping(run))


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings of nested configs that differ, without those that a run may change, as (old, new)."""
    old, new = flatten(before), flatten(now)
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old | new)
        if old.get(key) != new.get(key) and not _is_free(key)
    }


def list_changes(changed: dict[str, tuple[Any, Any]]) -> str:
    """Changed settings as text."""
    return ", ".join(f"{key} ({old} -> {new})" for key, (old, new) in changed.items())


def measure(flat: dict[str, Any]) -> dict[str, Any]:
    """Settings of the judge, of a flattened config, that must be equal for accept lengths to compare."""
    shapes = flat.get("judge.shapes")
    return {
        "the first of judge.shapes": shapes[0] if isinstance(shapes, list) and shapes else shapes,
        "judge.prompts": flat.get("judge.prompts"),
        "judge.max_tokens": flat.get("judge.max_tokens"),
    }


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """A config as it was written, with settings that did not exist then: runs go on as they began."""
    try:
        return TrainConfig.model_validate(_of_one_kind(config)).model_dump(mode="json")
    except (ValidationError, UserError):  # of a version whose settings were others: compared as it is
        return config


def _of_one_kind(config: dict[str, Any]) -> dict[str, Any]:
    """A config without keys of other kinds of heads than its own, which runs once wrote at their defaults."""
    head = config.get("head")
    training = config.get("training")
    if not isinstance(head, dict) or not isinstance(training, dict) or head.get("kind") not in HEADS:
        return config
    schema = HEADS[head["kind"]]
    return {
        **config,
        "head": {key: head[key] for key in head if key in schema.model_fields},
        "training": {key: training[key] for key in training if key in schema.training_schema.model_fields},
    }


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE_TO_CHANGE)
