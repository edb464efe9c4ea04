"""`eagle-kit tune DRAFT`: measure what shapes cost on this machine and what they accept."""

import argparse
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import Field, model_validator

from eagle_kit.cli.arguments import LOADING, RANKS, TargetFlag, chosen_model
from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.loading.flags import Flag, FlagsOf, add_options, options_of
from eagle_kit.core.errors import UserError

if TYPE_CHECKING:
    from eagle_kit.data.tasks.sets import Task
    from eagle_kit.engine.calibrate.policies import Tuned
    from eagle_kit.engine.llm import LLM

FLAGS = {
    "max_batch_size": "--batch-size",
    "kv_dtype": "--kv-dtype",
    "graph_mode": "--graph-mode",
    **LOADING,
    **RANKS,
}


class TaskSample(NamedTuple):
    """A task, and the prompts of it that are recorded, at most ``limit``."""

    whole: "Task"
    recorded: "Task"
    limit: int


class TuneFlags(TargetFlag):
    """Options of ``tune``."""

    draft: Annotated[str, Flag(metavar="DRAFT", is_positional=True)]
    """Folder, hub id or known name."""

    tasks: tuple[str, ...] = ("human_eval", "ours")
    """Tasks whose prompts are decoded, named as for eval."""

    limit: int = Field(default=32, ge=1)
    """Prompts of each task."""

    max_tokens: int = Field(default=64, ge=1)
    """Most tokens per response."""

    passes: int | None = Field(default=None, ge=1)
    """Passes over all batch sizes and contexts, each of which is timed as often; default 5. One pass is
    soonest done and trusts the machine to be as fast all the time.
    """

    seed: int = 0
    """Seed of the draw of prompts."""

    ship: bool = False
    """Also write tuning.json beside the draft's weights."""

    check: bool = False
    """Keep half of each task's prompts back, and compare the predictions with them, and with shapes and batch
    sizes that were not measured.
    """

    out: Path | None = None
    """File of what --check finds, as JSON."""

    engine: Annotated[EngineConfig, FlagsOf(FLAGS, "engine")] = EngineConfig()

    @model_validator(mode="after")
    def _go_together(self) -> "TuneFlags":
        if self.out is not None and not self.check:
            raise UserError("--out is of what --check finds, and that was not asked for.", "Add --check.")
        return self


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``tune``."""
    add_options(parser, TuneFlags)


def run(args: argparse.Namespace) -> int:
    """Measure, keep and print what is chosen."""
    options = options_of(args, TuneFlags)
    from eagle_kit.core.files import check_writable
    from eagle_kit.data.tasks.sets import load_tasks
    from eagle_kit.drafts.files.named_target import naming
    from eagle_kit.engine.llm import LLM

    if options.out is not None:
        check_writable(options.out.parent, "Give another file with --out.")

    # With --check at most half of a task's prompts are recorded.
    samples = []
    for task in load_tasks(options.tasks):
        limit = options.limit
        if options.check:
            limit = min(limit, max(1, len(task.prompts) // 2))
        samples.append(TaskSample(task, task.limited(limit, options.seed), limit))

    model = chosen_model(options.draft, options.target)
    with naming(model.named):
        llm = LLM(model.target, model.to_serve, options.engine)
    with closing(llm):
        return _tune(options, llm, samples)


def _tune(options: TuneFlags, llm: "LLM", samples: "list[TaskSample]") -> int:
    """Measure, print the result, and check it if that was asked for."""
    from eagle_kit.autotune.files import acceptance_path, costs_path, ship
    from eagle_kit.core.files import check_writable
    from eagle_kit.eval.tune import TuneOptions, tune
    from eagle_kit.eval.tune_check import held_out

    folder = llm.draft_folder
    if options.ship and folder is not None:
        check_writable(folder, "Copy the draft to a folder of yours.")
    tasks = [sample.recorded for sample in samples]
    tuned = tune(llm, TuneOptions(tasks, options.max_tokens, num_passes=options.passes))
    print(f"costs       {costs_path(tuned.costs.key)}")
    print(f"acceptance  {acceptance_path(tuned.acceptance.draft)}")
    if options.ship and folder is not None:
        print(f"shipped     {ship(folder, tuned.acceptance, tuned.costs)}")
    print_plan(llm, tuned)
    if options.check:
        others = []
        for sample in samples:
            task = held_out(sample.whole, sample.recorded, sample.limit, options.seed)
            if task is not None:
                others.append(task)
        _check(llm, tuned, others, options)
    return 0


def _check(llm: "LLM", tuned: "Tuned", tasks: "list[Task]", options: TuneFlags) -> None:
    from eagle_kit.core.files import write_json_atomically
    from eagle_kit.eval.tune_check import check
    from eagle_kit.report.environment import command_line, describe_machine, describe_versions, now

    # Predictions beside measurements.
    prompts = [prompt.given() for task in tasks for prompt in task.prompts]
    print(f"check       {len(prompts)} prompts that were not recorded")
    found = []
    for each in check(llm, tuned, prompts, options.max_tokens):
        print(f"  {each}", flush=True)
        found.append(each)

    # Errors, and the file.
    for unit in dict.fromkeys(each.unit for each in found):
        errors = [abs(each.error) for each in found if each.unit == unit]
        mean = sum(errors) / len(errors)
        print(f"{unit}: error at most {max(errors):.1%}, {mean:.1%} in the mean")
    if options.out is not None:
        data = {
            "command": command_line(),
            "date": now(),
            "machine": describe_machine(llm.target.embed_tokens.weight.device.type),
            "versions": describe_versions(),
            "prompts": len(prompts),
            "compared": [each.to_json() for each in found],
        }
        write_json_atomically(options.out, data)


def print_plan(llm: "LLM", tuned: "Tuned") -> None:
    """Print the fit and the choices for average text."""
    from eagle_kit.engine.calibrate.policies import policy_of

    engine = llm.engine("none")
    policy = policy_of(engine, tuned)
    costs = tuned.costs
    print(f"fit         {len(costs.timings)} cycles, error {costs.table.error:.0%} in the mean")

    # The choice for every batch size that is a power of two.
    sizes = [size for size in engine.config.batch_sizes if size & (size - 1) == 0]
    for choice in policy.plan(sizes):
        shapes = [str(shape) for shape in policy.shapes_at(choice.batch_size) if shape.steps]
        candidates = " ".join(shapes) or "plain decoding only"
        print(f"{choice}; from {candidates}")
