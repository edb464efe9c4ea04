"""The print of a user's mistake."""

import sys

from eagle_kit.core.errors import UserError


def print_error(error: UserError, where: str = "") -> None:
    """Print cause and remedy on a line each to standard error.

    Args:
        where: names one of several processes.
    """
    label = f"error in {where}" if where else "error"
    print(f"{label}: {error.cause}\n  -> {error.remedy}", file=sys.stderr, flush=True)
