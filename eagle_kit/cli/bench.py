"""`eagle-kit bench`: speed and acceptance of a head by batch size; `bench serve`: as a server counts."""

import argparse
import os
from pathlib import Path

from eagle_kit.cli.arguments import (
    LOADING,
    add_flags,
    add_target,
    check_positive,
    chosen_target,
    options_of,
)
from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch reads it on import; its profiler prints without

AUTO = "auto"
NEEDS_DRAFT = "Give a head's folder, hub id or known name with --draft."


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``bench`` and of ``bench serve``."""
    parser.set_defaults(kind=None)
    add_target(parser)
    parser.add_argument("--draft", metavar="DRAFT", help="folder, hub id or known name of a head")
    parser.add_argument(
        "--tasks", nargs="+", default=["ours"], metavar="TASK", help="names or JSONL files (%(default)s)"
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["3,1,4", "5,4,16", AUTO],
        metavar="SHAPE",
        help="steps,topk,tokens, or auto (%(default)s)",
    )
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[1, 8], metavar="B", help="batch sizes (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="interleaved rounds (%(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="of a reply in a round (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of prompts")
    parser.add_argument("--out", type=Path, metavar="JSON", help="file for the figures")
    add_flags(parser, EngineConfig, LOADING)

    kinds = parser.add_subparsers(dest="kind", metavar="{serve}")
    text = "Tokens and acceptance that a running server counts until Ctrl-C, or while COMMAND runs."
    serve = kinds.add_parser("serve", help=text, description=text, argument_default=argparse.SUPPRESS)
    serve.add_argument(
        "--base-url", metavar="URL", required=True, help="server with /metrics, as http://127.0.0.1:8000"
    )
    serve.add_argument("--out", type=Path, metavar="JSON", help="file for the figures")
    serve.add_argument("driver", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="drives the server")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write the figures."""
    if args.kind == "serve":
        from eagle_kit.bench.acceptance import count

        command = args.driver[1:] if args.driver[:1] == ["--"] else args.driver
        return count(args.base_url, command, args.out)

    # What is wrong is refused before a model is loaded.
    if args.draft is None:
        raise UserError("bench measures a head, and none was given.", NEEDS_DRAFT)
    check_positive(args, "rounds", "max_tokens")
    if min(args.batches) < 1:
        raise UserError(f"--batches has {min(args.batches)}.", "Give whole numbers of at least one.")
    for shape in args.shapes:
        if shape != AUTO:
            SpecShape.parse(shape)

    from eagle_kit.bench.speed import SpeedOptions, measure

    options = SpeedOptions(
        tasks=tuple(args.tasks),
        batch_sizes=tuple(args.batches),
        shapes=tuple(dict.fromkeys(args.shapes)),
        rounds=args.rounds,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    engine = options_of(args, EngineConfig, LOADING)
    return measure(chosen_target(args.target, [args.draft]), args.draft, engine, options, args.out)
