"""Flags of `eagle-kit serve` as options of an engine: for the command, and for each setting of `eval`."""

import argparse
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from eagle_kit.cli.arguments import DEFAULT_TARGET, LOADING, RANKS
from eagle_kit.cli.other_flags import translate
from eagle_kit.config.engine import EngineConfig, NgramConfig, algorithm_name
from eagle_kit.config.loading.flags import Flag, Parser, add_flags, add_options, options_of
from eagle_kit.config.options import Options
from eagle_kit.config.server import ServerConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.gpus import PLANNED_GPU
from eagle_kit.core.shape import NGRAM_SHAPE, ShapeTable, SpecShape, auto_shape, complete_shape
from eagle_kit.report.stages import say

if TYPE_CHECKING:
    from eagle_kit.server.api.startup import ServedModel

SERVER_FLAGS = {
    "host": "--host",
    "allowed_host": "--allowed-host",
    "forwarded_allow_ips": "--forwarded-allow-ips",
    "api_key": "--api-key",
    "model_name": "--served-model-name",
    "model_aliases": "--model-alias",
    "max_queued": "--max-queued-requests",
    "max_parallel_per_client": "--max-parallel-per-client",
    "max_requests_per_minute": "--max-requests-per-minute",
    "separate_clients": "--separate-clients",
    "warm_up": "--warm-up",
    "reasoning_parser": "--reasoning-parser",
    "tool_call_parser": "--tool-call-parser",
    "grace_period_s": "--grace-period",
    "log_stats_interval_s": "--log-stats-interval",
    "profile_dir": "--profile-dir",
    "log_level": "--log-level",
}
DRAFT_FLAGS = {
    "shape": "--shape",
    "token_map": "--speculative-token-map",
    "tree": "--speculative-tree",
    "sampled_drafts": "--speculative-sampled-drafts",
    "verifier": "--speculative-verifier",
    "accept_threshold_single": "--speculative-accept-threshold-single",
    "accept_threshold_acc": "--speculative-accept-threshold-acc",
}
NGRAM_FLAGS = {name: f"--speculative-ngram-{name.replace('_', '-')}" for name in NgramConfig.model_fields}
ENGINE_FLAGS = {
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "max_batch_size": "--max-running-requests",
    "page_size": "--page-size",
    "prefix_cache": "--no-prefix-cache",
    "prefill_tokens": "--prefill-tokens",
    "decode_prefill_tokens": "--decode-prefill-tokens",
    "mixed_prefill_tokens": "--mixed-prefill-tokens",
    "prefill_backend": "--prefill-backend",
    "linear_backend": "--linear-backend",
    "kv_memory": "--kv-memory",
    "kv_tokens": "--kv-tokens",
    "kv_dtype": "--kv-dtype",
    "state_snapshots": "--state-snapshots",
    "batch_sizes": "--batch-sizes",
    "lag": "--lag",
    "graph_mode": "--graph-mode",
    "nvtx": "--nvtx",
    "graph_memory": "--graph-memory",
    **RANKS,
    **LOADING,
}
OTHER_ENGINES = "Flags of SGLang's and vLLM's servers: docs/reference/other-engines.md"
CHAIN_ALGORITHMS = ("STANDALONE", "P-EAGLE", "DFLASH", "DSPARK")
"""Algorithms whose default is a chain: of whole models, and of drafts of all steps in one pass."""
HTTP = "HTTP"
SPECULATION = "speculation"
ENGINE = "engine"


class EngineFlags(Options):
    """Flags for speculation and the engine that are no field of :class:`EngineConfig`."""

    speculative_algorithm: Annotated[
        str | None, BeforeValidator(algorithm_name), Flag(metavar="NAME", group=SPECULATION)
    ] = None
    """EAGLE3, P-EAGLE, DFLASH, DSPARK, EAGLE, NEXTN, STANDALONE, NGRAM or NONE, in any
    case; default that of the draft.
    """

    steps: Annotated[int | None, Flag("--speculative-num-steps", group=SPECULATION)] = None
    """Depth of the draft; in place of --shape."""

    topk: Annotated[int | None, Flag("--speculative-eagle-topk", group=SPECULATION)] = None
    """Candidates per depth, 1 of a chain; in place of --shape."""

    tokens: Annotated[int | None, Flag("--speculative-num-draft-tokens", group=SPECULATION)] = None
    """Tokens that are verified, root included; in place of --shape."""

    disable_cuda_graph: Annotated[bool, Flag(group=ENGINE)] = False
    """The same as --graph-mode off."""


class ServeFlags(EngineFlags):
    """Options of ``serve`` beside the fields of the server's and the engine's options."""

    model: Annotated[str, Flag(metavar="DRAFT_OR_TARGET", is_positional=True)]
    """Draft, which names its target, or a target; each a folder, a hub id or a known name;
    a target also a .gguf file."""

    target: str | None = None
    """Target of the draft, if not its own."""

    draft: str | None = None
    """Draft for the target; without it decoding is plain."""

    plan: bool = False
    """Without a GPU or the target's weights, print the memory of each rank for several numbers of ranks, and
    what fits on which GPUs.
    """

    gpu: Annotated[str | None, Flag(metavar="KIND")] = Field(
        default=None, description=f"Kind of GPU of --plan; default {PLANNED_GPU}."
    )

    port: Annotated[int, Flag(group=HTTP)] = 8000
    """Port to listen on; 0 takes a free one."""

    no_self_test: Annotated[bool, Flag(group=SPECULATION)] = False
    """Do not compare with plain decoding at start."""

    seed: Annotated[int | None, Flag(group=ENGINE)] = None
    """Seed of requests that bring none; default another at every start."""

    @model_validator(mode="after")
    def _go_together(self) -> "ServeFlags":
        if self.target is not None and self.draft is not None:
            raise UserError(
                "--draft was given beside --target.",
                "Give the target first with --draft, or the draft first with --target.",
            )
        if self.gpu is not None and not self.plan:
            raise UserError("--gpu is of --plan, which was not given.", "Give both, or --device.")
        return self


@dataclass(frozen=True)
class ServeOptions:
    """A command line of ``serve``, read.

    Attributes:
        flags: the flags that are no options of the engine, such as the models and the port.
        engine: options of the engine, with the shape and the algorithm.
        args: all values of the parser; those of the HTTP server are read from it by :data:`SERVER_FLAGS`.
    """

    flags: ServeFlags
    engine: EngineConfig
    args: argparse.Namespace


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``serve``."""
    groups = add_options(parser, ServeFlags)
    add_flags(groups[HTTP], ServerConfig, SERVER_FLAGS)
    _add_engine_fields(parser, groups)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``serve`` for speculation and the engine, for another command.

    They are the fields of :class:`EngineFlags`, :data:`DRAFT_FLAGS`, :data:`NGRAM_FLAGS` and
    :data:`ENGINE_FLAGS`, each with the field's name among the parsed arguments, and None where it is not
    given.
    """
    _add_engine_fields(parser, add_options(parser, EngineFlags))


def _add_engine_fields(parser: argparse.ArgumentParser, groups: dict[str, Any]) -> None:
    """Declare the flags of the engine's options in the groups of the help. Those of SGLang and vLLM are
    translated before they are parsed."""
    parser.epilog = OTHER_ENGINES
    if isinstance(parser, Parser):
        parser.translate = translate
    add_flags(groups[SPECULATION], EngineConfig, DRAFT_FLAGS)
    add_flags(groups[SPECULATION], NgramConfig, NGRAM_FLAGS)
    add_flags(groups[ENGINE], EngineConfig, ENGINE_FLAGS)


def engine_values(args: argparse.Namespace) -> dict[str, Any]:
    """Values of the flags of :func:`add_engine_flags` that were given, by their names among ``args``."""
    names = [*EngineFlags.model_fields, *DRAFT_FLAGS, *NGRAM_FLAGS, *ENGINE_FLAGS]
    return {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}


def parse_serve_flags(words: Sequence[str], **common: Any) -> ServeOptions:
    """Read a command line of ``serve``, without the word ``serve``; nothing is loaded.

    Args:
        words: the model and flags, such as ``["TARGET", "--draft", "DRAFT", "--shape", "4,1,5"]``.
        common: values of flags that ``words`` does not give, by their names among the parsed arguments
            (:func:`engine_values`).

    Raises:
        UserError: an unknown flag, a wrong value, or flags that exclude each other.
    """
    parser = Parser(prog="eagle-kit serve")
    add_serve_flags(parser)
    return read_serve_flags(parser.parse_args(words, argparse.Namespace(**common)))


def read_serve_flags(args: argparse.Namespace) -> ServeOptions:
    """Read the parsed arguments of ``serve``. Raises UserError for a wrong value or flags that exclude each
    other."""
    return ServeOptions(options_of(args, ServeFlags), engine_config(args), args)


def find_served_model(options: ServeOptions) -> "ServedModel":
    """Find the target and the draft of a command line, the draft in the target's folder included.

    Raises:
        UserError: a target that is not known here, an unknown algorithm, or one without the draft it needs.
    """
    from eagle_kit.server.api.startup import find_model

    flags = options.flags
    if flags.draft is None:
        found = find_model(flags.model, flags.target, DEFAULT_TARGET)
    else:
        found = find_model(flags.draft, flags.model, DEFAULT_TARGET)
    return check_algorithm(flags, found, options.engine.token_map)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Options of the engine from the command line.

    Raises:
        UserError: wrong values, or flags that exclude each other.
    """
    # Flags that stand for others.
    if args.disable_cuda_graph:
        if args.graph_mode not in (None, "off"):
            raise UserError("--graph-mode was given beside --disable-cuda-graph.", "Give one or the other.")
        args.graph_mode = "off"
    args.shape = shape_of(args)
    algorithm = args.speculative_algorithm
    if algorithm is None or algorithm.upper() == "NONE":
        algorithm = "auto"

    # The options.
    ngram = options_of(args, NgramConfig, NGRAM_FLAGS)
    seed = secrets.randbits(32) if args.seed is None else args.seed
    config = options_of(
        args,
        EngineConfig,
        {**DRAFT_FLAGS, **ENGINE_FLAGS},
        algorithm=algorithm,
        ngram=ngram,
        seed=seed,
    )

    # Warn of options that change texts.
    if config.is_relaxed:
        say("warning: accept thresholds below 1 are LOSSY: sampled text does not follow the target.")
    if config.quantization == "fp8":
        say("warning: the quantization fp8 is LOSSY: text is that of a target near the unquantised one.")
    return config


def shape_of(args: argparse.Namespace) -> SpecShape | ShapeTable | None:
    """Read ``--shape`` or the three numbers as a shape; None lets the engine choose.

    Numbers that are missing are those of the target's architecture, made to fit the given ones. A shape that
    was completed is printed.

    Raises:
        UserError: both, numbers that do not go together, or speculation that was switched off.
    """
    algorithm = algorithm_name(args.speculative_algorithm)
    steps = args.steps
    if algorithm == "DFLASH" and steps == 1 and args.tokens is not None:
        steps = None  # SGLang's number of a draft of one pass; its depth is that of the tokens
    numbers = (steps, args.topk, args.tokens)
    has_numbers = any(value is not None for value in numbers)
    if args.shape is not None and has_numbers:
        raise UserError("--shape was given beside its single numbers.", "Give one or the other.")
    table = None
    if args.shape not in (None, "auto"):
        table = ShapeTable.parse(args.shape)
    has_shape = has_numbers or (table is not None and table.steps > 0)
    if algorithm == "NONE" and has_shape:
        raise UserError("A shape was given for the algorithm NONE.", "Leave one of them out.")
    if not has_numbers:
        return table

    # A chain verifies one token more than it has steps.
    if args.topk == 1 and steps is not None and args.tokens not in (None, steps + 1):
        say(f"warning: a chain of {steps} steps verifies {steps + 1} tokens, so {args.tokens} is ignored.")
        return SpecShape.parse(f"{steps},1,{steps + 1}")
    if None not in numbers:
        return SpecShape.parse(",".join(map(str, numbers)))

    # The numbers that are missing.
    if algorithm == "NGRAM":
        usual = NGRAM_SHAPE
    else:
        drafts_chains = algorithm in CHAIN_ALGORITHMS
        usual = auto_shape(_model_type(args), drafts_are_expensive=drafts_chains)
    shape = complete_shape(usual, steps=steps, topk=args.topk, tokens=args.tokens)
    say(f"shape      {shape}, completed from the numbers that were given")
    return shape


def _model_type(args: argparse.Namespace) -> str:
    """Type of the target's architecture; empty where it is not known before the target is found."""
    from eagle_kit.models.loading.known_targets import target_architecture

    target = args.model if args.target is None else args.target
    try:
        return target_architecture(target)[0].model_type
    except UserError:  # a draft, which names its target, or a model that is not here yet
        return ""


def check_algorithm(flags: ServeFlags, model: "ServedModel", token_map: Path | None = None) -> "ServedModel":
    """Return the model with the draft that the algorithm uses, or without one.

    Raises:
        UserError: an unknown algorithm, or one without the draft it needs.
    """
    from eagle_kit.drafts.files.draft import drafts_in_target
    from eagle_kit.drafts.registry import algorithms, kind_in_target
    from eagle_kit.engine.options import draft_in_target
    from eagle_kit.models.loading.source import resolve_target

    name = flags.speculative_algorithm
    known = (*algorithms(), "NGRAM", "NONE")
    if name not in (None, *known):
        raise UserError(f"The algorithm {name!r} is not known.", f"Use one of {', '.join(known)}.")
    if name in ("NONE", "NGRAM"):
        model = replace(model, draft=None)

    # An algorithm that was asked for without a draft takes the draft in the target's folder.
    is_in_target = name is not None and name in algorithms() and model.draft is None
    if name is not None and is_in_target and kind_in_target(name) is None:
        folder = resolve_target(model.target)
        if not drafts_in_target(folder, name):
            remedy = "Give --draft."
            if name == "EAGLE":
                remedy = "Give --draft, or NEXTN for the MTP modules in the target's folder."
            raise UserError(f"The algorithm {name} needs a draft.", remedy)
        model = replace(model, draft=str(draft_in_target(None, name, folder)))
    if model.draft is None and not is_in_target and token_map is not None:
        raise UserError("A token map was given without a draft.", "Give a draft, or leave the map out.")
    return model
