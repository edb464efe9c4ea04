"""The README of a draft, written from what is known, nothing else."""

from collections.abc import Iterator
from typing import Any

import torch

from eagle_kit.models.config import DraftConfig, TargetConfig
from eagle_kit.models.eagle1 import Eagle1Config
from eagle_kit.models.mtp import MTPConfig
from eagle_kit.models.source import PACKAGED_TARGETS

AnyConfig = DraftConfig | MTPConfig | Eagle1Config
TITLES = {
    MTPConfig: ("mtp", "MTP draft module"),
    Eagle1Config: ("eagle", "EAGLE-1 draft head"),
    DraftConfig: ("eagle3", "EAGLE-3 draft head"),
}
"""Kind of config -> tag and title."""
SETTINGS = (
    "ttt_length",
    "learning_rate",
    "betas",
    "step_decay",
    "loss_normalisation",
    "sequences_per_step",
    "epochs",
)


def model_card(
    config: AnyConfig,
    metadata: dict[str, Any],
    summary: dict[str, Any] | None,
    folder: str,
    dtype: torch.dtype = torch.bfloat16,
) -> str:
    """Markdown: what it is, how it was trained, how it was measured, how to serve it.

    Args:
        metadata: ``eagle_kit.json`` of the checkpoint.
        summary: ``summary.json`` of an evaluation with the rows of this draft only, or None.
        folder: where the draft lies, for the commands.
        dtype: of its weights.
    """
    target = config.target or "its target"
    packaged = PACKAGED_TARGETS.get(target)
    hub_id = packaged.hub_id if packaged else target
    tag, title = TITLES[type(config)]
    sections = [
        f"---\nlibrary_name: eagle_kit\nbase_model: {hub_id}\ntags: [{tag}, speculative-decoding]\n---",
        f"# {title} for {target}",
        _what(config, hub_id if packaged else "", dtype),
        "## Training\n\n" + ("\n".join(_training(metadata)) or "Nothing is recorded about the training."),
        "## Accept length\n\n" + "\n".join(_evaluation(summary, target, folder)),
        "## Serve\n\n" + _serve(target, hub_id, folder, config),
    ]
    return "\n\n".join(sections) + "\n"


def _what(config: AnyConfig, packaged_from: str, dtype: torch.dtype) -> str:
    kind = str(dtype).removeprefix("torch.")
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
        f"`fc` has {fc}. It reads the target's last states, after their norm, and then its own, and proposes any "
        f"of {config.vocab_size} tokens through the target's output layer."
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
    if "step" in metadata:
        yield f"* optimiser steps: {metadata['step']:,}"
    if "tokens_seen" in metadata:
        yield f"* tokens seen: {metadata['tokens_seen']:,}"
    if "seconds" in metadata:
        yield f"* time: {_duration(metadata['seconds'])}"
    if machine := metadata.get("machine"):
        yield f"* machine: {machine}"
    settings = {key: value for key, value in (config.get("training") or {}).items() if key in SETTINGS}
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


def _serve(target: str, hub_id: str, folder: str, config: AnyConfig) -> str:
    if isinstance(config, MTPConfig):
        return _serve_modules(target, hub_id, folder, config.num_modules)
    if isinstance(config, Eagle1Config):
        return _serve_eagle1(target, hub_id, folder, config.fc_bias)
    speculative = f'{{"method": "eagle3", "model": "{folder}", "num_speculative_tokens": 4}}'
    return f"""```sh
eagle-kit generate --target {target} --draft {folder} --shape 5,4,16 --prompt 'Why is the sky blue?'

python -m sglang.launch_server --model-path {hub_id} --speculative-algorithm EAGLE3 \\
    --speculative-draft-model-path {folder} \\
    --speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16

vllm serve {hub_id} --speculative-config '{speculative}'
```

The commands of SGLang and vLLM follow their documentation; the tool that wrote this page did not run them."""


def _serve_eagle1(target: str, hub_id: str, folder: str, fc_bias: bool) -> str:
    """SGLang's ``fc`` always has a bias."""
    text = f"""```sh
eagle-kit generate --target {target} --draft {folder} --shape 5,4,16 --prompt 'Why is the sky blue?'
"""
    if not fc_bias:
        return text + "```"
    return f"""{text}
python -m sglang.launch_server --model-path {hub_id} --speculative-algorithm EAGLE \\
    --speculative-draft-model-path {folder} \\
    --speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16
```

The command of SGLang follows its documentation; the tool that wrote this page did not run it."""


def _serve_modules(target: str, hub_id: str, folder: str, count: int) -> str:
    steps = 3 if count == 1 else count
    shape = f"{steps},1,{steps + 1}"
    text = f"""```sh
eagle-kit generate --target {target} --draft {folder} --shape {shape} --prompt 'Why is the sky blue?'
"""
    if count > 1:
        return text + "```"
    return f"""{text}
python -m sglang.launch_server --model-path {hub_id} --speculative-algorithm NEXTN \\
    --speculative-draft-model-path {folder} \\
    --speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {steps + 1}
```

The command of SGLang follows its documentation; the tool that wrote this page did not run it."""


def _listed(facts: dict[str, Any]) -> str:
    """``name value, name value``, without the names that have none."""
    return ", ".join(f"{name} {_number(value)}" for name, value in facts.items() if value is not None)


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ", ".join(map(_number, value)) if isinstance(value, list | tuple) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
