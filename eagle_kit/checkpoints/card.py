"""The README of a draft, written from what is known, nothing else."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from eagle_kit.checkpoints.serve_commands import DraftInfo, serve_commands
from eagle_kit.models.config import DraftConfig, TargetConfig
from eagle_kit.models.heads.eagle1 import Eagle1Config
from eagle_kit.models.heads.mtp import MTPConfig
from eagle_kit.models.loading.source import PACKAGED_TARGETS

AnyConfig = DraftConfig | MTPConfig | Eagle1Config
KINDS = {
    MTPConfig: ("mtp", "mtp", "MTP draft module"),
    Eagle1Config: ("eagle1", "eagle", "EAGLE-1 draft head"),
    DraftConfig: ("eagle3", "eagle3", "EAGLE-3 draft head"),
}
"""Kind of config -> kind of draft, tag and title."""
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
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
    "ttt_curriculum": None,
    "detach_steps": False,
    "regression": None,
    "loss": "ce",
    "loss_rows": "serving",
    "feature_noise": None,
    "optimizer": "adamw",
    "ema_decay": None,
    "schedule": "cosine",
}
"""Settings that are named where they are other than this."""


def model_card(
    config: AnyConfig,
    metadata: dict[str, Any],
    summary: dict[str, Any] | None,
    folder: str,
    dtype: torch.dtype | None = torch.bfloat16,
    *,
    format: str = "eagle-kit",
    reasons: Mapping[str, str] | None = None,
    licence: str = "",
) -> str:
    """Markdown: what it is, how it was trained, how it was measured, how to serve it, what is not known.

    Args:
        metadata: ``eagle_kit.json`` of the checkpoint.
        summary: ``summary.json`` of an evaluation with the rows of this draft only, or None.
        folder: where the draft lies, for the commands.
        dtype: of its weights; None when they are of several.
        format: the layout of its files.
        reasons: why SGLang or vLLM cannot serve it, by their formats.
        licence: an identifier of the Hugging Face hub; empty when none was given.
    """
    target = config.target or "its target"
    packaged = PACKAGED_TARGETS.get(target)
    hub_id = packaged.hub_id if packaged else target
    kind, tag, title = KINDS[type(config)]
    modules = config.num_modules if isinstance(config, MTPConfig) else 1
    draft = DraftInfo(kind, format, folder, target, hub_id, modules)
    sections = [
        _front_matter(hub_id, tag, licence),
        f"# {title} for {target}",
        _what(config, hub_id if packaged else "", dtype),
        "## Training\n\n" + ("\n".join(_training(metadata)) or "Nothing is recorded about the training."),
        "## Accept length\n\n" + "\n".join(_evaluation(summary, target, folder)),
        "## Serve\n\n" + serve_commands(draft, reasons or {}),
        "## Limits\n\n" + "\n".join(_limits(config, metadata, summary, target, licence)),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(hub_id: str, tag: str, licence: str) -> str:
    """The hub's YAML; a base model only where it is a repository's name."""
    lines = ["library_name: eagle_kit", "pipeline_tag: text-generation"]
    if REPOSITORY.fullmatch(hub_id):
        lines += [f"base_model: {hub_id}"]
    if licence:
        lines += [f"license: {json.dumps(licence)}"]
    return "\n".join(["---", *lines, f"tags: [{tag}, speculative-decoding]", "---"])


def _limits(
    config: AnyConfig, metadata: dict[str, Any], summary: dict[str, Any] | None, target: str, licence: str
) -> Iterator[str]:
    """What is known to be missing, and what nobody has tried."""
    yield (
        f"* It drafts for {target} only. A verifying engine gives the target's own replies with any draft; "
        "with other weights, another chat template or other kinds of prompts fewer tokens are accepted."
    )
    if not config.template_hash:
        yield "* Which chat template it was trained with is not recorded."
    data = metadata.get("data")
    if isinstance(data, dict) and "vocab_coverage" in data and config.draft_vocab_size < config.vocab_size:
        yield (
            f"* It can propose {config.draft_vocab_size:,} of {config.vocab_size:,} tokens, "
            f"{100 * data['vocab_coverage']:.1f} % of those in its training replies."
        )
    if summary is None:
        yield "* Accept lengths per task have not been measured."
    else:
        where = summary.get("target") or {}
        if "cuda" not in str(where.get("device")):
            yield "* It has not been measured on a GPU; the speed-ups above are a CPU's."
        if (summary.get("settings") or {}).get("temperature") in (None, 0, 0.0):
            yield "* The figures above are of greedy decoding; sampled replies have not been measured."
    yield "* It has not been served with SGLang or vLLM."
    if not licence:
        yield (
            "* No licence was given when this page was written; before publishing, name one, and mind those "
            f"of {target} and of the training data."
        )
    if origin := metadata.get("imported"):
        yield f"* It was imported: {origin['layout']}. Weights and numbers above are as they were there."


def _what(config: AnyConfig, packaged_from: str, dtype: torch.dtype | None) -> str:
    kind = "several types" if dtype is None else str(dtype).removeprefix("torch.")
    if isinstance(config, MTPConfig):
        text = _what_modules(config, kind)
    elif isinstance(config, Eagle1Config):
        text = _what_eagle1(config, kind)
    else:
        text = _what_head(config, kind)
    if packaged_from:
        text += f" It was trained on a quantised copy of {packaged_from}, not on its original weights."
    return text


def _what_head(config: DraftConfig, dtype: str) -> str:
    variant = [name for name in ("fc_norm", "norm_output", "norm_before_residual") if getattr(config, name)]
    text = (
        f"One decoder layer of hidden size {config.hidden_size} ({_attention(config)}) and a draft "
        f"vocabulary of {config.draft_vocab_size} of {config.vocab_size} tokens, in {dtype}. "
        f"It reads the inputs of target layers {', '.join(map(str, config.aux_layer_ids))}."
    )
    return text + (f" EAGLE-3.1 options: {', '.join(variant)}." if variant else "")


def _what_eagle1(config: Eagle1Config, dtype: str) -> str:
    fc = "a bias" if config.fc_bias else "no bias"
    return (
        f"One decoder layer of hidden size {config.hidden_size} ({_attention(config)}) in {dtype}, whose "
        f"`fc` has {fc}. It reads the target's last states, after their norm, and then its own, and proposes "
        f"any of {config.vocab_size} tokens through the target's output layer."
    )


def _what_modules(config: MTPConfig, dtype: str) -> str:
    layer, count = config.layer, config.num_modules
    inside = "an MLP" if layer.moe is None else f"{layer.moe.num_experts} experts"
    several = "One multi-token prediction module" if count == 1 else f"{count} multi-token prediction modules"
    uses = "for every step of a draft" if count == 1 else "one for each step of a draft"
    head = "an output layer of its own" if config.own_head else "the target's output layer"
    return (
        f"{several} ({uses}): a decoder layer of hidden size {layer.hidden_size} ({_attention(layer)}, "
        f"{inside}) in {dtype}. It reads the target's last states, after their norm, and then its own, and "
        f"proposes any of {layer.vocab_size} tokens through {head}."
    )


def _attention(config: DraftConfig | TargetConfig | Eagle1Config) -> str:
    if not isinstance(config, Eagle1Config) and config.mla is not None:
        rope = config.mla.qk_rope_head_dim
        return f"{config.num_heads} heads over latents of {config.mla.kv_lora_rank} + {rope} values"
    return f"{config.num_heads} query and {config.num_kv_heads} key-value heads of {config.head_dim}"


def _training(metadata: dict[str, Any]) -> Iterator[str]:
    """The facts of a run as list items; facts that were not recorded are left out."""
    data, config = metadata.get("data") or {}, metadata.get("config") or {}
    if command := metadata.get("command"):
        yield f"* command: `{command}`"
    if isinstance(data, dict) and data:
        yield f"* data: {_listed({key.replace('_', ' '): value for key, value in data.items()})}"
    elif data:
        yield f"* data: {data}"
    if began := (config.get("head") or {}).get("start_from"):
        yield f"* began with the weights of: {began}"
    if "step" in metadata:
        yield f"* optimiser steps: {metadata['step']:,}"
    if "tokens_seen" in metadata:
        yield f"* tokens seen: {metadata['tokens_seen']:,}"
    if "seconds" in metadata:
        yield f"* time: {_duration(metadata['seconds'])}"
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


def _evaluation(summary: dict[str, Any] | None, target: str, folder: str) -> Iterator[str]:
    if summary is None:
        yield f"Not measured yet. Measure it with `eagle-kit eval --target {target} --draft {folder}`."
        return
    yield "Accept length: tokens per verify, bonus token included. Shapes are steps, top-k, tokens."
    yield ""
    yield "| task | shape | accept length | tokens/s | speed-up over plain decoding | replies |"
    yield "|---|---|---|---|---|---|"
    for row in summary["rows"]:
        if row["category"] == "all":
            cells = (row["accept_length"], row["decode_tokens_per_s"], row["speedup"])
            figures = " | ".join("-" if value is None else f"{value:.2f}" for value in cells)
            yield f"| {row['task']} | {row['shape']} | {figures} | {row['num_answers']} |"
    yield ""
    identical = {True: "yes", False: "no", None: "not compared"}[summary.get("greedy_identical")]
    yield f"* greedy replies identical to plain decoding: {identical}"
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
