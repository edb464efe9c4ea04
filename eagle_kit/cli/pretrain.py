"""`eagle-kit pretrain CONFIG`: a small target from nothing, where the public ones are too large to try."""

import argparse

from eagle_kit.config.loading.command_line import add_config
from eagle_kit.core.errors import UserError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``pretrain``."""
    add_config(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the last save")
    parser.add_argument("--minutes", type=float, metavar="M", help="save and stop after them")


def run(args: argparse.Namespace) -> int:
    """Train; exit code 0 when it is done or was stopped by its time, having saved."""
    from eagle_kit.config.loading.loader import load_config
    from eagle_kit.config.pretrain import PretrainConfig
    from eagle_kit.train.pretrain import pretrain

    if args.minutes is not None and args.minutes <= 0:
        raise UserError(f"--minutes is {args.minutes}.", "Give a number above 0.")
    folder = pretrain(
        load_config(PretrainConfig, args.config, args.overrides), resume=args.resume, minutes=args.minutes
    )
    if folder is not None:
        print(f"The target is in {folder}.")
    return 0
