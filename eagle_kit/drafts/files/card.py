"""The README of a draft, written from what is known, nothing else."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_kit.core.files import expand
from eagle_kit.drafts.base.kind import HeadKind
from eagle_kit.drafts.files.serve_commands import DraftInfo, serve_commands
from eagle_kit.models.config import HeadArchitecture
from eagle_kit.models.loading.source import PACKAGED_TARGETS, REPOSITORY, is_hub_id, split_revision

SETTINGS = (
    "ttt_length",
    "learning_rate",
    "betas",
    "step_decay",
    "loss_normalisation",
    "sequences_per_step",
    "epochs",
)
UNUSUAL = {
    "step_weights": None,
    "dpace_alpha": None,
    "ttt_curriculum": None,
    "detach_steps": False,
    "regression": None,
    "loss": "ce",
    "loss_rows": "serving",
    "feature_noise": None,
    "optimizer": "adamw",
    "muon_learning_rate_ratio": 1.0,
    "ema_decay": None,
    "schedule": "cosine",
    "num_anchors": 512,
    "down_sample_ratio": None,
    "down_sample_ratio_min": 0.2,
    "confidence_weight": 1.0,
}
"""Settings that are named where they are other than this."""


@dataclass(frozen=True)
class Card:
    """Facts about a draft.

    Attributes:
        config: its architecture.
        metadata: ``eagle_kit.json`` of the checkpoint.
        folder: where the draft lies, for the commands.
        summary: ``summary.json`` of an evaluation with the rows of this draft only, or None.
        dtype: of its weights, in words.
        format: the layout of its files.
        reasons: why SGLang or vLLM cannot serve it, by their formats.
        licence: an identifier of the Hugging Face hub; empty when none was given.
    """

    kind: HeadKind[Any, Any, Any]
    config: HeadArchitecture
    metadata: Mapping[str, Any]
    folder: str
    summary: Mapping[str, Any] | None = None
    dtype: str = "bfloat16"
    format: str = "eagle-kit"
    reasons: Mapping[str, str] = field(default_factory=dict)
    licence: str = ""

    @property
    def target(self) -> str:
        """Name of the target."""
        return self.config.target or "its target"

    @property
    def target_flag(self) -> str:
        """``--target`` of the commands: a name that is known everywhere. A folder of this machine is found by
        the hash of its weights, and must not be named in what may be pushed."""
        name = self.config.target
        if not name:
            return " --target TARGET"
        is_known = name.lower() in PACKAGED_TARGETS or (is_hub_id(name) and not expand(name).exists())
        return f" --target {name}" if is_known else ""


def model_card(card: Card) -> str:
    """Markdown: what it is, how it was trained, how it was measured, how to serve it, what is not known."""
    kind = card.kind
    target = card.target
    packaged = PACKAGED_TARGETS.get(target)
    hub_id = packaged.hub_id if packaged else split_revision(target)[0]
    text = kind.describe(card.config, card.dtype)
    if packaged:
        text += f" It was trained on a quantised copy of {hub_id}, not on its original weights."
    shape = kind.suggested_shape(card.config)
    draft = DraftInfo(kind, shape, card.format, card.folder, card.target_flag, hub_id)
    sections = [
        _front_matter(hub_id, kind.vllm_method or kind.name, card.licence),
        f"# {kind.title} for {target}",
        text,
        "## Training\n\n"
        + ("\n".join(_training(card.metadata)) or "Nothing is recorded about the training."),
        "## Accept length\n\n" + "\n".join(_evaluation(card)),
        "## Serve\n\n" + serve_commands(draft, card.reasons),
        "## Limits\n\n" + "\n".join(_limits(card)),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(hub_id: str, tag: str, licence: str) -> str:
    """The hub's YAML; a base model only where it is a repository's name."""
    lines = ["library_name: eagle_kit", "pipeline_tag: text-generation"]
    if REPOSITORY.fullmatch(hub_id) and not expand(hub_id).exists():
        lines += [f"base_model: {hub_id}"]
    if licence:
        lines += [f"license: {json.dumps(licence)}"]
    return "\n".join(["---", *lines, f"tags: [{tag}, speculative-decoding]", "---"])


def _limits(card: Card) -> Iterator[str]:
    """Known gaps, and regimes that nobody has tried."""
    config = card.config
    summary = card.summary
    target = card.target
    yield (
        f"* It drafts for {target} only. A verifying engine gives the target's own responses with any draft; "
        "with other weights, another chat template or other kinds of prompts fewer tokens are accepted."
    )
    if not config.template_hash:
        yield "* It was trained without a chat template, or which one is not recorded."
    data = card.metadata.get("data")
    if isinstance(data, dict) and "vocab_coverage" in data and config.draft_vocab_size < config.vocab_size:
        yield (
            f"* It can propose {config.draft_vocab_size:,} of {config.vocab_size:,} tokens, "
            f"{100 * data['vocab_coverage']:.1f} % of those in its training responses."
        )
    if summary is None:
        yield "* Accept lengths per task have not been measured."
    else:
        where = summary.get("target") or {}
        if "cuda" not in str(where.get("device")):
            yield "* It has not been measured on a GPU; the speed-ups above are a CPU's."
        if (summary.get("settings") or {}).get("temperature") in (None, 0, 0.0):
            yield "* The figures above are of greedy decoding; sampled responses have not been measured."
    yield "* It has not been served with SGLang or vLLM."
    if not card.licence:
        yield (
            "* No licence was given when this page was written; before publishing, name one, and mind those "
            f"of {target} and of the training data."
        )
    if origin := card.metadata.get("imported"):
        yield f"* It was imported: {origin['layout']}. Weights and numbers above are as they were there."


def _training(metadata: Mapping[str, Any]) -> Iterator[str]:
    """The facts of a run as list items; facts that were not recorded are left out."""
    data = metadata.get("data") or {}
    config = metadata.get("config") or {}
    if command := metadata.get("command"):
        yield f"* command, folders left out: `{command}`"
    if isinstance(data, dict) and data:
        yield f"* data: {_listed({key.replace('_', ' '): value for key, value in data.items()})}"
    elif data:
        yield f"* data: {data}"
    if began := (config.get("head") or {}).get("start_from"):
        yield f"* began with the weights of: {began}"
    if "step" in metadata:
        yield f"* optimiser steps: {metadata['step']:,}"
    if "tokens_seen" in metadata:
        before = metadata.get("tokens_before")
        before_it = f", after {before:,} of what it began with" if before else ""
        yield f"* tokens seen: {metadata['tokens_seen']:,}{before_it}"
    if "seconds" in metadata:
        yield f"* time: {_duration(metadata['seconds'])}"
    if peak := metadata.get("peak_memory_gb"):
        yield f"* peak memory of a process: {_number(peak)} GB"
    if machine := metadata.get("machine"):
        yield f"* machine: {machine}"
    settings = {
        key: value
        for key, value in (config.get("training") or {}).items()
        if key in SETTINGS or value != UNUSUAL.get(key, value)
    }
    if settings:
        yield f"* settings: {_listed(settings)}"
    for shape, length in (metadata.get("accept_length") or {}).items():
        yield f"* decoded accept length while training, shape {shape}: {_number(length)}"
    if versions := metadata.get("versions"):
        yield f"* versions: {_listed(versions)}"
    yield from _curve(metadata.get("judged") or [])


def _curve(validations: list[dict[str, Any]]) -> Iterator[str]:
    """Accept length against tokens seen, as a table; nothing of fewer than two validations."""
    if len(validations) < 2:
        return
    shapes = list(validations[-1]["accept_length"])
    yield "\nAccept length against tokens seen, decoded while training on held-out prompts:\n"
    yield f"| tokens seen | {' | '.join(shapes)} |"
    yield f"|{'--:|' * (1 + len(shapes))}"
    for row in validations:
        lengths = (row["accept_length"].get(shape) for shape in shapes)
        figures = " | ".join("-" if value is None else f"{value:.3f}" for value in lengths)
        yield f"| {row['tokens_seen']:,} | {figures} |"


def _evaluation(card: Card) -> Iterator[str]:
    summary = card.summary
    if summary is None:
        measure = f"eagle-kit eval{card.target_flag} --draft {shlex.quote(card.folder)}"
        yield f"Not measured yet. Measure it with `{measure}`."
        return
    yield "Accept length: tokens per verify, bonus token included. Shapes are steps, top-k, tokens."
    yield ""
    yield "| task | shape | accept length | tokens/s | speed-up over plain decoding | responses |"
    yield "|---|---|---|---|---|---|"
    for row in summary["rows"]:
        if row["category"] == "all":
            cells = (row["accept_length"], row["decode_tokens_per_s"], row["speedup"])
            figures = " | ".join("-" if value is None else f"{value:.2f}" for value in cells)
            yield f"| {row['task']} | {row['shape']} | {figures} | {row['num_answers']} |"
    yield ""
    identical = {True: "yes", False: "no", None: "not compared"}[summary.get("greedy_identical")]
    yield f"* greedy responses identical to plain decoding: {identical}"
    if command := summary.get("command"):
        yield f"* command: `{command}`"
    where = summary.get("target") or {}
    facts = {**(summary.get("machine") or {}), "device": where.get("device"), "dtype": where.get("dtype")}
    yield f"* machine: {_listed(facts)}"
    settings = summary.get("settings") or {}
    chosen = {key: settings[key] for key in ("max_tokens", "limit", "batch_size", "seed") if key in settings}
    yield f"* settings: {_listed(chosen)}"
    yield f"* versions: {_listed(summary.get('versions') or {})}"
    yield f"* date: {summary.get('date', 'unknown')}"


def _listed(facts: dict[str, Any]) -> str:
    """``name value, name value``, without the names that have none."""
    return ", ".join(f"{name} {_number(value)}" for name, value in facts.items() if value is not None)


def _number(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({_listed(dict(value))})"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ", ".join(map(_number, value)) if isinstance(value, list | tuple) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
