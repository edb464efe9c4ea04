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
"""Moments that AdamW keeps per weight."""
RAW_WEIGHTS = "weights.pt"
MOVE_AND_RESUME = "move the run folder to another disk, then go on with --resume"
FREE_SPACE_AND_RESUME = f"Free some space, or {MOVE_AND_RESUME}."


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
        num_skipped: optimiser steps whose loss or gradient was not finite, which changed nothing.
        num_skipped_now: those in a row until now.
        peak_memory_gb: of the first process of any session, when the run was last described; 0 where the
            system does not tell.
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
            save_torch_file(dict(optimizer_state), trainer / "optimizer.pt")
            if ema is not None:
                save_torch_file(ema.raw(), trainer / RAW_WEIGHTS)
            (trainer / "state.json").write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"The checkpoint {folder} could not be written: {error.strerror or error}.",
            writing_remedy(error, MOVE_AND_RESUME),
        ) from error


class Checkpoint(NamedTuple):
    """A checkpoint that was read.

    Attributes:
        folder: where it lies.
        head: the draft, in fp32: the average of the weights, if one was kept.
        optimizer_state: whole.
        state: the counters.
        raw_weights: the weights that training goes on with, beside an average; None without one.
    """

    folder: Path
    head: DraftHead
    optimizer_state: dict[str, Any]
    state: TrainState
    raw_weights: dict[str, torch.Tensor] | None

    def restore(self, strategy: "Strategy", ema: Ema | None) -> None:
        """Give ``strategy``'s optimiser its state, and the head its own weights where it has the average now.

        Raises:
            UserError: they are of another optimiser or head.
        """
        try:
            groups = strategy.optimizer.param_groups
            found, wanted = optimizer_name(self.optimizer_state["param_groups"]), optimizer_name(groups)
            if found == wanted:
                strategy.load_optimizer_state(self.optimizer_state)
                if ema is not None:
                    ema.restore(self.raw_weights or {})
                return
        except Exception as error:  # load_state_dict trusts what it is given
            raise _damaged(self.folder, error) from error
        where = self.folder / "trainer"
        raise UserError(
            f"The optimiser state in {where} is of {found}; training.optimizer is {wanted}.",
            f"Set training.optimizer={found}, or start a new run with output_dir=FOLDER.",
        )


def load_checkpoint(folder: Path, device: torch.device) -> Checkpoint:
    """Read a checkpoint back.

    No state of a random number generator is kept: what a step draws depends on the seed and the counters.

    Raises:
        UserError: a file of the checkpoint is missing or damaged.
    """
    head = load_draft(folder, dtype=torch.float32, device=str(device))
    trainer = folder / "trainer"

    def load(name: str) -> Any:
        return torch.load(trainer / name, map_location="cpu", weights_only=True)

    try:
        state = TrainState(**json.loads((trainer / "state.json").read_text(encoding="utf-8")))
        raw_weights = load(RAW_WEIGHTS) if (trainer / RAW_WEIGHTS).exists() else None
        return Checkpoint(folder, head, load("optimizer.pt"), state, raw_weights)
    except Exception as error:  # unpickling raises whatever the broken bytes make it raise
        raise _damaged(folder, error) from error


def _damaged(folder: Path, error: Exception) -> UserError:
    reason = first_line(error).rstrip(".")
    return UserError(
        f"The trainer state in {folder / 'trainer'} cannot be read: {reason}.",
        f"Delete {folder} to resume from the checkpoint before it.",
    )
