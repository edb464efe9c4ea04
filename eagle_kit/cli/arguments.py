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


def add_engine(parser: argparse.ArgumentParser) -> None:
    """``--algorithm --token-map --max-context --dtype --device``: how target and draft are loaded."""
    parser.add_argument(
        "--algorithm",
        default="auto",
        help="EAGLE3, EAGLE, STANDALONE, or NEXTN for the target's own modules; default what the draft says",
    )
    parser.add_argument(
        "--token-map", type=Path, metavar="FILE", help="target ids that an EAGLE draft may propose"
    )
    parser.add_argument("--max-context", type=int, metavar="N", help="most tokens of prompt and reply")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """``--temperature --top-k --top-p --min-p --seed --stop``: the distribution that replies are sampled
    from."""
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default %(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="most likely tokens kept; 0 is all")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="probability kept")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="share of the best token's")
    parser.add_argument("--seed", type=int, metavar="N", help="of the draws; without it they differ")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the reply")


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise UserError when one of the named numbers was given and is below one."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}.", "Give a whole number of at least one.")
