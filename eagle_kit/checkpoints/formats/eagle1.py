"""EAGLE-1/2 heads for SGLang, vLLM and EAGLE's repository; speculators has dropped its class for them.

The classes do not agree on biases. SGLang's ``fc`` always has one, vLLM's never, EAGLE's unless ``bias`` is
false. SGLang and vLLM take ``bias`` for biases of attention; SGLang has those of queries, keys, values and
output together or not at all. Zeros make up for a bias that a class wants and the head has not: the logits
are the same, and the zeros are left out again on the way back (they are named under ``zeros``).
"""

from pathlib import Path
from typing import Any

import torch

from eagle_kit.checkpoints.eagle1 import (
    ARCHITECTURE,
    EMBEDDING,
    LAYER,
    OUTPUT,
    config_to_dict,
    published_shapes,
    read_eagle1_config,
)
from eagle_kit.checkpoints.formats.files import (
    OWN,
    DraftFiles,
    Format,
    Served,
    refuse,
    without_keys,
    zeros_for,
)
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.heads.eagle1 import Eagle1Config
from eagle_kit.models.loading.loader import check_tensors

FC_BIAS = "fc.bias"
BIAS_KEYS = ("bias", "qkv_bias", "attention_bias")


def write(files: DraftFiles, peer: Format, served: Served) -> DraftFiles:
    """Our layout -> that of ``peer``. Raises UserError for what its class cannot hold."""
    config = read_eagle1_config(files.config, Path(files.where), set(files.tensors))
    raw, tensors = without_keys(files.config, BIAS_KEYS), dict(files.tensors)
    zeros: dict[str, torch.Tensor] = {}
    match peer:
        case "speculators":
            refuse(peer, "it has dropped its class for EAGLE-1 heads", "Export it for sglang or eagle.")
        case "sglang":
            raw["architectures"] = [ARCHITECTURE]
            raw["attention_bias"] = config.attention_bias or config.attention_out_bias
            zeros = _missing_biases(config, tensors, fc=True, attention=raw["attention_bias"])
        case "vllm":
            raw["architectures"] = ["EagleLlamaForCausalLM"]
            raw |= {"attention_bias": config.attention_out_bias, "qkv_bias": config.attention_bias}
            if OUTPUT in tensors:
                refuse(peer, f"its EAGLE class has no place for {OUTPUT}")
            if config.fc_bias:
                refuse(peer, "the fc of its EAGLE class has no bias", "Export it for sglang or eagle.")
        case "eagle":
            if config.attention_out_bias:
                refuse(peer, "its head has no bias behind its attention")
            if config.rope_scaling:
                refuse(peer, f"its RoPE has no scaling of the kind {config.rope_scaling['rope_type']}")
            if config.head_dim * config.num_heads != config.hidden_size:
                refuse(peer, "its heads together are as wide as the hidden size, and this head's are not")
            raw |= {"architectures": ["LlamaForCausalLM"], "bias": config.fc_bias}
            raw |= {"qkv_bias": True} if config.attention_bias else {}
    own = {**(raw.get(OWN) or {}), "format": peer, **({"zeros": sorted(zeros)} if zeros else {})}
    return DraftFiles({**raw, OWN: own}, tensors | zeros, files.metadata)


def _missing_biases(
    config: Eagle1Config, tensors: dict[str, torch.Tensor], *, fc: bool, attention: bool
) -> dict[str, torch.Tensor]:
    """Zeros for the biases that a class has and the head has not."""
    kv = config.num_kv_heads * config.head_dim
    wanted = {FC_BIAS: config.hidden_size} if fc else {}
    if attention:
        rows = {"q": config.num_heads * config.head_dim, "k": kv, "v": kv, "o": config.hidden_size}
        wanted |= {f"{LAYER}self_attn.{part}_proj.bias": count for part, count in rows.items()}
    zeros: dict[str, torch.Tensor] = {}
    for name, rows_of_it in wanted.items():
        if name not in tensors:
            zeros |= zeros_for(tensors, name, rows_of_it)
    return zeros


def read(files: DraftFiles, peer: Format, target: TargetConfig | None) -> DraftFiles:
    """The layout of ``peer`` -> ours, every tensor accounted for; copies of the target's matrices are kept.

    Raises:
        UserError: missing, unexpected or misshapen tensors, or a config that is not an EAGLE-1 head's.
    """
    own = dict(files.config.get(OWN) or {})
    is_ours, zeros = own.pop("format", None) is not None, own.pop("zeros", [])
    tensors = {
        plain: tensor
        for name, tensor in files.tensors.items()
        if (plain := name.removeprefix("model.")) not in zeros or bool(tensor.any())
    }
    raw = without_keys(files.config, BIAS_KEYS)  # the tensors know better
    config = read_eagle1_config(raw | {OWN: own}, Path(files.where), set(tensors))
    expected = published_shapes(config)
    if EMBEDDING in tensors:
        expected[EMBEDDING] = (config.vocab_size, config.hidden_size)
    check_tensors(without_keys(tensors, (OUTPUT,)), expected, files.where)
    ours: dict[str, Any] = config_to_dict(config)
    if is_ours:
        ours = without_keys(raw, ours) | ours
        ours[OWN] = {**own, **ours[OWN]}
    kind = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    return DraftFiles({"dtype": kind, "torch_dtype": kind} | ours, tensors, files.metadata, files.where)


def tensor_names(files: DraftFiles, ours: DraftFiles) -> dict[str, str]:
    """Our name of every tensor in ``files`` that ``ours`` kept -> the name it has there."""
    names = {name.removeprefix("model."): name for name in files.tensors}
    return {name: names[name] for name in ours.tensors if name in names}
