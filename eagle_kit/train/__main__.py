"""The command `eagle-kit train CONFIG`, or `accelerate launch -m eagle_kit.train CONFIG` from any folder.

`torchrun` and `deepspeed` launch it likewise; `train` at the repository's root is the same command.
"""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from eagle_kit.config.loading.command_line import print_error
from eagle_kit.config.loading.flags import ConfigFlags, Flag, Parser, add_options, options_of
from eagle_kit.config.loading.loader import load_config
from eagle_kit.config.loading.shipped import config_files
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import RankLost, UserError
from eagle_kit.core.gpus import PLANNED_GPU
from eagle_kit.core.process import expand_segments
from eagle_kit.core.switches import disabled_parts
from eagle_kit.train.parallel.launch import check_launcher, check_local_rank, is_main

GONE = ("Connection closed by peer", "Connection reset by peer", "[gloo/")
"""Parts of gloo's error messages after another process has ended."""


class TrainFlags(ConfigFlags):
    """Options of ``train``."""

    resume: bool = False
    """Go on from the last checkpoint of output_dir, or begin where there is none."""

    max_steps: int | None = Field(default=None, ge=1)
    """Be done at step N; the schedule stays as configured."""

    stop_after: Annotated[str | None, Flag(metavar="TIME")] = None
    """Save after this long, e.g. 9m or 1h30m, and stop with exit code 130; --resume goes on."""

    dry_run: bool = False
    """Print the estimate of memory, disk and time, then stop."""

    plan: bool = False
    """Without weights, data or network, print what one and eight GPUs would need; several configs make a
    table.
    """

    gpu: Annotated[str, Flag(metavar="KIND")] = PLANNED_GPU
    """Kind of GPU of --plan."""

    init: Annotated[str | None, Flag(metavar="TARGET")] = None
    """Write CONFIG, with comments, for a first head of this target."""

    @model_validator(mode="after")
    def _go_together(self) -> "TrainFlags":
        if "gpu" in self.model_fields_set and not self.plan:
            raise UserError("--gpu is of --plan, which was not given.", "Give both, or neither.")
        if self.init is not None and (self.overrides or self.resume or self.dry_run or self.plan):
            raise UserError(
                "--init writes a config, and something else was asked for besides.",
                "Give --init alone, and the rest with the config that it writes.",
            )
        return self


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``train``.

    Returns:
        Exit code: 0 if the run is done, 130 if a signal or ``--stop-after`` stopped it after a save, 2 for a
        user's mistake, 1 if another process of the run ended.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        disabled_parts()  # raises UserError for an unknown name
        args = build_parser().parse_intermixed_args(argv)
        options = options_of(args, TrainFlags)

        # --init writes a config, and --plan prints; neither trains.
        if options.init is not None:
            from eagle_kit.train.first_config import write_first_config

            write_first_config(Path(options.config), options.init)
            print(f"{options.config}: written; its first lines say what to do next")
            return 0
        if options.plan:
            from eagle_kit.train.plan.report import print_plans

            files = [*config_files(options.config)]
            settings = []
            for word in options.overrides:
                if "=" in word:
                    settings.append(word)
                else:
                    files += config_files(word)
            print_plans(files, settings, options.gpu)
            return 0

        # The run.
        stop_after_s = None
        if options.stop_after is not None:
            stop_after_s = parse_duration(options.stop_after)
        config = load_config(TrainConfig, options.config, options.overrides)
        check_local_rank(args.local_rank, os.environ)
        check_launcher(os.environ, config.training)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # all processes of a machine read the same
            print_error(error, _process(os.environ))
        return 2

    # Train.
    expand_segments()
    from eagle_kit.train.run.loop import RunOptions, train

    run = RunOptions(
        resume=options.resume,
        max_steps=options.max_steps,
        stop_after_s=stop_after_s,
        dry_run=options.dry_run,
        arguments=(options.config, *options.overrides),
    )
    try:
        ending = train(config, run)
        # Only the main process returns 130: a launcher ends the other processes if one does not return 0.
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
    """Parse a duration such as ``"9m"``, ``"90s"``, ``"1h30m"``, or plain seconds.

    Returns:
        Seconds.

    Raises:
        UserError: the text is no duration above 0.
    """
    number = r"(?:(\d+(?:\.\d+)?)"
    match = re.fullmatch(f"{number}h)?{number}m)?{number}s?)?", text)
    seconds = 0.0
    if match:
        hours, minutes, rest = (float(part or 0) for part in match.groups())
        seconds = hours * 3600 + minutes * 60 + rest
    if seconds <= 0:
        raise UserError(f"The duration {text!r} cannot be read.", "Write for example 9m, 90s or 1h30m.")
    return seconds


def _lost_another_process(error: Exception, environ: Mapping[str, str]) -> bool:
    """True if a collective failed because another process ended, which reports its own error."""
    import torch

    if environ.get("WORLD_SIZE", "1") == "1":
        return False
    if isinstance(error, torch.distributed.DistError | RankLost):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in GONE)


def _process(environ: Mapping[str, str]) -> str:
    """Name of this process among several, for messages; empty for one alone."""
    count = environ.get("WORLD_SIZE", "1")
    return "" if count == "1" else f"process {environ.get('RANK', '0')} of {count}"


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``train``."""
    parser = Parser(prog="eagle-kit train", description="Train a draft head from a YAML config.")
    parser.hint = "Settings of the config are written key=value, such as training.learning_rate=1.0e-4."
    add_options(parser, TrainFlags)
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
