"""Run folder: its files, when it may be used, and the settings that a resumed run may change.

run.yaml        resolved config, versions, commands
metrics.jsonl   one row per optimiser step
judge.jsonl     one row per validation
step-N/         a checkpoint: a draft that can be served, and the state of training in trainer/
best/           the draft with the longest decoded accept length; it can be served
.lock           exists while a trainer writes here
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
"""Settings, or whole sections, that a resumed run may change. After the first validation, three settings of
``judge`` are fixed, see :func:`measure`. Other packed sequences are refused whatever the settings are."""
LOCK = ".lock"
HALF_BEGUN = ".run.yaml.*.partial"
"""Pattern of a ``run.yaml`` whose writing was interrupted."""
ANOTHER_RUN = "Restore it, or start a new run with output_dir=FOLDER."


class RunFolder:
    """The folder of a run. No file of it is written before :meth:`start` or :meth:`resume`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = JsonLines(self.path / "metrics.jsonl")
        self.judgements = JsonLines(self.path / "judge.jsonl")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Context in which this process is the only trainer that uses the folder.

        Raises:
            UserError: another trainer uses it, or it cannot be written.
        """
        check_writable(
            self.path, "Give yourself the right to write there, or set another one with output_dir=FOLDER."
        )
        with sole_writer(self.path, self.path / LOCK):
            yield

    @property
    def has_run(self) -> bool:
        """True if a run was started here; one that was killed early has no checkpoint yet."""
        return (self.path / "run.yaml").exists()

    def check_unused(self) -> None:
        """Raise UserError if the folder holds other files."""
        if self._is_used():
            raise UserError(
                f"The output folder {self.path} exists and is not empty.",
                "Add --resume to go on with that run, or set another one with output_dir=FOLDER.",
            )

    def check_resumable(self, config: TrainConfig) -> None:
        """Raise UserError unless the folder holds a run of this config, or is free for a new one."""
        # No run: it starts from step 0, in an empty folder.
        if not self.has_run:
            if self._is_used():
                raise UserError(
                    f"There is no run to resume in {self.path}, but other files: run.yaml is missing.",
                    "Set output_dir to the run's folder, or to a new one.",
                )
            return

        # Settings that differ. A former default is null now and means the same.
        before = _with_defaults(self._read()["config"])
        now = config.model_dump(mode="json")
        changed = {}
        for key, pair in differences(before, now).items():
            if pair != (FORMER_DEFAULTS.get(key), None):
                changed[key] = pair

        # Accept lengths must stay comparable with those that are there.
        if self.judgements.rows():
            old = measure(flatten(before))
            new = measure(flatten(now))
            for key in old:
                if old[key] != new[key]:
                    changed[key] = (old[key], new[key])
        if changed:
            raise UserError(
                f"The run in {self.path} cannot be resumed with other settings: {list_changes(changed)}.",
                "Restore them, or start a new run with output_dir=FOLDER.",
            )

    def start(self, config: TrainConfig, command: str) -> None:
        """Create the folder and write ``run.yaml``. Raises UserError if it cannot be written."""
        run = {"command": command, "versions": describe_versions(), "config": config.model_dump(mode="json")}
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self._tidy()
            self._write(run)

    def discard(self) -> None:
        """Remove the folder after :meth:`start`, because the run could not begin."""
        shutil.rmtree(self.path, ignore_errors=True)

    def resume(self, config: TrainConfig, command: str, step: int) -> None:
        """Add the session to ``run.yaml``, and remove rows after ``step`` and half-written files.

        Raises:
            UserError: ``run.yaml`` cannot be read, or the folder cannot be written.
        """
        run = self._read()
        run["config"] = config.model_dump(mode="json")
        session = {"step": step, "command": command, "versions": describe_versions()}
        run.setdefault("resumed", []).append(session)
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
            # Renamed first, so that an interrupted deletion leaves no incomplete checkpoint.
            renamed = folder.with_name(f".{folder.name}.partial.old")
            shutil.rmtree(renamed, ignore_errors=True)
            folder.rename(renamed)
            shutil.rmtree(renamed)

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
        """Remove half-written files, and restore a ``best/`` that was renamed to make room for a new one."""
        best = self.path / "best"
        for old in self.path.glob(".best.*.old"):
            if not best.exists():
                old.rename(best)
        for pattern in (".best.*", ".step-*.partial*", "..step-*.partial"):
            for leftover in self.path.glob(pattern):
                shutil.rmtree(leftover, ignore_errors=True)
        for leftover in self.path.glob(HALF_BEGUN):
            leftover.unlink()

    def _is_used(self) -> bool:
        """True if the folder has other files than those of a run that was killed before ``run.yaml``."""
        if not self.path.is_dir():
            return self.path.exists()
        return any(path.name != LOCK and not path.match(HALF_BEGUN) for path in self.path.iterdir())

    def _read(self) -> dict[str, Any]:
        """Contents of ``run.yaml``. Raises UserError if it cannot be read."""
        path = self.path / "run.yaml"
        try:
            run = read_mapping(path)
        except UserError as error:
            raise UserError(error.cause, ANOTHER_RUN) from None
        if not isinstance(run.get("config"), dict):
            raise UserError(f"{path} does not hold the config of a run.", ANOTHER_RUN)
        return run

    def _write(self, run: dict[str, Any]) -> None:
        """Write ``run.yaml``."""
        write_text_atomically(self.path / "run.yaml", dump_mapping(run))


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings of two nested configs that differ, as (old, new) by flattened key.

    Settings of :data:`FREE_TO_CHANGE` are left out.
    """
    old = flatten(before)
    new = flatten(now)
    changed = {}
    for key in sorted(old | new):
        pair = (old.get(key), new.get(key))
        if pair[0] != pair[1] and not _is_free(key):
            changed[key] = pair
    return changed


def list_changes(changed: dict[str, tuple[Any, Any]]) -> str:
    """Changed settings as text."""
    return ", ".join(f"{key} ({old} -> {new})" for key, (old, new) in changed.items())


def measure(flat: dict[str, Any]) -> dict[str, Any]:
    """Settings of validation that decide accept lengths; only runs with equal ones can be compared.

    Args:
        flat: flattened config.
    """
    first_shape = flat.get("judge.shapes")
    if isinstance(first_shape, list) and first_shape:
        first_shape = first_shape[0]
    return {
        "the first of judge.shapes": first_shape,
        "judge.prompts": flat.get("judge.prompts"),
        "judge.max_tokens": flat.get("judge.max_tokens"),
    }


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of settings that did not exist when ``config`` was written.

    Returns:
        The config; unchanged if this version does not read it.
    """
    try:
        return TrainConfig.model_validate(_of_one_kind(config)).model_dump(mode="json")
    except (ValidationError, UserError):
        return config


def _of_one_kind(config: dict[str, Any]) -> dict[str, Any]:
    """Remove the keys of other kinds of heads, which earlier runs wrote with their defaults."""
    head = config.get("head")
    training = config.get("training")
    if not isinstance(head, dict) or not isinstance(training, dict) or head.get("kind") not in HEADS:
        return config
    schema = HEADS[head["kind"]]
    training_fields = schema.training_schema.model_fields
    own = dict(config)
    own["head"] = {key: value for key, value in head.items() if key in schema.model_fields}
    own["training"] = {key: value for key, value in training.items() if key in training_fields}
    return own


def _is_free(key: str) -> bool:
    """True if a resumed run may change the setting ``key``."""
    return any(key == free or key.startswith(f"{free}.") for free in FREE_TO_CHANGE)
