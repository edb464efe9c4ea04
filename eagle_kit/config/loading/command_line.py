"""What the commands that read a config share: its arguments, and how a mistake of the user is printed."""

import argparse
import sys

from eagle_kit.core.errors import UserError


def add_config(parser: argparse.ArgumentParser) -> None:
    """``CONFIG [key=value ...]``."""
    parser.add_argument("config", help="YAML file, see configs/")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that replace those of the file"
    )


def print_error(error: UserError, where: str = "") -> None:
    """Cause and remedy on a line each, on standard error.

    Args:
        where: names one of several processes.
    """
    label = f"error in {where}" if where else "error"
    print(f"{label}: {error.cause}\n  -> {error.remedy}", file=sys.stderr, flush=True)
