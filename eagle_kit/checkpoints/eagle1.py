"""Load published EAGLE-1/2 heads: ``fc``, one layer named ``layers.0``, no output layer."""

import warnings
from pathlib import Path
from typing import Any

import torch

from eagle_kit.checkpoints.draft import read_draft_tensors
from eagle_kit.core.errors import UserError
from eagle_kit.models.config import read_rope
from eagle_kit.models.eagle1 import Eagle1Config, Eagle1Head
from eagle_kit.models.llama import LlamaModel
from eagle_kit.models.loader import check_activation, check_tensors, read_json

UNUSED = ("embed_tokens.weight", "lm_head.weight")
"""Copies of the target's that some releases bring; the target's own are used."""


def load_eagle1(folder: str | Path, target: LlamaModel) -> Eagle1Head:
    """Load an EAGLE-1/2 head for ``target``, in fp32.

    Raises:
        UserError: a corrupt file, another size than the target's, or tensors that are missing, unexpected or
            misshapen, by name.
    """
    folder = Path(folder)
    tensors = {name.removeprefix("model."): value for name, value in read_draft_tensors(folder).items()}
    config = read_eagle1_config(folder, "fc.bias" in tensors, "layers.0.self_attn.q_proj.bias" in tensors)
    ours = target.config
    if (config.hidden_size, config.vocab_size) != (ours.hidden_size, ours.vocab_size):
        raise UserError(
            f"The draft was made for hidden size {config.hidden_size} and vocabulary {config.vocab_size}, "
            f"the target has {ours.hidden_size} and {ours.vocab_size}.",
            "Use the draft's own target, or train a draft for this one.",
        )
    for name in UNUSED:
        if name in tensors:
            warnings.warn(f"The draft in {folder} brings its own {name}; the target's is used.", stacklevel=3)
            del tensors[name]
    tensors = {name.removeprefix("layers.0."): value for name, value in tensors.items()}
    head = Eagle1Head(config)
    check_tensors(tensors, _published_shapes(head), str(folder))
    head.load_state_dict(_fuse({name: value.float() for name, value in tensors.items()}))
    return head.eval().requires_grad_(False)


def read_eagle1_config(folder: Path, fc_bias: bool, attention_bias: bool) -> Eagle1Config:
    """Read ``config.json``; whether there are biases is known by the weights. Raises UserError."""
    raw = read_json(folder / "config.json")
    check_activation(raw, str(folder))
    if (layers := raw.get("num_hidden_layers", 1)) != 1:
        raise UserError(f"The draft in {folder} has {layers} layers.", "Use an EAGLE head of one layer.")
    theta, scaling = read_rope(raw)
    try:
        hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
        return Eagle1Config(
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or hidden // heads,
            intermediate_size=raw["intermediate_size"],
            vocab_size=raw["vocab_size"],
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            attention_bias=attention_bias,
            fc_bias=fc_bias,
        )
    except KeyError as key:
        raise UserError(
            f"The draft's config.json in {folder} has no {key}.", "Copy it from its source."
        ) from None


_PARTS: dict[str, tuple[str, ...]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def _published_shapes(head: Eagle1Head) -> dict[str, tuple[int, ...]]:
    config = head.config
    kv = config.num_kv_heads * config.head_dim
    rows = {"q_proj": config.num_heads * config.head_dim, "k_proj": kv, "v_proj": kv}
    rows |= {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in head.named_parameters():
        module, _, leaf = name.rpartition(".")
        for part in _PARTS.get(module, (module,)):
            count = rows.get(part.rpartition(".")[2], parameter.shape[0])
            shapes[f"{part}.{leaf}"] = (count, *parameter.shape[1:])
    return shapes


def _fuse(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    state = dict(tensors)
    for module, parts in _PARTS.items():
        for leaf in ("weight", "bias"):
            if f"{parts[0]}.{leaf}" in state:
                state[f"{module}.{leaf}"] = torch.cat([state.pop(f"{part}.{leaf}") for part in parts])
    return state
