"""Texts about a run: before its first step, after a validation, at its end, and inside a checkpoint."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eagle_kit.config.train import TrainConfig
from eagle_kit.core.files import nearest_folder
from eagle_kit.data.chat.preview import preview
from eagle_kit.drafts.files.draft_files import WEIGHTS_KEY
from eagle_kit.models.config import HeadArchitecture
from eagle_kit.models.loading.loader import weight_bytes
from eagle_kit.models.loading.source import resolve_target
from eagle_kit.report.environment import describe_versions
from eagle_kit.train.parallel.launch import sharding_asked_for
from eagle_kit.train.plan.costs import RunCosts, data_workload
from eagle_kit.train.plan.estimate import RunEstimate, Session, make_estimate, measure_matmul_rate
from eagle_kit.train.run.checkpoint import TrainState
from eagle_kit.train.run.curves import RunCurves
from eagle_kit.train.run.progress import format_seconds
from eagle_kit.train.run.setup import TrainingComponents
from eagle_kit.train.run.step import Stepper

if TYPE_CHECKING:
    from accelerate import Accelerator


PRECISIONS = {
    "float32": "float32",
    "tf32": "float32 with TF32 matmuls",
    "bfloat16": "bfloat16, weights of the head and optimiser in float32",
}


def describe_machine(config: TrainConfig, accelerator: "Accelerator") -> str:
    """Line about processes, device and precision of a run."""
    device = accelerator.device
    machine = "the CPU"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    if accelerator.num_processes > 1:
        machine = f"{accelerator.num_processes} x {machine}"
    return f"runs on {machine} in {PRECISIONS[config.training.precision]}"


def describe(config: TrainConfig, components: TrainingComponents, draft: HeadArchitecture) -> str:
    """Lines about notes, a conversation with its supervised tokens marked, target, data and vocabulary."""
    data = components.data

    # Notes and a sample.
    lines = [f"note    {note}" for note in data.notes]
    if config.data.preview:
        lines.append(f"sample  {preview(data.chat(0), components.tokenizer)}")

    # Target.
    layers = list(draft.aux_layer_ids)
    inputs = f"captured inputs of layers {layers}" if layers else "its final states feed the head"
    lines.append(f"target  {config.target}, {inputs}")

    # Data.
    share = data.num_supervised_tokens / max(1, data.num_tokens)
    skipped = ""
    if data.num_skipped:
        skipped = f"; {data.num_skipped} records skipped, listed in {data.skip_file}: {data.skip_reasons}"
    lines.append(
        f"data    {data.num_conversations} conversations, {len(data)} rows, {data.num_tokens} tokens, "
        f"{share:.0%} supervised; {len(data.heldout_prompts)} prompts held out{skipped}"
    )

    # Vocabulary.
    lines.append(
        f"vocab   {draft.draft_vocab_size} of {draft.vocab_size} cover {data.vocab_map.coverage:.2%} "
        f"of the supervised ones; {data.vocab_map.contents}"
    )
    return "\n".join(lines)


def describe_validation(config: TrainConfig, num_heldout: int, num_fitting: int, max_context: int) -> str:
    """Line about the prompts of validation, and those that are left out.

    Args:
        num_heldout: number of held-out prompts.
        num_fitting: number of prompts that validation decodes.
        max_context: context length of the target, in tokens.
    """
    validation = config.validation
    if not validation.every:
        return "eval    never: validation.every is 0, so there will be no best/"
    num_available = min(validation.prompts, num_heldout)
    text = (
        f"eval    every {validation.every} steps: {num_fitting} prompts, {validation.max_tokens} tokens each"
    )
    if num_available < validation.prompts:
        text += f"; validation.prompts asks for {validation.prompts}, {num_heldout} are held out"
    if num_fitting < num_available:
        text += (
            f"; {num_available - num_fitting} of {num_available} prompts are left out, too long for "
            f"{validation.max_tokens} more tokens in the target's context of {max_context}"
        )
    return text


def estimate_run(
    config: TrainConfig,
    accelerator: "Accelerator",
    components: TrainingComponents,
    stepper: Stepper,
    steps: range,
) -> RunEstimate:
    """Estimate memory, disk and time of a session. It measures the matmul rate, so all processes call it.

    Args:
        steps: numbers of the optimiser steps of the session.
    """
    data = components.data
    device = accelerator.device
    is_gpu = device.type == "cuda"

    # On a CPU the weight files stay mapped into memory.
    mapped = 0.0
    if not is_gpu:
        mapped = float(weight_bytes(resolve_target(config.target)))

    dtype = torch.bfloat16 if config.training.precision == "bfloat16" else torch.float32
    session = Session(
        work=data_workload(config, data, stepper.rows_per_micro_batch),
        micro_batches_per_step=stepper.micro_batches_per_step,
        rows_per_micro_batch=stepper.rows_per_micro_batch,
        num_rows=len(data),
        num_captures=num_captures(stepper, steps),
        num_steps=len(steps),
        flops_per_s=measure_matmul_rate(device, dtype),
        free_disk=shutil.disk_usage(nearest_folder(Path(config.output_dir))).free,
        mapped=mapped,
    )
    costs = RunCosts(config, components.target.config, stepper.head.config, is_gpu=is_gpu)
    return make_estimate(costs, session, accelerator.num_processes, sharding_asked_for(os.environ))


def num_captures(stepper: Stepper, steps: Iterable[int]) -> int:
    """Number of packed sequences that ``steps`` visit and the store lacks; 0 without a store that may
    grow."""
    if stepper.store is None or not stepper.store.can_grow:
        return 0
    missing = set(range(stepper.order.num_rows)) - stepper.store.rows()
    total = len(missing)
    for step in steps:
        if not missing:
            break
        missing.difference_update(stepper.order.rows_of_step(step))
    return total - len(missing)


def metadata(
    config: TrainConfig,
    accelerator: "Accelerator",
    components: TrainingComponents,
    state: TrainState,
    command: str,
    accept_length: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Contents of a checkpoint's ``eagle_kit.json``.

    Args:
        state: counters of the run.
        command: command line of the session.
        accept_length: decoded accept length by shape; None if the head was not validated.
    """
    data = components.data
    about_data: dict[str, Any] = {
        "source": config.data.origin or config.data.store,
        "conversations": data.num_conversations,
        "tokens": data.num_tokens,
        "supervised_tokens": data.num_supervised_tokens,
        "fingerprint": data.fingerprint,
    }
    if data.excluded:
        about_data["decontaminated"] = list(data.excluded)
    about_data["vocab_coverage"] = data.vocab_map.coverage

    device = accelerator.device
    machine = f"CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    return {
        "target": config.target,
        WEIGHTS_KEY: components.weights,
        "command": command,
        "data": about_data,
        "config": {
            "head": config.head.model_dump(mode="json"),
            "training": config.training.model_dump(mode="json"),
        },
        "step": state.step,
        "tokens_seen": state.tokens,
        "seconds": round(state.seconds, 1),
        "peak_memory_gb": round(state.peak_memory_gb, 3),
        "machine": f"{accelerator.num_processes} x {machine}",
        "accept_length": accept_length or {},
        "versions": describe_versions(),
    }


def validation_line(row: dict[str, Any], num_worse: int = 0, patience: int | None = None) -> str:
    """A row of ``validation.jsonl`` as a sentence.

    Args:
        num_worse: validations since the best one.
        patience: value of ``validation.patience``.
    """
    # Accept lengths.
    lengths = _list_lengths(row["accept_length"])
    simulated = _list_lengths(row["simulated_accept_length"]) or "for chains only"
    text = f"step {row['step']}: decoded accept length {lengths} (simulated {simulated})"

    # Acceptance of the first shape by position, and accept lengths by category.
    shares: list[float] = next(iter(row["acceptance_per_position"].values()), [])
    if shares:
        percentages = " ".join(f"{100 * share:.0f}" for share in shares)
        text += f", {percentages} % by position"
    by_category = row.get("accept_length_of")
    if by_category:
        categories = ", ".join(f"{name} {length:.2f}" for name, length in by_category.items())
        text += f" ({categories})"
    if row["vocab_coverage"] is not None:
        text += f", vocabulary covers {row['vocab_coverage']:.1%}"

    # Verdict.
    if row["best"]:
        text += ", the best so far"
    elif patience is not None:
        text += f", {num_worse} of {patience} without a better one"
    if row["num_different_responses"]:
        text += f"; {row['num_different_responses']} responses differ from plain decoding"
    return f"{text} [{format_seconds(row['seconds'])}]"


def _list_lengths(lengths: dict[str, float]) -> str:
    """Accept lengths by shape as text."""
    return ", ".join(f"{shape}: {value:.3f}" for shape, value in lengths.items())


def validation_scalars(row: dict[str, Any]) -> dict[str, float]:
    """Turn a row of ``validation.jsonl`` into scalars for a tracker."""
    scalars: dict[str, float] = {}
    for group, prefix in (("decoded", ""), ("simulated", "simulated_")):
        for shape, length in row[f"{prefix}accept_length"].items():
            scalars[f"{group}/{shape}"] = length
        for shape, shares in row[f"{prefix}acceptance_per_position"].items():
            for position, share in enumerate(shares, 1):
                scalars[f"{group}/{shape}/at least {position}"] = share
    for category, length in row.get("accept_length_of", {}).items():
        scalars[f"decoded/of/{category}"] = length
    if row["vocab_coverage"] is not None:
        scalars["decoded/vocab_coverage"] = row["vocab_coverage"]
    return scalars


def summary(run: RunCurves) -> str:
    """Last lines of a session: time of the whole run by part of the step, and its best head."""
    # Time.
    total = sum(run.seconds.values())
    shares = ", ".join(f"{name} {value / total:.0%}" for name, value in run.seconds.items())
    validation = format_seconds(sum(row["seconds"] for row in run.validations))
    lines = [
        f"time    {format_seconds(total)} in {len(run.metrics)} steps: {shares}; validation {validation}"
    ]

    # The best head, and the report.
    if run.validations:
        shape = run.shapes[0]
        row, length = run.best(shape)
        best = run.path / "best"
        lines.append(f"best    accept length {length:.3f} ({shape}) at step {row['step']}, in {best}")
    if (run.path / "report.html").exists():
        lines.append(f"curves  {run.path / 'report.html'}")
    return "\n".join(lines)
