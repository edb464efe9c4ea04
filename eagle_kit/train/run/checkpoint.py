"""Checkpoints: a servable draft, and the state of training in ``trainer/``; written whole or not at all."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from eagle_kit.core.errors import UserError, first_line
from eagle_kit.core.files import check_disk_space, replacing, writing_remedy
from eagle_kit.drafts.files.draft import load_draft, save_draft
from eagle_kit.drafts.files.torch_file import save_torch_file
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.train.optim.ema import Ema
from eagle_kit.train.optim.optimizer import optimizer_name

if TYPE_CHECKING:
    from eagle_kit.train.optim.strategy import Strategy

ADAMW_COPIES = 2
"""Moments of AdamW for each weight."""
RAW_WEIGHTS = "weights.pt"
"""File of the trained weights, beside a draft that has their average."""
MOVE_AND_RESUME = "move the run folder to another disk, then go on with --resume"
FREE_SPACE_AND_RESUME = f"Free some space, or {MOVE_AND_RESUME}."


@dataclass
class TrainState:
    """Counters of a run. Everything else about a step follows from ``step`` and the config.

    Attributes:
        step: finished optimiser steps.
        tokens: tokens of the packed sequences, over all processes.
        supervised_tokens: supervised positions at TTT step 0, over all processes.
        seconds: time of the optimiser steps, over all sessions of the run.
        best_accept_length: longest decoded accept length so far, of the first shape of ``judge.shapes``.
        best_step: optimiser step of that validation; -1 before the first one.
        num_worse: validations since the best one.
        num_skipped: optimiser steps whose loss or gradient was not finite; they changed no weight.
        num_skipped_now: consecutive skipped steps up to now.
        peak_memory_gb: peak memory of the main process over all sessions, as of the last checkpoint; 0 if
            the system does not report it.
    """

    step: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    seconds: float = 0.0
    best_accept_length: float = 0.0
    best_step: int = -1
    num_worse: int = 0
    num_skipped: int = 0
    num_skipped_now: int = 0
    peak_memory_gb: float = 0.0


def save_checkpoint(
    folder: Path,
    head: DraftHead,
    optimizer_state: Mapping[str, Any],
    state: TrainState,
    metadata: Mapping[str, Any],
    ema: Ema | None = None,
) -> None:
    """Write a checkpoint, into a temporary folder that is renamed when it is complete.

    With ``ema``, the draft has the average of the weights, and the trained weights are in ``trainer/``.

    Args:
        folder: the checkpoint, ``step-N``.
        head: head with all weights; with ``ema``, the average is applied to it.
        optimizer_state: unsharded state of the optimiser, as that of a single process.
        state: counters.
        metadata: contents of ``eagle_kit.json``.

    Raises:
        UserError: the disk is too small, or the folder cannot be written; no file is left behind.
    """
    # Room for weights, moments and the average, in fp32.
    weight_bytes = sum(p.numel() * 4 for p in head.parameters())
    num_copies = 1 + ADAMW_COPIES
    if ema is not None:
        num_copies += 1
    check_disk_space(folder.parent, num_copies * weight_bytes, FREE_SPACE_AND_RESUME)

    # The draft, and the state of training.
    try:
        with replacing(folder) as partial:
            save_draft(head, partial, metadata=dict(metadata))
            trainer = partial / "trainer"
            trainer.mkdir()
            save_torch_file(dict(optimizer_state), trainer / "optimizer.pt")
            if ema is not None:
                save_torch_file(ema.raw(), trainer / RAW_WEIGHTS)
            counters = json.dumps(asdict(state), indent=1)
            (trainer / "state.json").write_text(counters, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"The checkpoint {folder} could not be written: {error.strerror or error}.",
            writing_remedy(error, MOVE_AND_RESUME),
        ) from error


class Checkpoint(NamedTuple):
    """A checkpoint in memory.

    Attributes:
        folder: its folder.
        head: the draft, in fp32; it has the average of the weights if the run makes one.
        optimizer_state: unsharded state of the optimiser.
        state: counters.
        raw_weights: trained weights, if the draft has their average; else None.
    """

    folder: Path
    head: DraftHead
    optimizer_state: dict[str, Any]
    state: TrainState
    raw_weights: dict[str, torch.Tensor] | None

    def restore(self, strategy: "Strategy", ema: Ema | None) -> None:
        """Load the state of ``strategy``'s optimiser, and with ``ema`` the trained weights of the head.

        Raises:
            UserError: they are of another optimiser or head.
        """
        try:
            found = optimizer_name(self.optimizer_state["param_groups"])
            wanted = optimizer_name(strategy.optimizer.param_groups)
            if found == wanted:
                strategy.load_optimizer_state(self.optimizer_state)
                if ema is not None:
                    ema.restore(self.raw_weights or {})
        except Exception as error:  # load_state_dict does not check the state, and raises any error
            raise _damaged(self.folder, error) from error
        if found != wanted:
            trainer = self.folder / "trainer"
            raise UserError(
                f"The optimiser state in {trainer} is of {found}; training.optimizer is {wanted}.",
                f"Set training.optimizer={found}, or start a new run with output_dir=FOLDER.",
            )


def load_checkpoint(folder: Path, device: torch.device) -> Checkpoint:
    """Read a checkpoint.

    It has no state of a random number generator: the draws of a step depend on the seed and the counters.

    Raises:
        UserError: a file of the checkpoint is missing or damaged.
    """
    head = load_draft(folder, dtype=torch.float32, device=str(device))
    trainer = folder / "trainer"
    try:
        counters = json.loads((trainer / "state.json").read_text(encoding="utf-8"))
        optimizer_state = _load(trainer / "optimizer.pt")
        raw_weights = None
        if (trainer / RAW_WEIGHTS).exists():
            raw_weights = _load(trainer / RAW_WEIGHTS)
        return Checkpoint(folder, head, optimizer_state, TrainState(**counters), raw_weights)
    except Exception as error:  # unpickling damaged bytes raises any error
        raise _damaged(folder, error) from error


def _load(path: Path) -> Any:
    """Load a file of tensors to the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)


def _damaged(folder: Path, error: Exception) -> UserError:
    """Error for a checkpoint whose state of training cannot be read."""
    reason = first_line(error).rstrip(".")
    return UserError(
        f"The trainer state in {folder / 'trainer'} cannot be read: {reason}.",
        f"Delete {folder} to resume from the checkpoint before it.",
    )
