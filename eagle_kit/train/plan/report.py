"""Plans as text: one config in full, several as a table."""

from collections.abc import Sequence
from pathlib import Path

from eagle_kit.config.loading.loader import load_config
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.gpus import find_gpu
from eagle_kit.models.loading.known_targets import target_architecture
from eagle_kit.train.parallel.processes import with_precision
from eagle_kit.train.plan.costs import Costs
from eagle_kit.train.plan.plan import SUPERVISED_SHARE, USABLE, UTILISATION, Placement, Planner
from eagle_kit.train.run.new_head import head_architecture

COUNTS = (1, 8)
HONESTY = (
    "Estimates: nothing here has run on a GPU. Memory is for rows full of replies (of blocks, "
    "with an anchor at every token), and may fill "
    f"{USABLE:.0%} of a GPU; speed assumes {UTILISATION:.0%} of the data sheet's FLOP/s and "
    f"{SUPERVISED_SHARE:.0%} supervised tokens, judging not counted."
)
HOW = {
    "fits": "the target on every GPU",
    "head sharded": "the head sharded (train/accelerate/fsdp2.yaml or zero2.yaml)",
    "target sharded": "the target sharded over the GPUs",
    "both sharded": "target and head sharded",
    "from a store": "states captured elsewhere (fp8 store)",
    "from a store, head sharded": "states captured elsewhere, the head sharded (fsdp2.yaml)",
}


def print_plans(paths: Sequence[str], overrides: Sequence[str], gpu: str) -> None:
    """Print the plan of one config, or a table of several. Of several, those that cannot be planned are
    listed below it.

    Raises:
        UserError: an unknown GPU, or not one config can be planned.
    """
    find_gpu(gpu)
    if len(paths) == 1:
        print(report(paths[0], make_planner(paths[0], overrides, gpu), gpu))
        return
    planners: dict[str, Planner] = {}
    left_out: list[tuple[str, UserError]] = []
    for path in paths:
        try:
            planners[path] = make_planner(path, overrides, gpu)
        except UserError as error:
            left_out.append((path, error))
    if not planners:
        raise left_out[0][1]
    print(table(planners, gpu))
    for path, reason in left_out:
        print(f"left out: {path}: {reason.cause}")


def make_planner(path: str, overrides: Sequence[str], gpu: str) -> Planner:
    """Read a config and the architectures it speaks of. Raises UserError as a run would."""
    config = with_precision(load_config(TrainConfig, path, overrides), on_gpu=True)
    target, _ = target_architecture(config.target)
    draft = head_architecture(config, target, None)
    return Planner(Costs(config, target, draft, is_gpu=True), find_gpu(gpu))


def report(path: str, planner: Planner, gpu: str) -> str:
    """Everything about one config."""
    costs, config = planner.costs, planner.costs.config
    met, total = costs.target_weights
    placements = {count: planner.place(count) for count in COUNTS}
    lines = [
        f"config  {path}",
        f"target  {config.target}: {total / 1e9:.2f} B weights, {met / 1e9:.2f} B of them for one token; "
        f"sizes from {target_architecture(config.target)[1]}",
        f"head    {config.head.kind}: {costs.head.total / 1e9:.3f} B trained weights, "
        f"{costs.draft.draft_vocab_size} of {costs.target.vocab_size} tokens",
        f"rows    {config.training.sequences_per_step} of {config.data.max_length} tokens a step, "
        f"{config.training.ttt_length} steps of training-time test, {config.training.precision}",
        "",
        f"{'GB of each GPU':32}{_heads(gpu)}",
        *_memory_lines(placements),
        "",
        *(f"{count} x {gpu}: {_how(placements[count], count)}" for count in COUNTS),
        _disk(planner),
        _capture(planner, gpu),
        HONESTY,
    ]
    return "\n".join(lines)


def _heads(gpu: str) -> str:
    return "".join(f"{f'{count} x {gpu}':>16}" for count in COUNTS)


def _memory_lines(placements: dict[int, Placement | None]) -> list[str]:
    names = ("target", "head, gradient and optimiser", "states and activations", "teacher and logits")
    lines = []
    for name in (*names, "judge", "target, cut for the judge", "runtime"):
        cells = [_gb(p.memory.get(name)) if p else "-" for p in placements.values()]
        lines.append(f"  {name:30}" + "".join(f"{cell:>16}" for cell in cells))
    cells = [_gb(p.peak) if p else "-" for p in placements.values()]
    return [*lines, f"  {'peak':30}" + "".join(f"{cell:>16}" for cell in cells)]


def _gb(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e9:.1f}"


def _how(placement: Placement | None, count: int) -> str:
    if placement is None:
        return f"not possible: training.sequences_per_step is no multiple of {count}"
    if not placement.fits:
        return f"does not fit, not even with {HOW[placement.name]}"
    launcher = (
        "" if count == 1 or placement.layout.sharding != "none" else ", train/accelerate/multi-gpu.yaml"
    )
    judge = "" if "judge" in placement.memory else ", no judge while training"
    return (
        f"{HOW[placement.name]}{launcher}{judge}; {placement.seconds_per_step:.2f} s a step, "
        f"{placement.tokens_per_day / 1e6:.0f} M tokens a day"
    )


def _disk(planner: Planner) -> str:
    tokens = planner.schedule_tokens
    what = "the schedule's" if planner.costs.config.training.max_steps else "for example"
    sizes = [
        f"{tokens * planner.costs.state_bytes(dtype) / 1e12:.2f} TB in {dtype}" for dtype in ("bf16", "fp8")
    ]
    days = ", ".join(f"{days:.1f} on {n}" for n, days in planner.days.items())
    schedule = f"; days for them: {days}" if days else ""
    return (
        f"disk    a store of {what} {tokens / 1e6:.0f} M tokens (fewer where epochs visit them again): "
        f"{sizes[0]}, {sizes[1]}, {1e6 / planner.costs.state_bytes('fp8'):.0f} M tokens a TB{schedule}"
    )


def _capture(planner: Planner, gpu: str) -> str:
    count = planner.gpus_to_capture()
    if count is None:
        return f"capture not with 64 x {gpu}"
    return f"capture needs {count} x {gpu}: {planner.capture_tokens_per_day(count) / 1e6:.0f} M tokens a day"


def table(planners: dict[str, Planner], gpu: str) -> str:
    """A line for each config."""
    head = ("config", "target B", "active B", "head M", "GB x1", "GB x8", "1 GPU", "8 GPUs", "M tok/day x1")
    rows: list[tuple[str, ...]] = [(*head, "x8", "kB/token fp8", "store TB")]
    for path, planner in planners.items():
        met, total = planner.costs.target_weights
        one, eight = (planner.place(count) for count in COUNTS)
        rows.append(
            (
                Path(path).name.removesuffix(".yaml"),
                f"{total / 1e9:.2f}",
                f"{met / 1e9:.2f}",
                f"{planner.costs.head.total / 1e6:.0f}",
                *(_gb(p.peak) if p else "-" for p in (one, eight)),
                *(_short(p) for p in (one, eight)),
                *(f"{p.tokens_per_day / 1e6:.0f}" if p and p.fits else "-" for p in (one, eight)),
                f"{planner.costs.state_bytes('fp8') / 1e3:.1f}",
                f"{planner.schedule_tokens * planner.costs.state_bytes('fp8') / 1e12:.2f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = [
        "  ".join(
            cell.ljust(w) if i in (0, 6, 7) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([f"{gpu}, one and eight of them", *text, HONESTY])


def _short(placement: Placement | None) -> str:
    if placement is None:
        return "rows not shared"
    return placement.name if placement.fits else "does not fit"
