"""Arguments that several commands share, and flags made from the fields of a config."""

import argparse
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BeforeValidator
from pydantic_core import PydanticUndefined

from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.loading.loader import load_settings
from eagle_kit.config.options import OptionError, Options
from eagle_kit.config.tracking import TrackingConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import parse_json
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.report.wandb_run import require_wandb

DEFAULT_TARGET = "smollm2-135m-instruct"
DECODING = {"shape": "--shape", "max_batch_size": "--batch-size"}
TEMPLATE = {"chat_template": "--chat-template"}
LOADING = {
    **TEMPLATE,
    "max_context": "--max-context",
    "dtype": "--dtype",
    "quantization": "--quantization",
    "device": "--device",
}
RANKS = {
    "tensor_parallel": "--tensor-parallel",
    "expert_parallel": "--enable-expert-parallel",
    "data_parallel_attention": "--enable-dp-attention",
    "rank_timeout_s": "--rank-timeout",
}
METAVARS = {int: "N", float: "X", Path: "FILE"}
SchemaT = TypeVar("SchemaT", bound=Options)


def add_flags(parser: Any, schema: type[Options], flags: Mapping[str, str], **defaults: Any) -> None:
    """Declare a flag for each of the named fields of ``schema``, with the field's documentation as its help.

    A flag that is not given leaves None; :func:`options_of` then takes the default of the schema, or the
    command's own of ``defaults``. A flag that begins with ``--no-`` switches its field off.
    """
    for name, flag in flags.items():
        field = schema.model_fields[name]
        default = defaults.get(name, field.default)
        text = help_text(schema, name)
        if not isinstance(default, bool | None) and field.default is not PydanticUndefined:
            text += f" (default {' '.join(default) if isinstance(default, tuple) else default})"
        reads_text = any(isinstance(each, BeforeValidator) for each in field.metadata)
        kind = str if reads_text else _without_none(field.annotation)
        options: dict[str, Any] = {"dest": name, "help": text, "default": defaults.get(name)}
        if kind is bool and flag.startswith("--no-"):
            options |= {"action": "store_const", "const": False, "help": f"do not {text.partition(';')[0]}"}
        elif kind is bool:
            options |= {"action": "store_const", "const": True}
        elif get_origin(kind) is Literal:
            options |= {"choices": get_args(kind)}
        elif get_origin(kind) is tuple:
            options |= {"nargs": "+", "metavar": name[:-1].upper()}
        else:
            options |= {
                "type": kind if kind in METAVARS else str,
                "metavar": METAVARS.get(kind, flag.split("-")[-1].upper()),
            }
        parser.add_argument(flag, **options)


def help_text(schema: type[Options], name: str) -> str:
    """Documentation of a field as the help of a flag, which begins with a small letter."""
    text = schema.help_of(name).replace("%", "%%").rstrip(".")
    begins_with_word = text[1:2].islower()
    return text[:1].lower() + text[1:] if begins_with_word else text


def options_of(
    args: argparse.Namespace, schema: type[SchemaT], flags: Mapping[str, str], **more: Any
) -> SchemaT:
    """Make a ``schema`` of the flags that were given and of ``more``. Raise UserError that names the flag."""
    given = {name: value for name in flags if (value := getattr(args, name)) is not None}
    try:
        return schema(**given, **more)
    except OptionError as error:
        flag = flags.get(error.name, error.name)
        raise UserError(error.cause.replace(error.name, flag, 1), error.remedy) from None


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        return next(part for part in get_args(annotation) if part is not type(None))
    return annotation


def add_target(parser: argparse.ArgumentParser) -> None:
    """``--target``: folder, hub id or known name; see :func:`chosen_target`."""
    parser.add_argument(
        "--target", help=f"folder, hub id or known name (default the draft's own, else {DEFAULT_TARGET})"
    )


def chosen_target(given: str | None, drafts: Sequence[str | Path]) -> str:
    """The target that was given, or the one that the drafts name, which standard error then says.

    Raises:
        UserError: a draft names a target that is not known here, or two drafts name different ones.
    """
    from eagle_kit.checkpoints.named_target import target_of

    found = target_of(drafts, given, DEFAULT_TARGET)
    if given is None and drafts:
        print(f"target  {found.name}, {found.origin}", file=sys.stderr, flush=True)
    return found.name


def add_decoding(parser: argparse.ArgumentParser, *, max_tokens: int, batch_size: int) -> None:
    """``--draft --max-tokens`` and the flags of :data:`DECODING`: decoding with at most one draft."""
    parser.add_argument("--draft", help="folder, hub id or known name; without it decoding is plain")
    add_flags(parser, EngineConfig, DECODING, max_batch_size=batch_size)
    parser.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help="per reply (default %(default)s)"
    )


def add_sampling(parser: argparse.ArgumentParser, *, seed: int | None = None) -> None:
    """``--temperature --top-k --top-p --min-p --seed --stop``: the distribution of replies.

    Args:
        seed: default of ``--seed``; None draws other replies each time.
    """
    unseeded = "without it they differ" if seed is None else f"default {seed}"
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default %(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="most likely tokens kept; 0 is all")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="probability kept")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="share of the best token's")
    parser.add_argument("--seed", type=int, default=seed, metavar="N", help=f"of the samples ({unseeded})")
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


def json_object(text: str | None, flag: str, example: str) -> dict[str, Any]:
    """The object of a flag's JSON, empty where it was not given. Raise UserError that names the flag."""
    value = parse_json(text or "{}", flag, f"Give a JSON object such as {example}.")
    if not isinstance(value, dict):
        raise UserError(f"{flag} is no JSON object.", f"Give one such as {example}.")
    return value


def add_tracking(parser: argparse.ArgumentParser) -> None:
    """Declare ``--tracking``."""
    parser.add_argument(
        "--tracking",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="a run of wandb with the results; keys of a training's section tracking: wandb=online, project, "
        "entity, group, name, tags",
    )


def tracking_of(args: argparse.Namespace) -> TrackingConfig:
    """The section of ``--tracking``.

    Raises:
        UserError: a wrong key or value, no tracker, or a package that is missing.
    """
    tracking = load_settings(TrackingConfig, args.tracking, "--tracking")
    others = sorted(tracking.model_fields_set & {"tensorboard", "report"})
    if others:
        raise UserError(f"--tracking has {others[0]}, which only a training has.", f"Leave {others[0]} out.")
    if args.tracking and tracking.wandb == "off":
        raise UserError("--tracking was given without a tracker.", "Add wandb=online or wandb=offline.")
    if tracking.wandb != "off":
        require_wandb("leave --tracking out")
    return tracking
