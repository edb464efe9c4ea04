"""`eagle-kit bench`: speed and acceptance of a head by batch size; `bench serve`: as a server counts."""

import argparse
from pathlib import Path
from typing import Annotated

from pydantic import Field

from eagle_kit.cli.arguments import LOADING, TargetFlag, chosen_target
from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.loading.flags import Flag, FlagsOf, add_options, options_of
from eagle_kit.config.options import Options
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import check_file_writable
from eagle_kit.core.shape import SpecShape

AUTO = "auto"
NEEDS_DRAFT = "Give a head's folder, hub id or known name with --draft."


class BenchOptions(TargetFlag):
    """Options of ``bench``."""

    draft: str | None = None
    """Folder, hub id or known name of a head."""

    tasks: Annotated[tuple[str, ...], Flag(metavar="TASK")] = ("ours",)
    """Names of task sets, or JSONL files."""

    shapes: Annotated[tuple[str, ...], Flag(metavar="SHAPE")] = ("3,1,4", "5,4,16", AUTO)
    """Shapes, steps,topk,tokens or auto."""

    batches: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Flag(metavar="B")] = (1, 8)
    """Batch sizes; default 1 and 8."""

    rounds: int = Field(5, ge=1)
    """Interleaved rounds of every batch size."""

    max_tokens: int = Field(64, ge=1)
    """Tokens of a response in a round."""

    seed: int = 0
    """Seed of the order of prompts."""

    out: Annotated[Path | None, Flag(metavar="JSON")] = None
    """File for the figures."""

    engine: Annotated[EngineConfig, FlagsOf(LOADING, "engine")] = EngineConfig()


class BenchServeOptions(Options):
    """Options of ``bench serve``."""

    base_url: Annotated[str, Flag(metavar="URL")]
    """Server with /metrics, as http://127.0.0.1:8000."""

    out: Annotated[Path | None, Flag(metavar="JSON")] = None
    """File for the figures."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``bench`` and of ``bench serve``."""
    parser.set_defaults(kind=None)
    add_options(parser, BenchOptions)
    kinds = parser.add_subparsers(dest="kind", metavar="{serve}")
    text = "Tokens and acceptance that a running server counts until Ctrl-C, or while COMMAND runs."
    serve = kinds.add_parser("serve", help=text, description=text, argument_default=argparse.SUPPRESS)
    add_options(serve, BenchServeOptions)
    serve.add_argument("driver", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="drives the server")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write the figures."""
    if args.kind == "serve":
        from eagle_kit.eval.server_acceptance import count

        outer = options_of(args, BenchOptions)
        if outer.model_fields_set - {"engine", "out"} or outer.engine.model_fields_set:
            raise UserError(
                "Options of bench were given before serve, which measures no models of its own.",
                "Leave them out, and give the options of bench serve behind serve.",
            )
        asked = options_of(args, BenchServeOptions)
        _check_out(asked.out)
        command = args.driver
        if command[:1] == ["--"]:
            command = command[1:]
        return count(asked.base_url, command, asked.out)

    # Refuse wrong options before a model is loaded.
    options = options_of(args, BenchOptions)
    if options.draft is None:
        raise UserError("bench measures a head, and none was given.", NEEDS_DRAFT)
    for shape in options.shapes:
        if shape != AUTO:
            SpecShape.parse(shape)
    _check_out(options.out)

    # Measure.
    from eagle_kit.drafts.files.named_target import naming
    from eagle_kit.eval.speed import SpeedOptions, measure

    settings = SpeedOptions(
        tasks=options.tasks,
        batch_sizes=options.batches,
        shapes=tuple(dict.fromkeys(options.shapes)),
        rounds=options.rounds,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    target = chosen_target(options.target, [options.draft])
    with naming(target):
        return measure(target.name, options.draft, options.engine, settings, options.out)


def _check_out(out: Path | None) -> None:
    """Raise UserError if the file for the figures cannot be written."""
    if out is not None:
        check_file_writable(out, "Give another file with --out.")
