"""Arguments that several commands share."""

import argparse
from pathlib import Path

from eagle_kit.core.errors import UserError
from eagle_kit.core.request import SamplingParams

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
    """``--temperature --top-k --top-p --min-p --seed --stop``: the distribution of replies."""
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default %(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="most likely tokens kept; 0 is all")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="probability kept")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="share of the best token's")
    parser.add_argument("--seed", type=int, metavar="N", help="of the draws; without it they differ")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the reply")


def add_shard(parser: argparse.ArgumentParser, parts: str) -> None:
    """``--shard I/N``: the part of the work that this process does."""
    parser.add_argument(
        "--shard",
        type=_shard,
        default=(0, 1),
        metavar="I/N",
        help=f"the I-th of 0..N-1 parts of the {parts}: N processes share the work",
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Parameters of a reply, from ``--max-tokens`` and the flags of :func:`add_sampling`."""
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=tuple(args.stop),
    )


def _shard(text: str) -> tuple[int, int]:
    """``0/2`` as numbers; argparse turns a ValueError into its own message."""
    part, parts = map(int, text.split("/"))
    if not 0 <= part < parts:
        raise argparse.ArgumentTypeError(f"{text} is none: count the shards of n from 0/n to (n-1)/n")
    return part, parts


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise UserError when one of the named numbers was given and is below one."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}.", "Give a whole number of at least one.")
