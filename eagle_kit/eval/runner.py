"""``run_eval``: decode the missing answers of an evaluation, then summary, plot and report."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.eval import EvalConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import sole_writer, write_json_atomically
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.data.chat.template import has_chat_template, read_chat_template
from eagle_kit.data.tasks.sets import Task, load_tasks
from eagle_kit.eval.answers import (
    ANSWERS_FILE,
    PLAIN,
    SUMMARY_FILE,
    AnswerStore,
    Setting,
    fingerprint,
)
from eagle_kit.eval.decoder import Decoder
from eagle_kit.eval.engines import MakeEngines, check_prompts, make_engines, open_drafts, place
from eagle_kit.eval.report import plot, report
from eagle_kit.eval.summary import summarise
from eagle_kit.report.environment import command_line, cpu_model, describe_machine, describe_versions, now
from eagle_kit.report.plots import require_matplotlib

NAMED = ("max_batch_size", "dtype", "device", "max_context")
"""Options of the engine that are always in the settings. Other options are in them unless they have their
defaults. The engine's seed is never in them, since greedy decoding does not use it."""
NO_TEMPLATE = "note: the target has no chat template, so it continues each prompt as a text."
LOCK = ".lock"
MOST_RECORDED = 8
"""Settings, plain decoding included, whose engines may keep recordings of cycles: up to 0.4 GB each."""


def run_eval(
    target: str | Path,
    drafts: Mapping[str, str | Path],
    config: EvalConfig,
    *,
    out: str | Path,
    quiet: bool = False,
    command: str | None = None,
    engines: MakeEngines | None = None,
) -> dict[str, Any]:
    """Measure drafts on tasks against plain decoding.

    Writes answers.jsonl (as it goes), settings.json, summary.json and the plot into ``out`` and prints the
    report. Called again with the same ``out`` and options, it continues where it was interrupted.

    Args:
        target: a local folder, a hub id or a known name.
        drafts: folders, hub ids or known names of drafts, by the names of :func:`name_drafts`; none measures
            plain decoding only.
        out: folder of the results.
        quiet: no progress bar and no report on the terminal.
        command: kept in the summary; default the process's own command line.
        engines: makes the engines from (target, drafts); default ``LLM``.

    Returns:
        The summary, see summary.summarise; ``paths`` in it names the files.

    Raises:
        UserError: a bad task or draft, or an ``out`` that holds a run with other options.
    """
    if config.plots:
        require_matplotlib("give --no-plots")
    engine = config.engine
    opened = {} if engines is not None else open_drafts(target, drafts)
    places = {name: opened[name].path if name in opened else draft for name, draft in drafts.items()}
    runs = [PLAIN, *(Setting(name, shape) for name in drafts for shape in config.shapes)]
    kwargs = config.chat_template_kwargs
    loaded = [task.limited(config.limit, config.seed).given(kwargs) for task in load_tasks(config.tasks)]
    settings = {
        "target": str(target),
        "target_fingerprint": fingerprint(target),
        "drafts": {name: fingerprint(path) or str(path) for name, path in places.items()},
        "shapes": list(config.shapes) if drafts else [],
        "tasks": {task.name: task.fingerprint for task in loaded},
        "max_tokens": config.max_tokens,
        "limit": config.limit,
        "batch_size": engine.max_batch_size,
        "seed": config.seed,
        "dtype": engine.dtype,
        "device": engine.device,
        "max_context": engine.max_context,
        **({"chat_template_kwargs": kwargs} if kwargs else {}),
        **engine.model_dump(mode="json", exclude={*NAMED, "seed", "chat_template"}, exclude_defaults=True),
        **_template_settings(engine),
        **_speed_settings(),
    }
    with sole_writer(Path(out), Path(out) / LOCK):
        store = AnswerStore(Path(out), settings, runs)
        params = SamplingParams(max_tokens=config.max_tokens)
        decoder = Decoder(loaded, runs, params, engine.max_batch_size, store, show_progress=not quiet)
        if decoder.num_pending:
            if engines is None:
                records = len(runs) <= MOST_RECORDED
                if not (records or quiet):
                    print(
                        f"note: cycles on a CPU are not recorded, {len(runs)} settings would keep too many."
                    )
                engines = functools.partial(make_engines, config=engine, records=records)
            given = [opened.get(name, str(draft)) for name, draft in drafts.items()]
            made = dict(zip([None, *drafts], engines(str(target), given), strict=True))
            check_prompts(made[None], loaded)
            if not (quiet or has_chat_template(made[None].tokenizer)):
                print(NO_TEMPLATE)
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
            try:
                decoder.run(made)
            finally:
                made[None].close()
        return _finish(
            store, runs, loaded, {name: str(path) for name, path in drafts.items()}, config.plots, quiet
        )


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


def name_drafts(drafts: Sequence[str | Path], given: Sequence[str] | None = None) -> dict[str, str]:
    """Give every draft a short name, from its folder or id unless names are ``given``. Raises UserError when
    they do not fit."""
    if given is None:
        given = _short_names(drafts)
    elif len(given) != len(drafts) or len(set(given)) < len(given):
        raise UserError(
            f"{len(given)} draft names were given for {len(drafts)} drafts.",
            "Give each draft a name of its own.",
        )
    return dict(zip(given, map(str, drafts), strict=True))


def _short_names(drafts: Sequence[str | Path]) -> list[str]:
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
    """A local folder or file by its own name: its place here is of no use to readers of the results."""
    return Path(target).resolve().name if Path(target).exists() else str(target)


def _template_settings(engine: EngineConfig) -> dict[str, Any]:
    """The hash of the chat template of the engine's options, since its file may change."""
    if engine.chat_template is None:
        return {}
    template = read_chat_template(engine.chat_template)
    return {"chat_template": hashlib.sha256(template.encode()).hexdigest()[:16]}


def _speed_settings() -> dict[str, Any]:
    """Facts of the machine that decide speed: a run must not be resumed on another one."""
    import torch

    return {"cpu": cpu_model(), "threads": torch.get_num_threads(), "torch": torch.__version__}
