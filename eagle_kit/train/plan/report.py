"""Plans as text: one config in full, several as a table."""

from collections.abc import Sequence
from pathlib import Path

from eagle_kit.config.loading.loader import load_config
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.gpus import find_gpu
from eagle_kit.models.bridge.config import BridgedConfig
from eagle_kit.models.loading.known_targets import target_architecture
from eagle_kit.train.parallel.processes import with_precision
from eagle_kit.train.plan.costs import RunCosts
from eagle_kit.train.plan.plan import (
    CAPTURE_COUNTS,
    GPU_COUNTS,
    SUPERVISED_SHARE,
    USABLE,
    UTILISATION,
    GpuPlanner,
    Placement,
)
from eagle_kit.train.run.new_head import head_architecture

ASSUMPTIONS = (
    "Estimates: nothing here has run on a GPU. Memory is for rows full of responses (of blocks, "
    "with an anchor at every token), and may fill "
    f"{USABLE:.0%} of a GPU; speed assumes {UTILISATION:.0%} of the data sheet's FLOP/s and "
    f"{SUPERVISED_SHARE:.0%} supervised tokens, validation not counted."
)
DESCRIPTIONS = {
    "fits": "the target on every GPU",
    "head sharded": "the head sharded (train/accelerate/fsdp2.yaml or zero2.yaml)",
    "target sharded": "the target sharded over the GPUs",
    "both sharded": "target and head sharded",
    "from a store": "states captured elsewhere (fp8 store)",
    "from a store, head sharded": "states captured elsewhere, the head sharded (fsdp2.yaml)",
}
"""Name of a layout in ``plan.LAYOUTS`` -> what it means."""
PARTS = (
    "target",
    "head, gradient and optimiser",
    "states and activations",
    "teacher and logits",
    "validation",
    "target, cut for validation",
    "runtime",
)
"""Names of :meth:`RunCosts.memory`, in the order of the report."""


def print_plans(paths: Sequence[str], overrides: Sequence[str], gpu: str) -> None:
    """Print the plan of one config, or a table of several.

    Of several, those that cannot be planned are listed below the table.

    Raises:
        UserError: the GPU is not known, or no config can be planned.
    """
    find_gpu(gpu)
    if len(paths) == 1:
        print(report(paths[0], make_planner(paths[0], overrides, gpu), gpu))
        return

    planners: dict[str, GpuPlanner] = {}
    left_out: dict[str, UserError] = {}
    for path in paths:
        try:
            planners[path] = make_planner(path, overrides, gpu)
        except UserError as error:
            left_out[path] = error
    if not planners:
        raise next(iter(left_out.values()))
    print(table(planners, gpu))
    for path, reason in left_out.items():
        print(f"left out: {path}: {reason.cause}")


def make_planner(path: str, overrides: Sequence[str], gpu: str) -> GpuPlanner:
    """Read a config and the architectures of its target and head. Raises UserError as a run would."""
    config = with_precision(load_config(TrainConfig, path, overrides), on_gpu=True)
    target, _ = target_architecture(config.target)
    draft = head_architecture(config, target, None)
    return GpuPlanner(RunCosts(config, target, draft, is_gpu=True), find_gpu(gpu))


def report(path: str, planner: GpuPlanner, gpu: str) -> str:
    """Text about one config: sizes, memory of each GPU, speed, disk and capture."""
    costs = planner.costs
    config = costs.config
    training = config.training
    placements = {count: planner.place(count) for count in GPU_COUNTS}

    # Sizes.
    active, total = costs.target_weights
    origin = target_architecture(config.target)[1]
    lines = [
        f"config  {path}",
        f"target  {config.target}: {total / 1e9:.2f} B weights, {active / 1e9:.2f} B of them for one token; "
        f"sizes from {origin}",
        f"head    {config.head.kind}: {costs.head.total / 1e9:.3f} B trained weights, "
        f"{costs.draft.draft_vocab_size} of {costs.target.vocab_size} tokens",
        f"rows    {training.sequences_per_step} of {config.data.max_length} tokens a step, "
        f"{training.ttt_length} steps of training-time test, {training.precision}",
        "",
    ]

    # Memory by part, a column for each number of GPUs.
    titles = [f"{count} x {gpu}" for count in GPU_COUNTS]
    lines.append(_memory_line("GB of each GPU", titles))
    for part in PARTS:
        sizes = [_gb(each.memory.get(part)) if each else "-" for each in placements.values()]
        lines.append(_memory_line(f"  {part}", sizes))
    peaks = [_gb(each.peak) if each else "-" for each in placements.values()]
    lines += [_memory_line("  peak", peaks), ""]

    # Layout and speed, disk, and capture.
    for count, placement in placements.items():
        lines.append(f"{count} x {gpu}: {_describe(placement, count)}")
        if placement is not None and placement.layout.target == "sharded":
            lines.append(_loading(planner, count))
    lines += [_disk(planner), _capture(planner, gpu), ASSUMPTIONS]
    return "\n".join(lines)


def _memory_line(name: str, cells: Sequence[str]) -> str:
    """A line of the table of memory."""
    return f"{name:32}" + "".join(f"{cell:>16}" for cell in cells)


def _gb(size: float | None) -> str:
    """Bytes as gigabytes, ``-`` for None."""
    return "-" if size is None else f"{size / 1e9:.1f}"


def _describe(placement: Placement | None, count: int) -> str:
    """Layout and speed on ``count`` GPUs."""
    if placement is None:
        return f"not possible: training.sequences_per_step is no multiple of {count}"
    description = DESCRIPTIONS[placement.name]
    if not placement.fits:
        return f"does not fit, not even with {description}"
    if count > 1 and placement.layout.sharding == "none":
        description += ", train/accelerate/multi-gpu.yaml"
    if "validation" not in placement.memory:
        description += ", no validation while training"
    return (
        f"{description}; {placement.seconds_per_step:.2f} s a step, "
        f"{placement.tokens_per_day / 1e6:.0f} M tokens a day"
    )


def _loading(planner: GpuPlanner, count: int) -> str:
    """Bytes that ``count`` processes read of a sharded target, and main memory that this takes."""
    costs = planner.costs
    size = costs.target_weights[1] * costs.numerics.operand
    if isinstance(costs.target, BridgedConfig):
        return (
            f"loading each of {count} processes reads the target into main memory: {_gb(size)} GB, together "
            f"{_gb(count * size)} GB"
        )
    return (
        f"loading {count} processes read {_gb(size)} GB of the target together, each its shard; main memory "
        "has the files' pages alone"
    )


def _disk(planner: GpuPlanner) -> str:
    """Size of a store of captured hidden states, and days of the schedule."""
    costs = planner.costs
    tokens = planner.schedule_tokens
    tokens_are = "the schedule's" if costs.config.training.max_steps else "for example"
    in_bf16 = tokens * costs.state_bytes("bf16") / 1e12
    in_fp8 = tokens * costs.state_bytes("fp8") / 1e12
    tokens_per_tb = 1e12 / costs.state_bytes("fp8")
    text = (
        f"disk    a store of {tokens_are} {tokens / 1e6:.0f} M tokens (fewer where epochs visit them again): "
        f"{in_bf16:.2f} TB in bf16, {in_fp8:.2f} TB in fp8, {tokens_per_tb / 1e6:.0f} M tokens a TB"
    )
    days = ", ".join(f"{days:.1f} on {count}" for count, days in planner.days.items())
    if days:
        text += f"; days for them: {days}"
    return text


def _capture(planner: GpuPlanner, gpu: str) -> str:
    """Number of GPUs that a capture needs, and its speed."""
    count = planner.gpus_to_capture()
    if count is None:
        return f"capture not with {CAPTURE_COUNTS[-1]} x {gpu}"
    return f"capture needs {count} x {gpu}: {planner.capture_tokens_per_day(count) / 1e6:.0f} M tokens a day"


def table(planners: dict[str, GpuPlanner], gpu: str) -> str:
    """Table of several configs, a line for each."""
    titles = (
        "config",
        "target B",
        "active B",
        "head M",
        "GB x1",
        "GB x8",
        "1 GPU",
        "8 GPUs",
        "M tok/day x1",
        "x8",
        "kB/token fp8",
        "store TB",
    )
    rows: list[tuple[str, ...]] = [titles]
    for path, planner in planners.items():
        costs = planner.costs
        active, total = costs.target_weights
        one, eight = (planner.place(count) for count in GPU_COUNTS)
        per_token = costs.state_bytes("fp8")
        cells = (
            Path(path).name.removesuffix(".yaml"),
            f"{total / 1e9:.2f}",
            f"{active / 1e9:.2f}",
            f"{costs.head.total / 1e6:.0f}",
            _gb(one.peak if one else None),
            _gb(eight.peak if eight else None),
            _name(one),
            _name(eight),
            _speed(one),
            _speed(eight),
            f"{per_token / 1e3:.1f}",
            f"{planner.schedule_tokens * per_token / 1e12:.2f}",
        )
        rows.append(cells)

    # Names on the left of their columns, numbers on the right.
    widths = [max(len(row[i]) for row in rows) for i in range(len(titles))]
    lines = [f"{gpu}, one and eight of them"]
    for row in rows:
        padded = []
        for title, cell, width in zip(titles, row, widths, strict=True):
            is_name = title in ("config", "1 GPU", "8 GPUs")
            padded.append(cell.ljust(width) if is_name else cell.rjust(width))
        lines.append("  ".join(padded))
    return "\n".join([*lines, ASSUMPTIONS])


def _name(placement: Placement | None) -> str:
    """Name of a layout in the table."""
    if placement is None:
        return "rows not shared"
    return placement.name if placement.fits else "does not fit"


def _speed(placement: Placement | None) -> str:
    """Millions of tokens a day in the table."""
    if placement is None or not placement.fits:
        return "-"
    return f"{placement.tokens_per_day / 1e6:.0f}"
