"""``run_eval``: decode the missing answers of an evaluation, then summary, plot and report."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from eagle_kit.eval.engines import (
    EvalEngine,
    MakeEngines,
    NamedSetting,
    check_prompts,
    make_engines,
    open_drafts,
    plain_options,
)
from eagle_kit.eval.promises import Promised, Promises, promised
from eagle_kit.eval.report import plot, report
from eagle_kit.eval.servers.measured_server import MeasuredServer
from eagle_kit.eval.servers.server_answers import ServerAnswerStore
from eagle_kit.eval.servers.server_checks import LabelledPrompt
from eagle_kit.eval.servers.server_round import ServerRound
from eagle_kit.eval.servers.server_rows import describe_servers, server_rows
from eagle_kit.eval.summary import summarise
from eagle_kit.report.environment import command_line, cpu_model, describe_machine, describe_versions, now
from eagle_kit.report.plots import require_matplotlib

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
    settings: Sequence[NamedSetting] = (),
) -> dict[str, Any]:
    """Measure drafts and other settings on tasks against plain decoding.

    Writes answers.jsonl (as it goes), settings.json, summary.json and the plot into ``out`` and prints the
    report. Called again with the same ``out`` and options, it continues where it was interrupted.

    Args:
        target: a local folder, a hub id or a known name.
        drafts: folders, hub ids or known names of drafts, by the names of :func:`name_drafts`; each is
            measured with the options and shapes of ``config``. Without drafts and settings plain decoding
            alone is measured.
        out: folder of the results.
        quiet: no progress bar and no report on the terminal.
        command: kept in the summary; default the process's own command line.
        engines: makes the engines from (target, settings); default ``LLM``.
        servers: running servers of the same target, which get the same prompts as token ids.
        settings: drafts with options of their own, and what drafts without a model, such as n-grams.

    Returns:
        The summary, see summary.summarise; ``paths`` in it names the files.

    Raises:
        UserError: a bad task or draft, an ``out`` that holds a run with other options, or a server that
            has no metrics, another model or too short a context.
    """
    if config.plots:
        require_matplotlib("give --no-plots")

    # Every draft is a setting. Open the drafts before the target is loaded.
    engine = config.engine.replace(max_batch_size=config.engine.batch_size)
    measured = [NamedSetting(name, str(draft), engine, config.shapes) for name, draft in drafts.items()]
    for setting in settings:
        own_size = setting.engine.max_batch_size or engine.max_batch_size
        measured.append(replace(setting, engine=setting.engine.replace(max_batch_size=own_size)))
    if engines is None:
        measured = open_drafts(target, measured)
    urls = {server.name: server.url for server in servers}
    _check_names(measured, urls)

    # Read the tasks, and describe the run.
    runs = [PLAIN]
    for setting in measured:
        runs += [Setting(setting.name, shape) for shape in setting.shapes]
    tasks = []
    for task in load_tasks(config.tasks):
        limited = task.limited(config.limit, config.seeds[0])
        tasks.append(limited.given(config.chat_template_kwargs))
    described = _settings(target, drafts, measured, config, engine, tasks)
    if urls:
        described["servers"] = urls

    with sole_writer(Path(out), Path(out) / LOCK):
        # Decode what an earlier run with the same settings has not.
        store = AnswerStore(Path(out), described, runs)
        promises: dict[str | None, Promised] = {}
        for setting in measured:
            promises[setting.name] = promised(setting, plain_options(engine))
        params = SamplingParams(max_tokens=config.max_tokens, top_p=config.top_p)
        round = ServerRound(servers, ServerAnswerStore(Path(out))) if servers else None
        decoder = Decoder(
            tasks,
            runs,
            config.rounds,
            params,
            engine.batch_size,
            store,
            promises,
            show_progress=not quiet,
            servers=round,
        )
        if decoder.num_pending:
            for server in servers:
                _ = server.facts  # refused before the target is loaded
            if engines is None:
                engines = _default_engines(plain_options(engine), len(runs), quiet)
            names = [None, *(setting.name for setting in measured)]
            made = dict(zip(names, engines(str(target), measured), strict=True))
            plain = made[None]
            check_prompts(plain, tasks)
            if not (quiet or has_chat_template(plain.tokenizer)):
                print(NO_TEMPLATE)
            if round is not None:
                _start_servers(round, target, plain, tasks, engine.batch_size, config.max_tokens)
            store.start(_about(target, plain, command))
            try:
                decoder.run(made)
            finally:
                plain.close()

        # Summarise all answers.
        paths = {name: str(path) for name, path in drafts.items()}
        return _finish(store, runs, tasks, promises, paths, config, quiet, round)


def _check_names(settings: Sequence[NamedSetting], urls: Mapping[str, str]) -> None:
    """Raise UserError for a name that two settings have, or a setting and a server."""
    names = [setting.name for setting in settings]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"Two settings have the name {twice}.", "Give each a name of its own.")
    if urls.keys() & set(names):
        raise UserError("A server has the name of a draft.", "Give each a name of its own with --name.")


def _start_servers(
    round: ServerRound,
    target: str | Path,
    engine: EvalEngine,
    tasks: Sequence[Task],
    batch_size: int,
    max_tokens: int,
) -> None:
    """Check the servers on every first turn, and warm them up on the first prompts."""
    prompts = []
    for task in tasks:
        for prompt in task.prompts:
            label = f"The prompt {prompt.id} of {task.name}"
            prompts.append(LabelledPrompt(label, engine.tokenize_task(prompt.given())))
    warm_up = [prompt.ids for prompt in prompts[:batch_size]]
    round.start(target, engine, prompts, warm_up, max_tokens)


def _settings(
    target: str | Path,
    drafts: Mapping[str, str | Path],
    measured: Sequence[NamedSetting],
    config: EvalConfig,
    engine: EngineConfig,
    tasks: Sequence[Task],
) -> dict[str, Any]:
    """Everything that decides the answers and their speed; a run is not resumed with other
    settings.

    Args:
        drafts: those among ``measured`` that have the options of ``engine``.
    """
    fingerprints = {setting.name: _draft_fingerprint(setting) for setting in measured}
    settings: dict[str, Any] = {
        "target": str(target),
        "target_fingerprint": fingerprint(target),
        "drafts": {name: fingerprints[name] for name in drafts},
        "shapes": list(config.shapes) if drafts else [],
        "tasks": {task.name: task.fingerprint for task in tasks},
        "max_tokens": config.max_tokens,
        "limit": config.limit,
        "batch_size": engine.batch_size,
        "seed": config.seeds[0],
        "dtype": engine.dtype,
        "device": engine.device,
        "max_context": engine.max_context,
    }

    # Sampling. Greedy decoding reads the first seed only.
    if any(config.temperatures):
        settings["temperatures"] = list(config.temperatures)
        settings["seeds"] = list(config.seeds)
        settings["top_p"] = config.top_p
    if config.chat_template_kwargs:
        settings["chat_template_kwargs"] = config.chat_template_kwargs

    # Other options of the engine, and the settings that have their own.
    settings |= _other_options(engine, NAMED_OPTIONS)
    named = {}
    for setting in measured:
        if setting.name not in drafts:
            named[setting.name] = {
                "draft": fingerprints[setting.name],
                "shapes": list(setting.shapes),
                **_other_options(setting.engine, ("shape",)),
            }
    if named:
        settings["settings"] = named
    return settings | _speed_settings()


def _draft_fingerprint(setting: NamedSetting) -> str | None:
    """Fingerprint of a setting's draft; its name where it is no folder, None where there is none."""
    if setting.draft is None:
        return None
    path = setting.draft if isinstance(setting.draft, str | Path) else setting.draft.path
    return fingerprint(path) or str(path)


def _other_options(engine: EngineConfig, named: Sequence[str]) -> dict[str, Any]:
    """Options of an engine that differ from their defaults, without the ``named`` ones and the seed, since
    every response that is sampled has one of its own."""
    options = engine.model_dump(mode="json", exclude={*named, "seed", "chat_template"}, exclude_defaults=True)
    if engine.chat_template is not None:
        # The hash, since the file may change.
        template = read_chat_template(engine.chat_template)
        options["chat_template"] = hashlib.sha256(template.encode()).hexdigest()[:16]
    return options


def _default_engines(config: EngineConfig, num_settings: int, quiet: bool) -> MakeEngines:
    """``LLM`` for every setting, without recordings of cycles where they would be too many."""
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
    promises: Promises,
    drafts: dict[str, str],
    config: EvalConfig,
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
        **summarise(store.answers, runs, [task.name for task in tasks], promises),
    }
    checks = (summary["greedy_identical"], summary["seeded_identical"], summary["distribution_kept"])
    summary["passed"] = False not in checks
    paths = {"answers": str(store.folder / ANSWERS_FILE), "summary": str(store.folder / SUMMARY_FILE)}
    if round is not None:
        # Servers are rows of the same table.
        records = round.store.records
        urls = {server.name: server.url for server in round.servers}
        for temperature in config.temperatures:
            numbers = [each.number for each in config.rounds if each.temperature == temperature]
            names = [task.name for task in tasks]
            summary["rows"] += server_rows(records, list(urls), names, temperature, numbers)
        summary["servers"] = describe_servers(records, urls)
        paths["servers"] = str(round.store.path)
    if config.plots:
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
