"""`eagle-kit tune DRAFT`: measure what shapes cost on this machine and what they accept."""

import argparse
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_kit.cli.arguments import DEFAULT_TARGET, LOADING, RANKS, add_flags, options_of
from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError

if TYPE_CHECKING:
    from eagle_kit.data.tasks.sets import Task
    from eagle_kit.serve.llm import LLM
    from eagle_kit.serve.tune import Tuned

FLAGS = {
    "max_batch_size": "--batch-size",
    "kv_dtype": "--kv-dtype",
    "graph_mode": "--graph-mode",
    **LOADING,
    **RANKS,
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``tune``."""
    parser.add_argument("draft", metavar="DRAFT", help="a folder, a hub id or a known name")
    parser.add_argument("--target", help="of the draft, if not its own")
    parser.add_argument(
        "--tasks", nargs="+", default=["human_eval", "ours"], metavar="TASK", help="default %(default)s"
    )
    parser.add_argument(
        "--limit", type=int, default=32, metavar="N", help="prompts of each task (default %(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="per reply (default %(default)s)"
    )
    parser.add_argument(
        "--passes",
        type=int,
        metavar="N",
        help="over all batch sizes and contexts, each of which is timed as often (default 5); one is soonest "
        "done and trusts the machine to be as fast all the time",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw of prompts")
    parser.add_argument(
        "--ship", action="store_true", help="also write tuning.json beside the draft's weights"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="keep half of each task's prompts back, and compare the predictions with them, and with shapes "
        "and batch sizes that were not measured",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="of what --check finds, as JSON")
    add_flags(parser, EngineConfig, FLAGS, max_batch_size=8)


def run(args: argparse.Namespace) -> int:
    """Measure, keep and print what is chosen."""
    from eagle_kit.core.files import check_writable
    from eagle_kit.data.tasks.sets import load_tasks
    from eagle_kit.serve.api.startup import find_model
    from eagle_kit.serve.llm import LLM

    if args.passes is not None and args.passes < 1:
        raise UserError(f"--passes is {args.passes}.", "Give at least 1.")
    if args.out and not args.check:
        raise UserError("--out is of what --check finds, and that was not asked for.", "Add --check.")
    if args.out:
        check_writable(args.out.parent, "Give another file with --out.")
    config = options_of(args, EngineConfig, FLAGS)
    whole = load_tasks(args.tasks)
    limits = [max(1, min(args.limit, len(task.prompts) // 2)) if args.check else args.limit for task in whole]
    tasks = [task.limited(limit, args.seed) for task, limit in zip(whole, limits, strict=True)]
    model = find_model(args.draft, args.target, DEFAULT_TARGET)
    with closing(LLM(model.target, model.draft, config)) as llm:
        return _tune(args, llm, list(zip(whole, tasks, limits, strict=True)))


def _tune(args: argparse.Namespace, llm: "LLM", triples: "list[tuple[Task, Task, int]]") -> int:
    from eagle_kit.checkpoints.draft import resolve_draft
    from eagle_kit.core.files import check_writable
    from eagle_kit.eval.tune import TuneOptions, tune
    from eagle_kit.eval.tune_check import held_out
    from eagle_kit.tuning.files import acceptance_path, costs_path, ship

    folder = resolve_draft(args.draft, llm.target.config)
    if args.ship:
        check_writable(folder, "Copy the draft to a folder of yours.")
    options = TuneOptions([task for _, task, _ in triples], args.max_tokens, num_passes=args.passes)
    tuned = tune(llm, options)
    print(f"costs       {costs_path(tuned.costs.key)}")
    print(f"acceptance  {acceptance_path(tuned.acceptance.draft)}")
    if args.ship:
        print(f"shipped     {ship(folder, tuned.acceptance, tuned.costs)}")
    print_plan(llm, tuned)
    if args.check:
        rest = [held_out(task, recorded, limit, args.seed) for task, recorded, limit in triples]
        _check(llm, tuned, [task for task in rest if task], args)
    return 0


def _check(llm: "LLM", tuned: "Tuned", tasks: "list[Task]", args: argparse.Namespace) -> None:
    from eagle_kit.core.files import write_json_atomically
    from eagle_kit.eval.tune_check import check
    from eagle_kit.report.environment import command_line, describe_machine, describe_versions, now

    prompts = [prompt.given() for task in tasks for prompt in task.prompts]
    print(f"check       {len(prompts)} prompts that were not recorded")
    found = []
    for each in check(llm, tuned, prompts, args.max_tokens):
        print(f"  {each}", flush=True)
        found.append(each)
    for unit in dict.fromkeys(each.unit for each in found):
        errors = [abs(each.error) for each in found if each.unit == unit]
        print(f"{unit}: error at most {max(errors):.1%}, {sum(errors) / len(errors):.1%} in the mean")
    if args.out:
        data = {
            "command": command_line(),
            "date": now(),
            "machine": describe_machine(llm.target.embed_tokens.weight.device.type),
            "versions": describe_versions(),
            "prompts": len(prompts),
            "compared": [each.to_json() for each in found],
        }
        write_json_atomically(args.out, data)


def print_plan(llm: "LLM", tuned: "Tuned") -> None:
    """Print the fit and the choices for average text."""
    from eagle_kit.serve.tune import policy_of

    engine = llm.engine("none")
    policy = policy_of(engine, tuned)
    costs = tuned.costs
    print(f"fit         {len(costs.timings)} cycles, error {costs.table.error:.0%} in the mean")
    sizes = [size for size in engine.config.batch_sizes if size & (size - 1) == 0]
    for choice in policy.plan(sizes):
        menu = " ".join(str(shape) for shape in policy.menu(choice.batch_size) if shape.steps)
        print(f"{choice}; from {menu or 'plain decoding only'}")
