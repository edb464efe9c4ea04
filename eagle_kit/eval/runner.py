"""``run_eval``: settle the settings, decode what is not done yet, then summary, plot and report."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import write_json_atomically
from eagle_kit.core.request import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.eval.answers import (
    ANSWERS_FILE,
    PLAIN,
    SUMMARY_FILE,
    AnswerStore,
    Setting,
    fingerprint,
)
from eagle_kit.eval.decoder import Decoder
from eagle_kit.eval.engines import MakeEngines, check_prompts, make_engines, place
from eagle_kit.eval.report import plot, report
from eagle_kit.eval.summary import summarise
from eagle_kit.eval.tasks import Task, load_tasks
from eagle_kit.report.environment import command_line, cpu_model, describe_machine, describe_versions, now
from eagle_kit.report.plots import require_matplotlib

DEFAULT_SHAPES = ("4,1,5", "5,4,16")

MOST_RECORDED = 8
"""Settings, plain decoding included, whose engines may keep recordings of cycles: up to 0.4 GB each."""


def run_eval(
    target: str | Path,
    drafts: Sequence[str | Path] = (),
    tasks: Sequence[str | Path] = ("human_eval", "ours"),
    shapes: Sequence[str] = DEFAULT_SHAPES,
    *,
    out: str | Path = "results/eval",
    max_tokens: int = 128,
    limit: int | None = None,
    batch_size: int = 1,
    seed: int = 0,
    draft_names: Sequence[str] | None = None,
    dtype: str = "auto",
    device: str = "auto",
    max_context: int | None = None,
    plots: bool = True,
    quiet: bool = False,
    command: str | None = None,
    engines: MakeEngines | None = None,
) -> dict[str, Any]:
    """Measure drafts on tasks against plain decoding.

    Writes answers.jsonl (as it goes), settings.json, summary.json and the plot into ``out`` and prints the
    report. Called again with the same ``out`` and settings, it goes on where it was broken off.

    Args:
        target: a local folder, a hub id or a known name.
        drafts: draft checkpoint folders; none measures plain decoding only.
        tasks: names or JSONL paths, see tasks.load_task.
        shapes: ``steps,topk,tokens``, tried with every draft beside plain decoding.
        out: folder of the results.
        max_tokens: most tokens of a reply.
        limit: most prompts of each task, drawn by ``seed`` evenly over its categories; None for all.
        batch_size: prompts decoded together.
        seed: draws the prompts of ``limit``; decoding is greedy and needs none.
        draft_names: names of the drafts; default those of their folders.
        dtype, device, max_context: of the engine, see LLM.
        plots: draw the plot; needs matplotlib.
        quiet: no progress bar and no report on the terminal.
        command: kept in the summary; default the process's own command line.
        engines: makes the engines from (target, drafts); default ``LLM``.

    Returns:
        The summary, see summary.summarise; ``paths`` in it names the files.

    Raises:
        UserError: a bad shape, task, draft or option, or an ``out`` that holds a run with other settings.
    """
    if plots:
        require_matplotlib("give --no-plots")
    if batch_size < 1:
        raise UserError(f"The batch size is {batch_size}.", "Decode at least one prompt at a time.")
    params = SamplingParams(max_tokens=max_tokens)
    names = _draft_names(drafts, draft_names)
    runs = [PLAIN, *(Setting(name, shape) for name in names for shape in _parse_shapes(shapes))]
    loaded = [task.limited(limit, seed) for task in load_tasks(tasks)]
    settings = {
        "target": str(target),
        "target_fingerprint": fingerprint(target),
        "drafts": {name: fingerprint(path) or str(path) for name, path in zip(names, drafts, strict=True)},
        "shapes": [run.shape for run in runs[1:] if run.draft == names[0]] if names else [],
        "tasks": {task.name: task.fingerprint for task in loaded},
        "max_tokens": max_tokens,
        "limit": limit,
        "batch_size": batch_size,
        "seed": seed,
        "dtype": dtype,
        "device": device,
        "max_context": max_context,
        **_speed_settings(),
    }
    store = AnswerStore(Path(out), settings, runs)
    decoder = Decoder(loaded, runs, params, batch_size, store, show_progress=not quiet)
    if decoder.num_pending:
        if engines is None:
            records = len(runs) <= MOST_RECORDED
            if not (records or quiet):
                print(f"note: cycles on a CPU are not recorded, {len(runs)} settings would keep too many.")
            engines = functools.partial(
                make_engines,
                batch_size=batch_size,
                max_context=max_context,
                dtype=dtype,
                device=device,
                records=records,
            )
        made = dict(zip([None, *names], engines(str(target), [str(draft) for draft in drafts]), strict=True))
        check_prompts(made[None], loaded)
        where, real_dtype = place(made[None])
        store.start(
            {
                "target": {"name": _public_name(target), "device": where, "dtype": real_dtype},
                "machine": describe_machine(where),
                "versions": describe_versions(),
                "command": command or command_line(),
                "date": now(),
            }
        )
        decoder.run(made)
    return _finish(store, runs, loaded, dict(zip(names, map(str, drafts), strict=True)), plots, quiet)


def _finish(
    store: AnswerStore,
    runs: list[Setting],
    tasks: list[Task],
    drafts: dict[str, str],
    plots: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Write the summary and the plot of all answers; print the report."""
    summary = {
        "format": 1,
        **store.about,
        "seed": store.settings["seed"],
        "settings": store.settings,
        "drafts": [{"name": name, "path": path} for name, path in drafts.items()],
        **summarise(store.answers, runs, [task.name for task in tasks]),
    }
    paths = {"answers": str(store.folder / ANSWERS_FILE), "summary": str(store.folder / SUMMARY_FILE)}
    if plots:
        picture = plot(summary, store.folder)
        paths |= {} if picture is None else {"plot": str(picture)}
    summary["paths"] = paths
    write_json_atomically(store.folder / SUMMARY_FILE, summary)
    if not quiet:
        print(report(summary))
    return summary


def _parse_shapes(shapes: Sequence[str]) -> list[str]:
    """Shapes in their one spelling. Raises UserError."""
    parsed = [SpecShape.parse(shape) for shape in shapes]
    if not parsed:
        raise UserError("No shape was given.", f"Give steps,topk,tokens such as {' '.join(DEFAULT_SHAPES)}.")
    if NO_SPECULATION in parsed:
        raise UserError(
            "The shape none is ordinary decoding, which always runs.", "Leave it out of the shapes."
        )
    if len(set(parsed)) < len(parsed):
        raise UserError("A shape was given twice.", "Give every shape once.")
    return [str(shape) for shape in parsed]


def _draft_names(drafts: Sequence[str | Path], given: Sequence[str] | None) -> list[str]:
    """A short name for every draft. Raises UserError when names were given that do not fit."""
    if given is not None:
        if len(given) != len(drafts) or len(set(given)) < len(given):
            raise UserError(
                f"{len(given)} draft names were given for {len(drafts)} drafts.",
                "Give each draft a name of its own.",
            )
        return list(given)
    parts = [Path(draft).resolve().parts[1:] or (str(draft),) for draft in drafts]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        # "best" and "step-400" say little without the run's name before them
        vague = depth == 1 and any(name == "best" or name.startswith("step-") for name in names)
        if len(set(names)) == len(names) and not vague:
            return names
    if parts:
        raise UserError("A draft was given twice.", "Give every draft once.")
    return []


def _public_name(target: str | Path) -> str:
    """A local folder by its own name: where it lies on this disk is of no use to a reader of the results."""
    return Path(target).resolve().name if Path(target).is_dir() else str(target)


def _speed_settings() -> dict[str, Any]:
    """Facts of the machine that decide speed: a run must not be resumed on another one."""
    import torch

    return {"cpu": cpu_model(), "threads": torch.get_num_threads(), "torch": torch.__version__}
