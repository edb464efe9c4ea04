"""Configs of the trainings of ``make-draft``: the pilot's, and the draft's."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_kit.train.plan.budget import (
    OWN_PHASE,
    RAW_PHASE,
    ROW_TOKENS,
    Phase,
    Pilot,
    Training,
    draft_vocab_size,
    learning_rate,
)

RECIPE = {
    "ttt_length": 5,
    "down_sample_ratio": 0.6,
    "optimizer": "muon",
    "muon_learning_rate_ratio": 3.0,
    "min_learning_rate_ratio": 0.03,
}
"""Settings of the shipped head's training (docs/results/training-runs.md)."""
HELD_OUT = 16
"""Conversations of a source that are held out for validation."""
PILOT_CONVERSATIONS = 200
"""Conversations that a pilot reads."""
VALIDATE_EVERY = 250
"""Minimum number of steps between validations."""
MAX_VALIDATIONS = 4
"""Maximum number of validations."""
STATES_OF_DISK = 0.5
"""Share of the free disk that stored hidden states may take."""
NUM_AUX_LAYERS = 3
"""Captured layers of a head, besides the final hidden state."""


@dataclass(frozen=True)
class DraftJob:
    """Options of ``make-draft``, with all defaults resolved.

    Attributes:
        target: folder, hub id or known name of the target.
        source: conversations: a file, ``package:NAME`` or ``datasets:NAME[:SPLIT]``.
        tasks: tasks of the evaluation; no training text may contain a prompt of theirs.
        chat_template: file that replaces the target's chat template.
        budget: time of all stages together, as the user wrote it.
        budget_s: ``budget`` in seconds.
        processes: number of processes of the training.
        out: folder of all files.
    """

    target: str
    source: str
    tasks: tuple[str, ...]
    chat_template: str | None
    budget: str
    budget_s: float
    processes: int
    out: Path

    @property
    def cache(self) -> Path:
        """Folder of packed sequences; stored hidden states are in its folder ``states``."""
        return self.out / "cache"


@dataclass(frozen=True)
class ResponseFile:
    """A file of generated responses.

    Attributes:
        name: name of the source in the mixture.
        path: the JSONL file.
        conversations: number of its lines.
        tokens: number of generated tokens.
    """

    name: str
    path: Path
    conversations: int
    tokens: int


def pilot_config(job: DraftJob, pilot: Pilot) -> dict[str, Any]:
    """Config of a training whose steps are timed: raw chats, no stored hidden states, no validation."""
    phase = Phase(pilot.steps, max(pilot.rows, job.processes))
    data = {"source": job.source, "limit": PILOT_CONVERSATIONS}
    return _config(
        job, "pilot", phase, data, row_tokens=pilot.row_tokens, keeps_states=False, validate_every=0
    )


def draft_config(
    job: DraftJob, training: Training, responses: Sequence[ResponseFile], tokens_per_conversation: float
) -> dict[str, Any]:
    """Config of the draft's training: raw chats at first, then ``responses``.

    Args:
        tokens_per_conversation: mean number of tokens of a raw conversation.
    """
    # The last validation is that of the last step.
    steps = training.phase.steps
    validations = min(max(steps // VALIDATE_EVERY, 1), MAX_VALIDATIONS)
    validate_every = math.ceil(steps / validations)

    data = {"mix": _mixture(job, training, responses, tokens_per_conversation)}
    return _config(
        job,
        "training",
        training.phase,
        data,
        row_tokens=ROW_TOKENS,
        keeps_states=training.keeps,
        validate_every=validate_every,
    )


def _mixture(
    job: DraftJob, training: Training, responses: Sequence[ResponseFile], tokens_per_conversation: float
) -> list[dict[str, Any]]:
    """Sources of the draft's training, without files that have too few responses to hold some out."""
    # Raw chats: as many as are trained on, and those that are held out.
    limit = int(training.raw_tokens / tokens_per_conversation) + HELD_OUT
    raw = {"source": job.source, "name": "raw", "limit": max(limit, 2 * HELD_OUT)}
    enough = [file for file in responses if file.conversations > HELD_OUT]
    if not enough:
        return [raw]

    # Responses weigh as many tokens as they have.
    total = sum(file.tokens for file in responses)
    own = [
        {
            "source": str(file.path),
            "name": file.name,
            "weight": max(round(file.tokens / total, 3), 1e-3),
            "phase": list(OWN_PHASE),
        }
        for file in enough
    ]
    return [raw | {"phase": list(RAW_PHASE)}, *own]


def _config(
    job: DraftJob,
    name: str,
    phase: Phase,
    data: dict[str, Any],
    *,
    row_tokens: int,
    keeps_states: bool,
    validate_every: int,
) -> dict[str, Any]:
    """Config of a training.

    Args:
        name: name of the run folder in ``job.out``.
        phase: length of the training.
        data: settings of the section ``data``.
        row_tokens: tokens of a packed sequence.
        keeps_states: store hidden states on disk.
        validate_every: steps between validations; 0 is none.
    """
    from eagle_kit.models.loading.loader import read_target_config
    from eagle_kit.models.loading.source import load_tokenizer, resolve_target

    folder = resolve_target(job.target)
    target = read_target_config(folder)
    return {
        "target": job.target,
        "output_dir": str(job.out / name),
        "data": {
            **data,
            "chat_template": job.chat_template,
            "max_length": min(row_tokens, target.max_position_embeddings),
            "eval_conversations": HELD_OUT,
            "decontaminate": list(job.tasks),
            "preview": False,
            "cache_dir": str(job.cache),
        },
        "head": {"draft_vocab_size": draft_vocab_size(len(load_tokenizer(folder)))},
        "training": {
            **RECIPE,
            "precision": _precision(),
            "learning_rate": learning_rate(target.hidden_size),
            "max_steps": phase.steps,
            "sequences_per_step": phase.rows_per_step,
            "cache_hidden_states": "disk" if keeps_states else "off",
            "save_every": max(phase.steps // 4, 1),
        },
        "validation": {"every": validate_every, "prompts": HELD_OUT, "max_tokens": 64},
    }


def room_for_states(job: DraftJob) -> float:
    """Number of tokens whose hidden states the disk of the job's folder has room for."""
    import torch

    from eagle_kit.data.hidden_states.format import bytes_per_token
    from eagle_kit.models.loading.loader import read_target_config
    from eagle_kit.models.loading.source import resolve_target

    # "auto" is float32 on a CPU.
    is_half = _precision() == "bfloat16" or torch.cuda.is_available()
    precision = "bfloat16" if is_half else "float32"
    width = read_target_config(resolve_target(job.target)).hidden_size
    size = bytes_per_token("computed", precision, NUM_AUX_LAYERS, width)
    return STATES_OF_DISK * shutil.disk_usage(job.out).free / size


def _precision() -> str:
    """Precision of a training: bfloat16 on a CPU with instructions for it, else ``auto``."""
    import torch

    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if has_bf16 and not torch.cuda.is_available():
        return "bfloat16"
    return "auto"
