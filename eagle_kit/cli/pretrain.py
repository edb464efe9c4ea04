"""`eagle-kit pretrain CONFIG`: a small target from nothing, where the public ones are too large to try."""

import argparse

from eagle_kit.config.loading.flags import ConfigFlags, add_options, options_of
from eagle_kit.core.process import INTERRUPTED


class PretrainFlags(ConfigFlags):
    """Options of ``pretrain``."""

    resume: bool = False
    """Go on from the last save."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``pretrain``."""
    add_options(parser, PretrainFlags)


def run(args: argparse.Namespace) -> int:
    """Train; exit code 130 when it was stopped by Ctrl-C or SIGTERM, having saved."""
    options = options_of(args, PretrainFlags)
    from eagle_kit.config.loading.loader import load_config
    from eagle_kit.config.pretrain import PretrainConfig
    from eagle_kit.train.pretrain import pretrain

    config = load_config(PretrainConfig, options.config, options.overrides)
    if not pretrain(config, resume=options.resume):
        return INTERRUPTED
    print(f"The target is in {config.output_dir}.")
    return 0
