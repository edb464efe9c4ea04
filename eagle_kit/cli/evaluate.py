"""`eagle-kit eval`: accept length and speed-up of drafts over tasks, beside plain decoding in one run."""

import argparse
from pathlib import Path
from typing import Annotated

from eagle_kit.cli.arguments import (
    LOADING,
    RANKS,
    TargetFlag,
    TrackingFlag,
    chosen_target,
    say_target,
    server_key,
    tracking_of,
)
from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.eval import EvalConfig
from eagle_kit.config.loading.flags import Flag, FlagsOf, add_options, options_of

FLAGS = {
    "tasks": "--tasks",
    "shapes": "--shapes",
    "max_tokens": "--max-tokens",
    "limit": "--limit",
    "seed": "--seed",
    "plots": "--no-plots",
    "chat_template_kwargs": "--chat-template-kwargs",
}
ENGINE_FLAGS = {"max_batch_size": "--batch-size", **LOADING, **RANKS}


class EvalOptions(TrackingFlag, TargetFlag):
    """Options of ``eval``."""

    draft: Annotated[tuple[str, ...], Flag(metavar="DRAFT")] = ()
    """Folders, hub ids or known names."""

    name: Annotated[tuple[str, ...] | None, Flag(metavar="NAME")] = None
    """Names of the drafts, then of the servers."""

    base_url: Annotated[tuple[str, ...], Flag(metavar="URL", is_repeated=True)] = ()
    """Running server of vLLM, SGLang or ours with the same target, which gets the same prompts; may be given
    several times. Its key is read from $EAGLE_KIT_API_KEY or $OPENAI_API_KEY.
    """

    evaluation: Annotated[EvalConfig, FlagsOf(FLAGS)] = EvalConfig()

    engine: Annotated[EngineConfig, FlagsOf(ENGINE_FLAGS, "engine")] = EngineConfig(max_batch_size=1)

    out: Annotated[Path, Flag(metavar="DIR")] = Path("results/eval")
    """Folder of the results."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``eval``."""
    add_options(parser, EvalOptions)


def run(args: argparse.Namespace) -> int:
    """Measure; exit code 1 when an answer with speculation differs from the plain one."""
    options = options_of(args, EvalOptions)
    from eagle_kit.drafts.files.named_target import naming
    from eagle_kit.eval.runner import name_drafts, run_eval
    from eagle_kit.eval.servers.naming import name_servers
    from eagle_kit.eval.servers.server_checks import served_target
    from eagle_kit.eval.tracking import log_evaluation

    tracking = tracking_of(options)
    config = options.evaluation.replace(engine=options.engine)

    # Names of drafts, then of servers.
    draft_names = options.name
    server_names = None
    if options.name is not None and options.base_url:
        draft_names = options.name[: len(options.draft)]
        server_names = options.name[len(options.draft) :]
    drafts = name_drafts(options.draft, draft_names)
    servers = name_servers(options.base_url, server_names, server_key())

    # The target: the one given, the drafts', or the servers'.
    if servers and options.target is None and not options.draft:
        target = served_target(servers)
        say_target(target)
    else:
        target = chosen_target(options.target, options.draft)
    with naming(target):
        summary = run_eval(target.name, drafts, config, out=options.out, servers=servers)
    log_evaluation(summary, tracking, options.out)
    return 1 if summary["greedy_identical"] is False else 0
