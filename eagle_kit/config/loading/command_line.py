"""The print of a user's mistake, and the arguments of commands that declare a config by hand."""

import argparse
import sys

from eagle_kit.config.loading.flags import ConfigFlags, add_options
from eagle_kit.core.errors import UserError


def add_config(parser: argparse.ArgumentParser) -> None:
    """Declare ``CONFIG [key=value ...]``."""
    add_options(parser, ConfigFlags)


def print_error(error: UserError, where: str = "") -> None:
    """Print cause and remedy on a line each to standard error.

    Args:
        where: names one of several processes.
    """
    label = f"error in {where}" if where else "error"
    print(f"{label}: {error.cause}\n  -> {error.remedy}", file=sys.stderr, flush=True)
