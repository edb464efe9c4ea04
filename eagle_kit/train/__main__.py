"""The command `eagle-kit train CONFIG`, or `accelerate launch -m eagle_kit.train CONFIG` from any folder.

`torchrun` and `deepspeed` launch it likewise; `train` at the repository's root is the same command.
"""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from eagle_kit.config.loading.command_line import add_config, print_error
from eagle_kit.config.loading.loader import load_config
from eagle_kit.config.loading.shipped import config_files
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import RankLost, UserError
from eagle_kit.train.parallel.launch import check_launcher, check_local_rank, is_main

GONE = ("Connection closed by peer", "Connection reset by peer", "[gloo/")
"""Words of gloo's errors when a peer is gone."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train a draft head; the exit code is 0 when done, 2 for a user's mistake, 130 when it was saved on the
    way: by a signal, or because ``--stop-after`` is over."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_intermixed_args(argv)
    try:
        if args.init is not None:
            from eagle_kit.train.first_config import write_first_config

            if args.overrides or args.resume or args.dry_run or args.plan:
                raise UserError(
                    "--init writes a config, and something else was asked for besides.",
                    "Give --init alone, and the rest with the config that it writes.",
                )
            write_first_config(Path(args.config), args.init)
            print(f"{args.config}: written; its first lines say what to do next")
            return 0
        if args.plan:
            from eagle_kit.train.plan.report import print_plans

            more = [word for word in args.overrides if "=" not in word]
            files = [file for word in (args.config, *more) for file in config_files(word)]
            print_plans(files, [word for word in args.overrides if "=" in word], args.gpu)
            return 0
        stop_after_s = None if args.stop_after is None else parse_duration(args.stop_after)
        if args.max_steps is not None and args.max_steps < 1:
            raise UserError(f"--max-steps is {args.max_steps}.", "Give at least one step.")
        config = load_config(TrainConfig, args.config, args.overrides)
        check_local_rank(args.local_rank, os.environ)
        check_launcher(os.environ, config.training)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # all processes of a machine read the same
            print_error(error, _process(os.environ))
        return 2
    from eagle_kit.train.run.loop import RunOptions, train

    options = RunOptions(
        resume=args.resume,
        max_steps=args.max_steps,
        stop_after_s=stop_after_s,
        dry_run=args.dry_run,
        arguments=(args.config, *args.overrides),
    )
    try:
        ending = train(config, options)
        # Of several processes only the main one says 130: a launcher ends the others when one does not say 0.
        return ending.exit_code if is_main(os.environ) else 0
    except UserError as error:
        print_error(error, _process(os.environ))
        return 2
    except Exception as error:
        if not _lost_another_process(error, os.environ):
            raise
        gone = UserError(
            "Another process of this run has ended.", "See what it says; then go on with --resume."
        )
        print_error(gone, _process(os.environ))
        return 1


def parse_duration(text: str) -> float:
    """``"9m"``, ``"90s"``, ``"1h30m"`` or plain seconds -> seconds. Raises UserError."""
    number = r"(?:(\d+(?:\.\d+)?)"
    parts = re.fullmatch(f"{number}h)?{number}m)?{number}s?)?", text)
    given = parts.groups() if parts else ()
    seconds = sum(float(count or 0) * unit for count, unit in zip(given, (3600, 60, 1), strict=False))
    if seconds <= 0:
        raise UserError(f"The duration {text!r} cannot be read.", "Write for example 9m, 90s or 1h30m.")
    return seconds


def _lost_another_process(error: Exception, environ: Mapping[str, str]) -> bool:
    """True when a collective failed because a peer is gone, which reports its own error."""
    import torch

    if environ.get("WORLD_SIZE", "1") == "1":
        return False

    return isinstance(error, torch.distributed.DistError | RankLost) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in GONE)
    )


def _process(environ: Mapping[str, str]) -> str:
    """Name of this process among several, for messages; empty for one alone."""
    count = environ.get("WORLD_SIZE", "1")
    return "" if count == "1" else f"process {environ.get('RANK', '0')} of {count}"


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``train``."""
    parser = argparse.ArgumentParser(
        prog="eagle-kit train", description="Train a draft head from a YAML config."
    )
    add_config(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint of output_dir, or begin where there is none",
    )
    parser.add_argument(
        "--max-steps", type=int, metavar="N", help="be done at step N; the schedule stays as configured"
    )
    parser.add_argument(
        "--stop-after",
        metavar="TIME",
        help="save after this long, e.g. 9m or 1h30m, and stop with exit code 130; --resume goes on",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the estimate of memory, disk and time, then stop"
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="without weights, data or network, print what one and eight GPUs would need; several configs "
        "make a table",
    )
    parser.add_argument(
        "--gpu", default="h100-80g", metavar="KIND", help="kind of GPU of --plan (default %(default)s)"
    )
    parser.add_argument(
        "--init", metavar="TARGET", help="write CONFIG, with comments, for a first head of this target"
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
