"""Arguments that several commands share."""

import argparse
from pathlib import Path

from eagle_kit.core.errors import UserError

DEFAULT_TARGET = "smollm2-135m-instruct"


def add_target(parser: argparse.ArgumentParser) -> None:
    """``--target``: folder, hub id or known name."""
    parser.add_argument(
        "--target", default=DEFAULT_TARGET, help="folder, hub id or known name (default %(default)s)"
    )


def add_decoding(parser: argparse.ArgumentParser, *, max_tokens: int, batch_size: int) -> None:
    """``--draft --shape --max-tokens --batch-size``: decoding with at most one draft."""
    parser.add_argument(
        "--draft", type=Path, metavar="DIR", help="draft checkpoint; without it decoding is plain"
    )
    parser.add_argument(
        "--shape", help="speculation shape steps,topk,tokens such as 4,1,5 or 5,4,16, or none"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help="per reply (default %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=batch_size, metavar="B", help="replies decoded together"
    )


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise UserError when one of the named numbers was given and is below one."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}.", "Give a whole number of at least one.")
