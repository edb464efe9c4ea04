"""The command line of the recipes: `study` compares ways of training, `pretrain` makes a small model."""

import argparse
import sys
from collections.abc import Sequence

from eagle_kit.cli.app import parse_with_overrides, report_errors
from eagle_kit.config.loading.flags import ConfigFlags, add_options, options_of
from eagle_kit.config.loading.loader import load_config
from eagle_kit.core.process import INTERRUPTED
from recipes import study
from recipes.pretrain_config import PretrainConfig


class PretrainFlags(ConfigFlags):
    """Options of ``pretrain``."""

    resume: bool = False
    """Go on from the last save."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a recipe; returns the exit code: 0 done, 2 a mistake of the user, 130 interrupted, having saved."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse_with_overrides(build_parser(), words)
    return report_errors(lambda: args.run(args))


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of both commands."""
    parser = argparse.ArgumentParser(
        prog="python recipes", description="Make this repository's own heads and targets."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    text = "Make a study's data, train every arm with every seed, measure all heads together."
    study_parser = commands.add_parser("study", help="compare ways of training over seeds", description=text)
    study.configure(study_parser)
    study_parser.set_defaults(run=study.run)

    text = "Train a small model from nothing, or from some layers of a larger one that it drafts for."
    pretrain_parser = commands.add_parser("pretrain", help="train a small model", description=text)
    add_options(pretrain_parser, PretrainFlags)
    pretrain_parser.set_defaults(run=_pretrain)
    return parser


def _pretrain(args: argparse.Namespace) -> int:
    """Train; exit code 130 when it was stopped by Ctrl-C or SIGTERM, having saved."""
    from recipes.pretrain import pretrain

    flags = options_of(args, PretrainFlags)
    config = load_config(PretrainConfig, flags.config, flags.overrides)
    if not pretrain(config, resume=flags.resume):
        return INTERRUPTED
    print(f"The model is in {config.output_dir}.")
    return 0
