"""Arguments of the commands that read a config, and the print of a user's mistake."""

import argparse
import sys

from eagle_kit.core.errors import UserError


def add_config(parser: argparse.ArgumentParser) -> None:
    """Declare ``CONFIG [key=value ...]``."""
    parser.add_argument(
        "config", help="YAML file, or the name of one that ships, such as smollm2-135m-eagle3"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that replace those of the file"
    )


def print_error(error: UserError, where: str = "") -> None:
    """Print cause and remedy on a line each to standard error.

    Args:
        where: names one of several processes.
    """
    label = f"error in {where}" if where else "error"
    print(f"{label}: {error.cause}\n  -> {error.remedy}", file=sys.stderr, flush=True)
