"""The published EAGLE-3 layout: names of tensors, and ``config.json`` to and from :class:`DraftConfig`.

Published heads keep q, k, v and gate, up apart; ours are fused. Layer ids are stored as "input of layer i",
the numbering of EAGLE, SGLang and vLLM, with the convention beside them: the other one ("output of layer i")
names the same tensors with other numbers, and mixing them fails silently.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.models.config import DraftConfig, TargetConfig, read_rope
from eagle_kit.models.config_parts import MLAConfig, read_mla
from eagle_kit.models.heads.eagle3 import Eagle3Head
from eagle_kit.models.loading.loader import check_activation

LLAMA_LAYER = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LATENT_LAYER = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
ARCHITECTURES = (*LLAMA_LAYER, *LATENT_LAYER)
OLDER_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
OUTPUT_BIAS = "midlayer.self_attn.o_proj.bias"
LAYER_IDS, CONVENTION = "eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_convention"
SHIFTS = {"input": 0, "output": 1}
"""Convention of layer ids -> what turns one into ours: the output of layer i is the input of layer i + 1."""


def fused_parts(config: DraftConfig) -> dict[str, list[tuple[str, int]]]:
    """Our fused module -> the published modules it stacks and their rows."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp, width = "midlayer.self_attn.", "midlayer.mlp.", config.intermediate_size
    parts = {f"{mlp}gate_up_proj": [(f"{mlp}gate_proj", width), (f"{mlp}up_proj", width)]}
    if config.mla is None:
        parts[f"{attention}qkv_proj"] = [
            (f"{attention}q_proj", q),
            (f"{attention}k_proj", kv),
            (f"{attention}v_proj", kv),
        ]
    return parts


def to_published(head: Eagle3Head, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its published name, on the CPU, floating ones in ``dtype``."""
    parts = fused_parts(head.config)
    out: dict[str, torch.Tensor] = {}
    for name, tensor in head.state_dict().items():
        module, _, leaf = name.rpartition(".")
        value = tensor.detach().cpu()
        value = value.to(dtype) if value.is_floating_point() else value
        if module in parts:
            pieces = value.split([rows for _, rows in parts[module]])
            out |= {
                f"{part}.{leaf}": piece.clone()
                for (part, _), piece in zip(parts[module], pieces, strict=True)
            }
        else:
            out[name] = value.contiguous()
    return out


def published_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter that a checkpoint must have."""
    parts, shapes = fused_parts(config), {}
    with torch.device("meta"):
        head = Eagle3Head(config)
    for name, parameter in head.named_parameters():
        module, _, leaf = name.rpartition(".")
        for part, rows in parts.get(module, [(module, parameter.shape[0])]):
            shapes[f"{part}.{leaf}"] = (rows, *parameter.shape[1:])
    return shapes


def canonical_name(name: str) -> str:
    """EAGLE's name for any spelling: ``midlayer.*`` or ``layers.0.*``, with ``model.`` or without; SGLang's
    older ``aux_norm_*`` are ``fc_norm.*``."""
    name = name.removeprefix("model.")
    module, _, leaf = name.partition(".")
    if module in OLDER_NORMS:
        return f"fc_norm.{OLDER_NORMS.index(module)}.{leaf}"
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def canonical_tensors(tensors: dict[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint by :func:`canonical_name`.

    A bias behind ``o_proj`` that is all zeros is left out: vLLM and speculators have one wherever queries
    have one.

    Raises:
        UserError: one that is not zero, which our layer does not have, or one tensor under two names.
    """
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        name = canonical_name(name)
        if name in out:
            raise UserError(f"The draft in {where} has {name} twice.", "Use a complete checkpoint.")
        out[name] = tensor
    if OUTPUT_BIAS in out and bool(out.pop(OUTPUT_BIAS).any()):
        raise UserError(
            f"The draft in {where} has a bias behind its attention ({OUTPUT_BIAS}), which our EAGLE-3 head "
            "has not.",
            "Serve it with the engine it was made for.",
        )
    return out


def fuse(tensors: dict[str, torch.Tensor], config: DraftConfig) -> dict[str, torch.Tensor]:
    """Complete published tensors -> our state dict."""
    state = dict(tensors)
    for module, pieces in fused_parts(config).items():
        for leaf in ("weight", "bias"):
            if f"{pieces[0][0]}.{leaf}" in state:
                state[f"{module}.{leaf}"] = torch.cat([state.pop(f"{part}.{leaf}") for part, _ in pieces])
    return state


def config_to_dict(config: DraftConfig) -> dict[str, Any]:
    """``config.json`` of a draft, with both spellings of RoPE."""
    return {
        "architectures": [(LATENT_LAYER if config.mla else LLAMA_LAYER)[0]],
        "model_type": "deepseek_v3" if config.mla else "llama",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        **(mla_to_dict(config.mla) if config.mla else {"head_dim": config.head_dim}),
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        **rope_to_dict(config.rope_theta, config.rope_scaling),
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual,
        "eagle_config": {
            LAYER_IDS: list(config.aux_layer_ids),
            CONVENTION: "input",
            "use_aux_hidden_state": True,
        },
        "eagle_kit": {"target": config.target, "template_hash": config.template_hash},
    }


def mla_to_dict(mla: MLAConfig) -> dict[str, Any]:
    """Latent attention's part of a ``config.json``."""
    sizes = asdict(mla)
    return sizes | {"rope_interleave": sizes.pop("interleaved")}


def rope_to_dict(theta: float, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """RoPE's part of a ``config.json``, in both spellings."""
    both = {**(scaling or {"rope_type": "default"}), "rope_theta": theta}
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_parameters": both}


def config_from_dict(config: dict[str, Any], where: str, target: TargetConfig | None = None) -> DraftConfig:
    """Read a draft's ``config.json``, ours or another trainer's.

    Args:
        where: the folder, for messages.
        target: gives the usual layer ids to a config that names none, as the first EAGLE-3 heads' do.

    Raises:
        UserError: another architecture, a missing key, or layer ids that cannot be known.
    """
    config = flatten_config(config, where)
    refuse_other_parts(config, (), where)
    name = (config.get("architectures") or ["?"])[0]
    if name not in ARCHITECTURES:
        raise UserError(
            f"The draft in {where} has the architecture {name}, not EAGLE-3.",
            f"Use one of {', '.join(ARCHITECTURES)}.",
        )
    if (layers := config.get("num_hidden_layers", 1)) != 1:
        raise UserError(f"The draft in {where} has {layers} layers.", "Use an EAGLE-3 head of one layer.")
    check_activation(config, where)
    own = config.get("eagle_kit") or {}
    try:
        theta, scaling = read_rope(config)
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        mla = read_mla(config) if name in LATENT_LAYER else None
        return DraftConfig(
            hidden_size=hidden,
            target_hidden_size=config.get("target_hidden_size") or hidden,
            num_heads=heads,
            num_kv_heads=heads if mla else config.get("num_key_value_heads") or heads,
            head_dim=mla.qk_head_dim if mla else config.get("head_dim") or hidden // heads,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            aux_layer_ids=_layer_ids(config, where, target),
            fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm")),
            norm_output=bool(config.get("norm_output", False)),
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mla=mla,
            target=own.get("target", ""),
            template_hash=own.get("template_hash", ""),
        )
    except KeyError as key:
        raise UserError(
            f"The draft's config.json in {where} has no {key}.", "Copy it from its source."
        ) from None


def flatten_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """An EAGLE-3 ``config.json`` of the speculators project in the flat form; any other as it is.

    Raises:
        UserError: another algorithm than EAGLE-3, a decoder layer that is not Llama's, or a key left out that
            speculators and vLLM fill in differently.
    """
    algorithm = config.get("speculators_model_type")
    if algorithm is None:
        return config
    if algorithm != "eagle3":
        raise UserError(
            f"The draft in {where} is a speculators model of the kind {algorithm!r}, which we have no head "
            "for.",
            "Use one of the kind eagle3.",
        )
    layer = config.get("transformer_layer_config") or {}
    if layer.get("model_type") != "llama":
        raise UserError(
            f"The draft in {where} has a decoder layer of the kind {layer.get('model_type')!r}.",
            "Use a head whose transformer_layer_config has the model_type llama.",
        )
    if "norm_before_residual" not in config:
        raise UserError(
            f"The config.json in {where} does not say norm_before_residual, which speculators then takes for "
            "false and vLLM for true.",
            "Write the one that the head was trained with into it.",
        )
    own = config.get("eagle_kit") or {}
    flags = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "target_hidden_size")
    ids = config.get(LAYER_IDS)
    return {
        **(own.get("extra") or {}),
        **layer,
        **{key: config[key] for key in flags if key in config},
        "architectures": [LLAMA_LAYER[0]],
        "draft_vocab_size": config.get("draft_vocab_size"),
        "eagle_config": {} if ids is None else {LAYER_IDS: ids, CONVENTION: "input"},
        **{key: config[key] for key in ("dtype", "torch_dtype", "eagle_kit") if key in config},
    }


def refuse_other_parts(config: dict[str, Any], names: Iterable[str], where: str) -> None:
    """Raise UserError, with the reason, for heads that call themselves EAGLE-3 and have parts ours has not.

    Args:
        names: of the tensors; none when only the config is known.
    """
    names = set(names)
    eagle = config.get("eagle_config") or {}
    endings = {name.rpartition(".self_attn.")[2] for name in names}
    parts = {
        "one norm over all captured states in front of fc (norm_before_fc)": bool(
            config.get("norm_before_fc") or eagle.get("norm_before_fc") or "input_norm.weight" in names
        ),
        "norms of queries and keys, as Qwen3's layers do": bool({"q_norm.weight", "k_norm.weight"} & endings),
        "parallel drafting": "mask_hidden" in names or "pard_token" in config,
        "no captured states (use_aux_hidden_state is false)": eagle.get("use_aux_hidden_state") is False,
    }
    for part, found in parts.items():
        if found:
            raise UserError(
                f"The draft in {where} has {part}, which our EAGLE-3 head has not.",
                "Serve it with the engine it was made for.",
            )


def _layer_ids(config: dict[str, Any], where: str, target: TargetConfig | None) -> tuple[int, ...]:
    """The captured layers in the "input of layer i" numbering, whichever one they are stored in."""
    eagle = config.get("eagle_config") or {}
    ids = eagle.get(LAYER_IDS)
    if ids is None and target is not None:
        return target.default_aux_layer_ids
    if ids is None:
        raise UserError(
            f"The draft in {where} does not say which target layers it reads.",
            f"Load it together with its target, or add eagle_config.{LAYER_IDS} to its config.json.",
        )
    if not isinstance(ids, list) or not ids or not all(type(layer) is int for layer in ids):
        raise UserError(
            f"The draft in {where} has the layer ids {ids!r}.",
            f"Make {LAYER_IDS} a list such as [2, 15, 27].",
        )
    convention = eagle.get(CONVENTION, "input")
    if convention not in SHIFTS:
        raise UserError(
            f"The draft in {where} numbers its layers by the unknown convention {convention!r}.",
            f'Set {CONVENTION} to "input" or "output".',
        )
    return tuple(layer + SHIFTS[convention] for layer in ids)
