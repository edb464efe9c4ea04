"""Texts of a run: before its first step, after a judgement, at its end, and inside a checkpoint."""

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
from eagle_kit.train.plan.costs import Costs, data_workload
from eagle_kit.train.plan.estimate import Estimate, Session, make_estimate, measure_matmul_rate
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
    """Processes, device and precision of a run."""
    count, device = accelerator.num_processes, accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    return f"runs on {f'{count} x ' if count > 1 else ''}{name} in {PRECISIONS[config.training.precision]}"


def describe(config: TrainConfig, components: TrainingComponents, draft: HeadArchitecture) -> str:
    """Target, data, vocabulary and one conversation with its supervised tokens marked."""
    data = components.data
    layers = list(draft.aux_layer_ids)
    reads = f"captured inputs of layers {layers}" if layers else "its final states feed the head"
    share = data.num_supervised_tokens / max(1, data.num_tokens)
    skipped = ""
    if data.num_skipped:
        skipped = f"; {data.num_skipped} records skipped, listed in {data.skip_file}: {data.skip_reasons}"
    lines = [f"note    {note}" for note in data.notes]
    if config.data.preview:
        lines.append(f"sample  {preview(data.chat(0), components.tokenizer)}")
    return "\n".join(
        (
            *lines,
            f"target  {config.target}, {reads}",
            f"data    {data.num_conversations} conversations, {len(data)} rows, {data.num_tokens} tokens, "
            f"{share:.0%} supervised; {len(data.heldout_prompts)} prompts held out{skipped}",
            f"vocab   {draft.draft_vocab_size} of {draft.vocab_size} cover {data.vocab_map.coverage:.2%} "
            f"of the supervised ones; {data.vocab_map.contents}",
        )
    )


def describe_judge(config: TrainConfig, num_heldout: int, num_fitting: int, max_context: int) -> str:
    """Prompts that are decoded while training, and those that are left out."""
    judge = config.judge
    if not judge.every:
        return "judge   never: judge.every is 0, so there will be no best/"
    asked = min(judge.prompts, num_heldout)
    text = f"judge   every {judge.every} steps: {num_fitting} prompts, {judge.max_tokens} tokens each"
    if asked < judge.prompts:
        text += f"; judge.prompts asks for {judge.prompts}, {num_heldout} are held out"
    if num_fitting < asked:
        text += (
            f"; {asked - num_fitting} of {asked} prompts are left out, too long for {judge.max_tokens} more "
            f"tokens in the target's context of {max_context}"
        )
    return text


def estimate_run(
    config: TrainConfig,
    accelerator: "Accelerator",
    components: TrainingComponents,
    stepper: Stepper,
    steps: range,
) -> Estimate:
    """Memory, disk and time of the optimiser steps that follow those of ``steps`` finished ones; probes the
    matmul rate, so all processes call it."""
    data, training = components.data, config.training
    device, half = accelerator.device, training.precision == "bfloat16"
    mapped = 0.0
    if device.type != "cuda":
        mapped = float(weight_bytes(resolve_target(config.target)))
    session = Session(
        work=data_workload(config, data, stepper.rows_per_micro_batch),
        micro_batches_per_step=stepper.micro_batches_per_step,
        rows_per_micro_batch=stepper.rows_per_micro_batch,
        num_rows=len(data),
        num_captures=num_captures(stepper, steps),
        num_steps=len(steps),
        flops_per_s=measure_matmul_rate(device, torch.bfloat16 if half else torch.float32),
        free_disk=shutil.disk_usage(nearest_folder(Path(config.output_dir))).free,
        mapped=mapped,
    )
    target, draft = components.target.config, stepper.head.config
    costs = Costs(config, target, draft, is_gpu=device.type == "cuda")
    return make_estimate(costs, session, accelerator.num_processes, sharding_asked_for(os.environ))


def num_captures(stepper: Stepper, steps: Iterable[int]) -> int:
    """Packed rows that ``steps`` visit and the store lacks; 0 without a store."""
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
    """Contents of a checkpoint's ``eagle_kit.json``; ``accept_length`` as decoded, by shape."""
    data, device = components.data, accelerator.device
    kind = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    return {
        "target": config.target,
        WEIGHTS_KEY: components.weights,
        "command": command,
        "data": {
            "source": config.data.origin or config.data.store,
            "conversations": data.num_conversations,
            "tokens": data.num_tokens,
            "supervised_tokens": data.num_supervised_tokens,
            "fingerprint": data.fingerprint,
            **({"decontaminated": list(data.excluded)} if data.excluded else {}),
            "vocab_coverage": data.vocab_map.coverage,
        },
        "config": {
            "head": config.head.model_dump(mode="json"),
            "training": config.training.model_dump(mode="json"),
        },
        "step": state.step,
        "tokens_seen": state.tokens,
        "seconds": round(state.seconds, 1),
        "peak_memory_gb": round(state.peak_memory_gb, 3),
        "machine": f"{accelerator.num_processes} x {kind}",
        "accept_length": accept_length or {},
        "versions": describe_versions(),
    }


def judgement_line(row: dict[str, Any], num_worse: int = 0, patience: int | None = None) -> str:
    """A row of ``judge.jsonl`` as a sentence."""
    lengths = ", ".join(f"{shape}: {value:.3f}" for shape, value in row["accept_length"].items())
    walked = ", ".join(f"{shape}: {value:.3f}" for shape, value in row["simulated_accept_length"].items())
    text = f"step {row['step']}: decoded accept length {lengths} (simulated {walked or 'for chains only'})"
    reached: list[float] = next(iter(row["acceptance_per_position"].values()), [])
    if reached:
        text += f", {' '.join(f'{100 * share:.0f}' for share in reached)} % by position"
    if by_category := row.get("accept_length_of"):
        text += f" ({', '.join(f'{name} {length:.2f}' for name, length in by_category.items())})"
    if row["vocab_coverage"] is not None:
        text += f", vocabulary covers {row['vocab_coverage']:.1%}"
    if row["best"]:
        text += ", the best so far"
    elif patience is not None:
        text += f", {num_worse} of {patience} without a better one"
    if row["num_different_replies"]:
        text += f"; {row['num_different_replies']} replies differ from plain decoding"
    return f"{text} [{format_seconds(row['seconds'])}]"


def judgement_scalars(row: dict[str, Any]) -> dict[str, float]:
    """A row of ``judge.jsonl`` for a tracker."""
    scalars: dict[str, float] = {}
    for prefix, name in (("decoded", ""), ("simulated", "simulated_")):
        lengths, reached = row[f"{name}accept_length"], row[f"{name}acceptance_per_position"]
        scalars |= {f"{prefix}/{shape}": value for shape, value in lengths.items()}
        scalars |= {
            f"{prefix}/{shape}/at least {i}": share
            for shape, shares in reached.items()
            for i, share in enumerate(shares, 1)
        }
    for name, length in row.get("accept_length_of", {}).items():
        scalars[f"decoded/of/{name}"] = length
    if row["vocab_coverage"] is not None:
        scalars["decoded/vocab_coverage"] = row["vocab_coverage"]
    return scalars


def summary(run: RunCurves) -> str:
    """The last lines of a session: where the time of the whole run went, and its best head."""
    whole = sum(run.seconds.values())
    shares = ", ".join(f"{name} {value / whole:.0%}" for name, value in run.seconds.items())
    judging = format_seconds(sum(row["seconds"] for row in run.judged))
    lines = [f"time    {format_seconds(whole)} in {len(run.metrics)} steps: {shares}; judging {judging}"]
    if run.judged:
        row, length = run.best(run.shapes[0])
        where = f"({run.shapes[0]}) at step {row['step']}, in {run.path / 'best'}"
        lines.append(f"best    accept length {length:.3f} {where}")
    if (run.path / "report.html").exists():
        lines.append(f"curves  {run.path / 'report.html'}")
    return "\n".join(lines)
