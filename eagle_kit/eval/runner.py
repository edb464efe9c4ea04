"""``run_eval``: decode the missing answers of an evaluation, then summary, plot and report."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_kit.config.engine import DEFAULT_BATCH_SIZE, EngineConfig
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
from eagle_kit.eval.engines import EvalEngine, MakeEngines, check_prompts, make_engines, open_drafts
from eagle_kit.eval.report import plot, report
from eagle_kit.eval.servers.measured_server import MeasuredServer
from eagle_kit.eval.servers.server_answers import ServerAnswerStore
from eagle_kit.eval.servers.server_checks import LabelledPrompt
from eagle_kit.eval.servers.server_round import ServerRound
from eagle_kit.eval.servers.server_rows import describe_servers, server_rows
from eagle_kit.eval.summary import summarise
from eagle_kit.report.environment import command_line, cpu_model, describe_machine, describe_versions, now
from eagle_kit.report.plots import require_matplotlib

if TYPE_CHECKING:
    from eagle_kit.drafts.files.draft import DraftFolder

NAMED_OPTIONS = ("max_batch_size", "dtype", "device", "max_context")
"""Options of the engine that are in the settings by name. Others are in them where they differ from
their defaults."""
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
    servers: Sequence[MeasuredServer] = (),
) -> dict[str, Any]:
    """Measure drafts on tasks against plain decoding.

    Writes answers.jsonl (as it goes), settings.json, summary.json and the plot into ``out`` and prints the
    report. Called again with the same ``out`` and options, it continues where it was interrupted.

    Args:
        target: a local folder, a hub id or a known name.
        drafts: folders, hub ids or known names of drafts, by the names of :func:`name_drafts`;
            without one plain decoding alone is measured.
        out: folder of the results.
        quiet: no progress bar and no report on the terminal.
        command: kept in the summary; default the process's own command line.
        engines: makes the engines from (target, drafts); default ``LLM``.
        servers: running servers of the same target, which get the same prompts as token ids.

    Returns:
        The summary, see summary.summarise; ``paths`` in it names the files.

    Raises:
        UserError: a bad task or draft, an ``out`` that holds a run with other options, or a server that
            has no metrics, another model or too short a context.
    """
    if config.plots:
        require_matplotlib("give --no-plots")

    # Open the drafts, before the target is loaded, and read the tasks.
    opened = {} if engines is not None else open_drafts(target, drafts)
    runs = [PLAIN, *(Setting(name, shape) for name in drafts for shape in config.shapes)]
    tasks = []
    for task in load_tasks(config.tasks):
        limited = task.limited(config.limit, config.seed)
        tasks.append(limited.given(config.chat_template_kwargs))
    settings = _settings(target, drafts, opened, config, tasks)
    urls = {server.name: server.url for server in servers}
    if urls.keys() & drafts.keys():
        raise UserError("A server has the name of a draft.", "Give each a name of its own with --name.")
    if urls:
        settings["servers"] = urls

    with sole_writer(Path(out), Path(out) / LOCK):
        # Decode what an earlier run with the same settings has not.
        store = AnswerStore(Path(out), settings, runs)
        params = SamplingParams(max_tokens=config.max_tokens)
        batch_size = config.engine.max_batch_size or DEFAULT_BATCH_SIZE
        round = ServerRound(servers, ServerAnswerStore(Path(out))) if servers else None
        decoder = Decoder(tasks, runs, params, batch_size, store, show_progress=not quiet, servers=round)
        if decoder.num_pending:
            for server in servers:
                _ = server.facts  # refused before the target is loaded
            if engines is None:
                engines = _default_engines(config.engine, len(runs), quiet)
            given = [opened.get(name, str(draft)) for name, draft in drafts.items()]
            made = dict(zip([None, *drafts], engines(str(target), given), strict=True))
            plain = made[None]
            check_prompts(plain, tasks)
            if not (quiet or has_chat_template(plain.tokenizer)):
                print(NO_TEMPLATE)
            if round is not None:
                _start_servers(round, target, plain, tasks, config)
            store.start(_about(target, plain, command))
            try:
                decoder.run(made)
            finally:
                plain.close()

        # Summarise all answers.
        paths = {name: str(path) for name, path in drafts.items()}
        return _finish(store, runs, tasks, paths, config.plots, quiet, round)


def _start_servers(
    round: ServerRound, target: str | Path, engine: EvalEngine, tasks: Sequence[Task], config: EvalConfig
) -> None:
    """Check the servers on every first turn, and warm them up on the first prompts."""
    prompts = []
    for task in tasks:
        for prompt in task.prompts:
            label = f"The prompt {prompt.id} of {task.name}"
            prompts.append(LabelledPrompt(label, engine.tokenize_task(prompt.given())))
    batch_size = config.engine.max_batch_size or DEFAULT_BATCH_SIZE
    warm_up = [prompt.ids for prompt in prompts[:batch_size]]
    round.start(target, engine, prompts, warm_up, config.max_tokens)


def _settings(
    target: str | Path,
    drafts: Mapping[str, str | Path],
    opened: "Mapping[str, DraftFolder]",
    config: EvalConfig,
    tasks: Sequence[Task],
) -> dict[str, Any]:
    """Everything that decides the answers and their speed; a run is not resumed with other
    settings.

    Args:
        opened: the drafts that were opened, by name.
    """
    engine = config.engine
    fingerprints = {}
    for name, draft in drafts.items():
        path = opened[name].path if name in opened else draft
        fingerprints[name] = fingerprint(path) or str(path)
    settings: dict[str, Any] = {
        "target": str(target),
        "target_fingerprint": fingerprint(target),
        "drafts": fingerprints,
        "shapes": list(config.shapes) if drafts else [],
        "tasks": {task.name: task.fingerprint for task in tasks},
        "max_tokens": config.max_tokens,
        "limit": config.limit,
        "batch_size": engine.max_batch_size or DEFAULT_BATCH_SIZE,
        "seed": config.seed,
        "dtype": engine.dtype,
        "device": engine.device,
        "max_context": engine.max_context,
    }
    if config.chat_template_kwargs:
        settings["chat_template_kwargs"] = config.chat_template_kwargs

    # Other options of the engine. The seed decides nothing, since decoding is greedy.
    settings |= engine.model_dump(
        mode="json",
        exclude={*NAMED_OPTIONS, "seed", "chat_template"},
        exclude_defaults=True,
    )
    if engine.chat_template is not None:
        # The hash, since the file may change.
        template = read_chat_template(engine.chat_template)
        settings["chat_template"] = hashlib.sha256(template.encode()).hexdigest()[:16]
    return settings | _speed_settings()


def _default_engines(config: EngineConfig, num_settings: int, quiet: bool) -> MakeEngines:
    """``LLM`` for every draft, without recordings of cycles where they would be too many."""
    records = num_settings <= MOST_RECORDED
    if not records and not quiet:
        print(f"note: cycles on a CPU are not recorded, {num_settings} settings would keep too many.")
    return functools.partial(make_engines, config=config, records=records)


def _about(target: str | Path, engine: EvalEngine, command: str | None) -> dict[str, Any]:
    """Target, machine, versions, command and date of a run."""
    device = str(engine.target.embed_tokens.weight.device)
    return {
        "target": {
            "name": _public_name(target),
            "device": device,
            "dtype": engine.target.weight_format,
        },
        "machine": describe_machine(device),
        "versions": describe_versions(),
        "command": command or command_line(),
        "date": now(),
    }


def _finish(
    store: AnswerStore,
    runs: list[Setting],
    tasks: list[Task],
    drafts: dict[str, str],
    plots: bool,
    quiet: bool,
    round: ServerRound | None,
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
    if round is not None:
        # Servers are rows of the same table.
        records = round.store.records
        urls = {server.name: server.url for server in round.servers}
        summary["rows"] += server_rows(records, list(urls), [task.name for task in tasks])
        summary["servers"] = describe_servers(records, urls)
        paths["servers"] = str(round.store.path)
    if plots:
        picture = plot(summary, store.folder)
        if picture is not None:
            paths["plot"] = str(picture)
    summary["paths"] = paths
    write_json_atomically(store.folder / SUMMARY_FILE, summary)
    if not quiet:
        print(report(summary))
    return summary


def name_drafts(drafts: Sequence[str | Path], given: Sequence[str] | None = None) -> dict[str, str]:
    """Give every draft a short name, from its folder or id unless names are ``given``.

    Raises:
        UserError: there are not as many names as drafts, or two names or drafts are the same.
    """
    if given is None:
        given = _short_names(drafts)
    elif len(given) != len(drafts) or len(set(given)) < len(given):
        raise UserError(
            f"{len(given)} draft names were given for {len(drafts)} drafts.",
            "Give each draft a name of its own.",
        )
    return dict(zip(given, map(str, drafts), strict=True))


def _short_names(drafts: Sequence[str | Path]) -> list[str]:
    """As many last parts of each path or id as tell all drafts apart."""
    parts = [Path(draft).resolve().parts[1:] or (str(draft),) for draft in drafts]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        # "best" and "step-400" say little without the name of the run before them.
        vague = depth == 1 and any(name == "best" or name.startswith("step-") for name in names)
        if len(set(names)) == len(names) and not vague:
            return names
    if parts:
        raise UserError("A draft was given twice.", "Give every draft once.")
    return []


def _public_name(target: str | Path) -> str:
    """A local folder or file by its name alone, since its path on this machine is of no use to
    readers; any other target as it was given."""
    path = Path(target)
    return path.resolve().name if path.exists() else str(target)


def _speed_settings() -> dict[str, Any]:
    """Facts of the machine that decide speed, so that a run is not resumed on another one."""
    import torch

    return {"cpu": cpu_model(), "threads": torch.get_num_threads(), "torch": torch.__version__}
