"""`eagle-kit pretrain CONFIG`: a small target from nothing, where the public ones are too large to try."""

import argparse

from eagle_kit.config.loading.command_line import add_config
from eagle_kit.core.process import INTERRUPTED


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``pretrain``."""
    add_config(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the last save")


def run(args: argparse.Namespace) -> int:
    """Train; exit code 130 when it was stopped by Ctrl-C or SIGTERM, having saved."""
    from eagle_kit.config.loading.loader import load_config
    from eagle_kit.config.pretrain import PretrainConfig
    from eagle_kit.train.pretrain import pretrain

    config = load_config(PretrainConfig, args.config, args.overrides)
    if not pretrain(config, resume=args.resume):
        return INTERRUPTED
    print(f"The target is in {config.output_dir}.")
    return 0
