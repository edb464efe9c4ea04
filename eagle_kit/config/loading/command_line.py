"""Printing of a user's mistake."""

import sys

from eagle_kit.core.errors import UserError


def print_error(error: UserError, where: str = "") -> None:
    """Print cause and remedy to standard error, a line each.

    Args:
        where: name of the process, if there are several.
    """
    label = f"error in {where}" if where else "error"
    print(f"{label}: {error.cause}\n  -> {error.remedy}", file=sys.stderr, flush=True)
