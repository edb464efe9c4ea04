"""`eagle-kit eval`: accept length and speed-up of drafts over tasks, beside plain decoding in one run."""

import argparse
from pathlib import Path

from eagle_kit.cli.arguments import (
    LOADING,
    RANKS,
    add_flags,
    add_target,
    add_tracking,
    chosen_target,
    help_text,
    json_object,
    options_of,
    tracking_of,
)
from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.eval import EvalConfig

FLAGS = {
    "tasks": "--tasks",
    "shapes": "--shapes",
    "max_tokens": "--max-tokens",
    "limit": "--limit",
    "seed": "--seed",
    "plots": "--no-plots",
}
ENGINE_FLAGS = {"max_batch_size": "--batch-size", **LOADING, **RANKS}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``eval``."""
    add_target(parser)
    parser.add_argument(
        "--draft",
        nargs="+",
        action="extend",
        default=[],
        metavar="DRAFT",
        help="folders, hub ids or known names",
    )
    parser.add_argument("--name", nargs="+", action="extend", metavar="NAME", help="names of the drafts")
    add_flags(parser, EvalConfig, FLAGS)
    parser.add_argument(
        "--chat-template-kwargs", metavar="JSON", help=help_text(EvalConfig, "chat_template_kwargs")
    )
    add_flags(parser, EngineConfig, ENGINE_FLAGS, max_batch_size=1)
    add_tracking(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("results/eval"), metavar="DIR", help="default %(default)s"
    )


def run(args: argparse.Namespace) -> int:
    """Measure; exit code 1 when an answer with speculation differs from the plain one."""
    from eagle_kit.eval.runner import name_drafts, run_eval
    from eagle_kit.eval.tracking import log_evaluation

    tracking = tracking_of(args)
    kwargs = json_object(args.chat_template_kwargs, "--chat-template-kwargs", '{"enable_thinking": false}')
    engine = options_of(args, EngineConfig, ENGINE_FLAGS)
    config = options_of(args, EvalConfig, FLAGS, engine=engine, chat_template_kwargs=kwargs)
    target = chosen_target(args.target, args.draft)
    summary = run_eval(target, name_drafts(args.draft, args.name), config, out=args.out)
    log_evaluation(summary, tracking, args.out)
    return 1 if summary["greedy_identical"] is False else 0
