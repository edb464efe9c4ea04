"""Flags that several commands share."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field

from eagle_kit.config.loading.flags import Flag
from eagle_kit.config.loading.loader import load_settings
from eagle_kit.config.options import Options
from eagle_kit.config.tracking import TrackingConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.report.wandb_run import require_wandb

if TYPE_CHECKING:
    from eagle_kit.drafts.files.named_target import NamedTarget
    from eagle_kit.server.api.startup import ServedModel

KEY_VARIABLES = ("EAGLE_KIT_API_KEY", "OPENAI_API_KEY")
"""Environment variables with the key of a server that a command is a client of."""
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
    "load_timeout_s": "--load-timeout",
}


class TargetFlag(Options):
    """``--target``; see :func:`chosen_target`."""

    target: str | None = None
    """Folder, .gguf file, hub id or known name; default the draft's own, else smollm2-135m-instruct."""


class DraftFlag(Options):
    """``--draft`` of commands that decode with at most one draft."""

    draft: str | None = None
    """Folder, hub id or known name; without it decoding is plain."""


class SamplingFlags(Options):
    """Length and distribution of responses."""

    max_tokens: int = Field(default=256, ge=1)
    """Most tokens per response."""

    temperature: Annotated[float, Flag(metavar="T")] = 0.0
    """Temperature; 0 is greedy."""

    top_k: Annotated[int, Flag(metavar="K")] = 0
    """Most likely tokens that are kept; 0 keeps all."""

    top_p: Annotated[float, Flag(metavar="P")] = 1.0
    """Probability of the most likely tokens that are kept together."""

    min_p: Annotated[float, Flag(metavar="P")] = 0.0
    """Least probability of a token that is kept, as a share of the best token's."""

    seed: int | None = None
    """Seed of the samples; without one they differ from call to call."""

    stop: Annotated[tuple[str, ...], Flag(is_repeated=True)] = ()
    """Text that ends the response; may be given several times."""

    @property
    def sampling_params(self) -> SamplingParams:
        """Parameters of a response. Raises UserError for one that is out of range."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop,
        )


class TrackingFlag(Options):
    """``--tracking``; see :func:`tracking_of`."""

    tracking: Annotated[tuple[str, ...], Flag(metavar="KEY=VALUE")] = ()
    """Run of wandb with the results: keys of a training's section tracking (wandb=online, project, entity,
    group, name, tags).
    """


def _shard(text: object) -> object:
    """Parse ``"0/2"`` as numbers; pass over values that are no text. Raises UserError."""
    if not isinstance(text, str):
        return text
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        raise UserError(f"--shard is {text}.", "Count the shards of n from 0/n to (n-1)/n.")
    return int(part), int(parts)


class ShardFlag(Options):
    """``--shard``: the part of the work that this process does."""

    shard: Annotated[tuple[int, int], BeforeValidator(_shard), Flag(metavar="I/N")] = Field((0, 1))
    """The I-th of 0..N-1 parts of the work: N processes share it; default 0/1, all of it."""


def chosen_target(given: str | None, drafts: Sequence[str | Path]) -> "NamedTarget":
    """The target that was given, or the one that the drafts name, which is then printed to standard
    error.

    Raises:
        UserError: the target is not there, or two drafts name different ones.
    """
    from eagle_kit.drafts.files.named_target import target_of

    found = target_of(drafts, given, DEFAULT_TARGET)
    if given is None and drafts:
        say_target(found)
    return found


def chosen_model(draft_or_target: str, given: str | None) -> "ServedModel":
    """A draft with its target as :func:`chosen_target`, or a target alone.

    Raises:
        UserError: the draft names a target that is not known here.
    """
    from eagle_kit.server.api.startup import find_model

    model = find_model(draft_or_target, given, DEFAULT_TARGET)
    if given is None and model.draft is not None:
        say_target(model.named)
    return model


def say_target(target: "NamedTarget") -> None:
    """Print to standard error which target a draft is used with, and where its name came from."""
    print(f"target  {target.name}, {target.origin}", file=sys.stderr, flush=True)


def server_key() -> str:
    """Key of a server from the environment; empty where there is none."""
    for name in KEY_VARIABLES:
        if os.environ.get(name):
            return os.environ[name]
    return ""


def tracking_of(options: TrackingFlag) -> TrackingConfig:
    """The config that ``--tracking`` gives.

    Raises:
        UserError: a wrong key or value, no tracker, or a package that is missing.
    """
    tracking = load_settings(TrackingConfig, options.tracking, "--tracking")
    others = sorted(tracking.model_fields_set & {"tensorboard", "report"})
    if others:
        raise UserError(f"--tracking has {others[0]}, which only a training has.", f"Leave {others[0]} out.")
    if options.tracking and tracking.wandb == "off":
        raise UserError("--tracking was given without a tracker.", "Add wandb=online or wandb=offline.")
    if tracking.wandb != "off":
        require_wandb("leave --tracking out")
    return tracking
