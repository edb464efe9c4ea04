"""A checkpoint: a servable draft, and what resume needs in ``trainer/``; written whole or not at all."""

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eagle_kit.checkpoints.draft import load_draft, save_draft
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import check_disk_space, replacing
from eagle_kit.models.heads.draft_head import DraftHead
from eagle_kit.train.run.ema import Ema
from eagle_kit.train.run.optimizer import optimizer_name

if TYPE_CHECKING:
    from eagle_kit.train.parallel.strategy import Strategy

ADAMW_COPIES = 2
"""Moments that AdamW keeps per weight."""
RAW_WEIGHTS = "weights.pt"
FREE_SPACE_AND_RESUME = "Free some space or move the run folder to another disk, then go on with --resume."


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
    head: DraftHead,
    optimizer_state: Mapping[str, Any],
    state: TrainState,
    metadata: Mapping[str, Any],
    ema: Ema | None = None,
) -> None:
    """Write ``folder`` (``step-N``): beside it first, then renamed. With ``ema``, which is applied to the
    head now, the draft is the average, and the weights that training goes on with lie in ``trainer/``.

    Args:
        head: whole.
        optimizer_state: whole, as the optimiser of a single process has it.

    Raises:
        UserError: the disk has no room; nothing is left behind.
    """
    weight_bytes = sum(p.numel() * 4 for p in head.parameters())
    copies = 1 + ADAMW_COPIES + (ema is not None)
    check_disk_space(folder.parent, copies * weight_bytes, FREE_SPACE_AND_RESUME)
    try:
        with replacing(folder) as partial:
            save_draft(head, partial, metadata=dict(metadata))
            trainer = partial / "trainer"
            trainer.mkdir()
            torch.save(dict(optimizer_state), trainer / "optimizer.pt")
            torch.save(_rng_state(), trainer / "rng.pt")
            if ema is not None:
                torch.save(ema.raw(), trainer / RAW_WEIGHTS)
            (trainer / "state.json").write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"The checkpoint {folder} could not be written: {error.strerror or error}.",
            FREE_SPACE_AND_RESUME,
        ) from error


def load_checkpoint(folder: Path, device: torch.device) -> tuple[DraftHead, dict[str, Any], TrainState]:
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
        _set_rng_state(rng)
    except Exception as error:  # unpickling raises whatever the broken bytes make it raise
        raise _damaged(folder, error) from error
    return head, optimizer_state, state


def restore_optimizer(folder: Path, strategy: "Strategy", optimizer_state: Mapping[str, Any]) -> None:
    """Give ``strategy``'s optimiser the state that :func:`load_checkpoint` read from ``folder``.

    Raises:
        UserError: it is not the state of such an optimiser.
    """
    try:
        groups = strategy.optimizer.param_groups
        found, wanted = optimizer_name(optimizer_state["param_groups"]), optimizer_name(groups)
        if found != wanted:
            raise UserError(
                f"The optimiser state in {folder / 'trainer'} is of {found}; training.optimizer is {wanted}.",
                f"Set training.optimizer={found}, or start a new run with output_dir=FOLDER.",
            )
        strategy.load_optimizer_state(optimizer_state)
    except UserError:
        raise
    except Exception as error:  # load_state_dict trusts what it is given
        raise _damaged(folder, error) from error


def restore_raw_weights(folder: Path, ema: Ema) -> None:
    """The head was read from ``folder`` with the average for weights, which ``ema`` began with: give it the
    weights that training goes on with.

    Raises:
        UserError: they are missing or damaged.
    """
    try:
        ema.restore(torch.load(folder / "trainer" / RAW_WEIGHTS, map_location="cpu", weights_only=True))
    except Exception as error:  # unpickling raises whatever the broken bytes make it raise
        raise _damaged(folder, error) from error


def _damaged(folder: Path, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return UserError(
        f"The trainer state in {folder / 'trainer'} cannot be read: {reason}.",
        f"Delete {folder} to resume from the checkpoint before it.",
    )


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
