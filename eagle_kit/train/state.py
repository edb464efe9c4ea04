"""A checkpoint: a servable draft, and what resume needs in ``trainer/``; written whole or not at all."""

import json
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle_kit.checkpoints.draft import load_draft, save_draft
from eagle_kit.core.errors import UserError
from eagle_kit.models.eagle3 import Eagle3Head

ADAMW_COPIES = 2
"""Moments that AdamW keeps per weight."""


@dataclass
class TrainState:
    """Counters of a run; everything else about a step follows from ``step`` and the config.

    Attributes:
        step: finished optimiser steps.
        tokens: tokens of the rows seen, over all processes.
        supervised_tokens: step-0 rows with loss, over all processes.
        seconds: time spent in optimiser steps, over all sessions of the run.
        best_accept_length: longest decoded accept length so far, of the judge's first shape.
        best_step: the step it belongs to; -1 before the first judgement.
        num_worse: judgements since.
    """

    step: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    seconds: float = 0.0
    best_accept_length: float = 0.0
    best_step: int = -1
    num_worse: int = 0


def save_checkpoint(
    folder: Path,
    head: Eagle3Head,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    metadata: Mapping[str, Any],
) -> None:
    """Write ``folder`` (``step-N``): beside it first, then renamed.

    Raises:
        UserError: the disk has no room; nothing is left behind.
    """
    weight_bytes = sum(p.numel() * 4 for p in head.parameters())
    check_disk_space(folder.parent, (1 + ADAMW_COPIES) * weight_bytes)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        save_draft(head, partial, metadata=dict(metadata))
        trainer = partial / "trainer"
        trainer.mkdir()
        torch.save(optimizer.state_dict(), trainer / "optimizer.pt")
        torch.save(_rng_state(), trainer / "rng.pt")
        (trainer / "state.json").write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
        _sync_folder(trainer)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"The checkpoint {folder} could not be written: {error.strerror or error}.",
            "Free some space or set output_dir to another disk, then go on with --resume.",
        ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load_checkpoint(folder: Path, device: torch.device) -> tuple[Eagle3Head, dict[str, Any], TrainState]:
    """Read a checkpoint back: the head in fp32, the optimiser's state and the counters; sets the RNG states.

    Raises:
        UserError: a file of the checkpoint is missing or damaged.
    """
    head = load_draft(folder, dtype=torch.float32, device=str(device))
    trainer = folder / "trainer"
    try:
        optimizer_state = torch.load(trainer / "optimizer.pt", map_location="cpu", weights_only=True)
        rng = torch.load(trainer / "rng.pt", map_location="cpu", weights_only=True)
        state = TrainState(**json.loads((trainer / "state.json").read_text(encoding="utf-8")))
    except (OSError, RuntimeError, ValueError, TypeError, EOFError) as error:
        raise UserError(
            f"The trainer state in {trainer} cannot be read: {str(error).splitlines()[0]}.",
            f"Delete {folder} to resume from the checkpoint before it.",
        ) from error
    _set_rng_state(rng)
    return head, optimizer_state, state


def save_best(folder: Path, head: Eagle3Head, metadata: Mapping[str, Any]) -> None:
    """Replace ``folder`` (``best``) by a servable draft; a reader sees the old one or the new one."""
    partial, old = folder.with_name(".best.partial"), folder.with_name(".best.old")
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    save_draft(head, partial, metadata=dict(metadata))
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def check_disk_space(folder: Path, num_bytes: int) -> None:
    """Raise UserError when the disk of ``folder`` cannot take ``num_bytes``."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise UserError(
            f"A checkpoint needs {num_bytes / 1e6:.0f} MB, but {free / 1e6:.0f} MB are free at {folder}.",
            "Free some space or set output_dir to another disk, then go on with --resume.",
        )


def _sync_folder(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _rng_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ),
        "python": (version, list(words), gauss),
    }


def _set_rng_state(rng: dict[str, Any]) -> None:
    torch.set_rng_state(rng["torch"])
    if rng["cuda"] and len(rng["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(rng["cuda"])
    keys, position, has_gauss, cached = rng["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, words, gauss = rng["python"]
    random.setstate((version, tuple(words), gauss))
