"""Architectures of bridged targets, read from transformers' own configs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from eagle_kit.core.errors import UserError, first_line
from eagle_kit.core.files import COPY_AGAIN
from eagle_kit.models.bridge.attention import ATTENTION_NAME, register
from eagle_kit.models.bridge.records import LayerRecord, record_layers
from eagle_kit.models.bridge.recurrence import replace_recurrence
from eagle_kit.models.cache_specs import KVSpec, StateSpec
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.config_values import read_architecture, read_ids

REFUSED = {
    "bloom": "adds a bias to its scores that depends on the distance (ALiBi)",
    "mpt": "adds a bias to its scores that depends on the distance (ALiBi)",
    "deepseek_v32": "chooses the keys of each query by an index (sparse attention)",
    "deepseek_v4": "chooses the keys of each query by an index (sparse attention)",
    "glm_moe_dsa": "chooses the keys of each query by an index (sparse attention)",
    "jamba": "has Mamba-1 layers, whose states decay each number by itself",
    "zamba": "has Mamba-1 layers, whose states decay each number by itself",
    "mamba": "has no attention, and Mamba-1 layers",
    "falcon_mamba": "has no attention, and Mamba-1 layers",
    "mamba2": "has no attention",
}
"""Types of models that are refused by name, because they may run and give wrong results."""
PINNED_ROPE = ("longrope", "dynamic")
"""RoPE scalings whose angles depend on the longest text of a batch. The context ends where they would
change."""
DEFAULT_CONTEXT = 2048
"""Context length of models whose config does not state one."""
NORMS = ("norm", "final_layernorm", "ln_f", "final_layer_norm", "norm_f")
"""Names of the final norm in transformers' decoders."""
LAYER_LISTS = ("layers", "h", "blocks", "decoder_layers")
"""Names of the list of layers in transformers' decoders."""


@dataclass(frozen=True)
class BridgedConfig(TargetConfig):
    """Architecture of a bridged target.

    Attributes:
        source: content of its ``config.json``.
        records: its attention layers, without their sinks.
        recurrent: layout of the states of recurrent layers; None without any.
        soft_cap: soft cap of the logits; None without one.
        num_chosen_experts: number of experts that are chosen for each token.
        active_weights: number of elements of the layers' matrices that a token is multiplied by.
        layer_weights: number of elements of all matrices of the layers.
        all_weights: number of elements of all matrices of the model.
    """

    source: dict[str, Any] | None = None
    records: tuple[LayerRecord, ...] = ()
    recurrent: StateSpec | None = None
    soft_cap: float | None = None
    num_chosen_experts: int = 1
    active_weights: int = 0
    layer_weights: int = 0
    all_weights: int = 0

    @property
    def cache(self) -> KVSpec:
        """Cache layout of the attention layers. All keys and values have the size of the largest key."""
        heads = tuple(record.num_kv_heads for record in self.records)
        head_dim = max(record.head_dim for record in self.records)
        if min(heads) == max(heads):
            return KVSpec(len(heads), heads[0], head_dim)
        return KVSpec(len(heads), max(heads), head_dim, heads)

    @property
    def num_attention_layers(self) -> int:
        """See :class:`~eagle_kit.models.config.TargetConfig`."""
        return len(self.records)

    @property
    def states(self) -> StateSpec | None:
        """See :class:`~eagle_kit.models.config.TargetConfig`."""
        return self.recurrent

    def __hash__(self) -> int:
        return hash((self.model_type, self.num_layers, self.hidden_size, self.vocab_size))


def transformers_config(config: dict[str, Any], where: str) -> Any:
    """Make transformers' config from the content of a ``config.json``.

    Args:
        where: folder of the config, for messages.

    Raises:
        UserError: a type of model that transformers does not know, or that is refused.
    """
    from transformers import CONFIG_MAPPING, __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    name = read_architecture(config, where)
    model_type = config.get("model_type")
    if model_type in REFUSED:
        raise UserError(
            f"The target in {where} is of the type {model_type}, which {REFUSED[model_type]}.",
            "This is not supported; docs/reference/targets.md lists what is.",
        )
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UserError(
            f"The target in {where} is of the type {model_type!r}, which transformers {__version__} does not "
            "know.",
            "Upgrade transformers, or use another target.",
        )
    if name in CLASSES.values() and CLASSES.get(model_type) != name:
        raise UserError(
            f"The config.json in {where} says the architecture {name}, and the type {model_type}, "
            "which has another.",
            COPY_AGAIN,
        )
    try:
        return CONFIG_MAPPING[model_type].from_dict(_with_floats(config))
    except Exception as error:  # configs check their values by errors of many kinds
        reason = first_line(error)
        raise UserError(f"The config.json in {where} cannot be read ({reason}).", COPY_AGAIN) from error


def _with_floats(value: Any) -> Any:
    """Convert the numbers that JSON lacks, which transformers writes as ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_floats(each) for each in value]
    return value


def read_bridged_config(config: dict[str, Any], where: str = "the model's folder") -> BridgedConfig:
    """Read the architecture of a bridged target, from a model on the meta device.

    Args:
        config: content of its ``config.json``.
        where: folder of the config, for messages.

    Raises:
        UserError: a type of model that is not known or not supported.
    """
    # Layers, from a forward of the model.
    whole = transformers_config(config, where)
    text = whole.get_text_config()
    model = new_model(whole, where)
    layers = record_layers(model, decoder_of(model), text)
    records = tuple(replace(record, sinks=None) for record in layers.records)
    _check_values(records, where)

    # Values by their names in the configs of different families.
    rope = _rope(text)
    intermediate_size = _first(text, "intermediate_size", "ffn_dim", "n_inner") or 4 * text.hidden_size
    if isinstance(intermediate_size, list):
        intermediate_size = max(intermediate_size)
    norm_eps = _first(text, "rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon") or 1e-6
    eos = config.get("eos_token_id", getattr(text, "eos_token_id", None))

    # Numbers of weights, from the model.
    embedding = model.get_input_embeddings().weight
    decoder_layers = layers_of(decoder_of(model), text.num_hidden_layers)
    return BridgedConfig(
        model_type=str(config["model_type"]),
        hidden_size=int(text.hidden_size),
        num_layers=int(text.num_hidden_layers),
        num_heads=int(text.num_attention_heads),
        num_kv_heads=max(record.num_kv_heads for record in records),
        head_dim=min(record.value_dim for record in records),
        intermediate_size=int(intermediate_size),
        vocab_size=int(text.vocab_size),
        rms_norm_eps=float(norm_eps),
        rope_theta=float(rope.get("rope_theta") or 10000.0),
        rope_scaling=None,
        max_position_embeddings=_context(rope, text),
        tie_word_embeddings=embedding is model.get_output_embeddings().weight,
        eos_token_ids=read_ids({"eos_token_id": eos}, "eos_token_id", where),
        source=dict(config),
        records=records,
        recurrent=layers.states,
        logit_scale=_logit_scale(text),
        soft_cap=getattr(text, "final_logit_softcapping", None),
        num_chosen_experts=_num_chosen(text),
        active_weights=_num_active(decoder_layers, _num_chosen(text)),
        layer_weights=_num_elements(decoder_layers.parameters()),
        all_weights=_num_elements(
            {*decoder_of(model).parameters(), *model.get_output_embeddings().parameters()}
        ),
    )


def new_model(config: Any, where: str) -> Any:
    """Make a model on the meta device, with our attention function.

    Args:
        config: transformers' config.
        where: folder of the config, for messages.

    Raises:
        UserError: the model is no causal language model, or its attention cannot be replaced.
    """
    from transformers import AutoModelForCausalLM

    register()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION_NAME, trust_remote_code=False
            ).eval()
        pin_rope(model)
        replace_recurrence(model)
        return model
    except UserError:
        raise
    except (ImportError, KeyError, ValueError) as error:
        reason = first_line(error)
        raise UserError(
            f"The target in {where} is no causal language model whose attention can be replaced ({reason}).",
            "Use a model of another family; docs/reference/targets.md lists those that work.",
        ) from error


def pin_rope(model: torch.nn.Module) -> None:
    """Fix the angles of RoPE scalings that change them with the longest text of a batch."""
    module: Any
    for module in model.modules():
        if getattr(module, "rope_type", None) in PINNED_ROPE:
            module.rope_type = "default"


def decoder_of(model: Any) -> Any:
    """Text decoder inside a causal language model."""
    decoder = model.get_decoder()
    if decoder is model:
        return model.model
    return decoder


def _first(config: Any, *names: str) -> Any:
    """First attribute of ``names`` that is neither missing nor zero; None without any."""
    for name in names:
        value = getattr(config, name, None)
        if value:
            return value
    return None


def _rope(config: Any) -> dict[str, Any]:
    """RoPE parameters of a config; for models with several, those of layers with full attention."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    by_type = [value for value in rope.values() if isinstance(value, dict) and "rope_theta" in value]
    if not by_type:
        return rope
    return dict(rope.get("full_attention") or by_type[0])


def _context(rope: dict[str, Any], config: Any) -> int:
    """Context length in tokens. With a RoPE scaling of :data:`PINNED_ROPE` it ends at the original one."""
    context = int(getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT)
    if rope.get("rope_type") not in PINNED_ROPE:
        return context
    original = rope.get("original_max_position_embeddings")
    if not original:
        original = getattr(config, "original_max_position_embeddings", None)
    return min(context, int(original or context))


def _logit_scale(config: Any) -> float:
    """Factor of logits, by its names in the configs of Cohere, Granite, Falcon-H1 and HyperCLOVA X."""
    scaling = float(getattr(config, "logits_scaling", None) or 1.0)
    if config.model_type == "hyperclovax":
        return scaling
    return float(_first(config, "logit_scale", "lm_head_multiplier") or 1.0) / scaling


def _num_chosen(config: Any) -> int:
    """Number of experts that are chosen for each token; 1 without experts."""
    chosen = _first(config, "num_experts_per_tok", "moe_topk", "num_experts_per_token") or 1
    if isinstance(chosen, list):
        chosen = max(chosen)
    return int(chosen)


def _num_elements(parameters: Iterable[torch.Tensor]) -> int:
    """Number of elements of all matrices among ``parameters``."""
    return sum(parameter.numel() for parameter in parameters if parameter.ndim > 1)


def _num_active(layers: torch.nn.Module, num_chosen: int) -> int:
    """Number of elements of the matrices that a token is multiplied by. Experts are stacked in the first of
    three dimensions."""
    total = 0
    for parameter in layers.parameters():
        if parameter.ndim == 2:
            total += parameter.numel()
        elif parameter.ndim > 2:
            total += parameter.numel() * num_chosen // parameter.shape[0]
    return total


def layers_of(decoder: torch.nn.Module, count: int) -> torch.nn.ModuleList:
    """Find the layers of a decoder. Raises UserError if there is no list of ``count`` layers."""
    for name in LAYER_LISTS:
        layers = getattr(decoder, name, None)
        if isinstance(layers, torch.nn.ModuleList) and len(layers) == count:
            return layers
    raise UserError(
        f"The {count} layers of {type(decoder).__name__} were not found.",
        "Use a model of another family; docs/reference/targets.md lists those that work.",
    )


def norm_of(decoder: torch.nn.Module) -> torch.nn.Module:
    """Find the final norm of a decoder. Raises UserError if there is none."""
    name = norm_name(decoder)
    return getattr(decoder, name)


def norm_name(decoder: torch.nn.Module) -> str:
    """Name of the final norm of a decoder. Raises UserError if there is none."""
    for name in NORMS:
        if isinstance(getattr(decoder, name, None), torch.nn.Module):
            return name
    raise UserError(
        f"The norm behind the layers of {type(decoder).__name__} was not found.",
        "Use a model of another family; docs/reference/targets.md lists those that work.",
    )


def _check_values(records: tuple[LayerRecord, ...], where: str) -> None:
    """Raise UserError for values that are larger than keys, since the store has the size of keys."""
    if any(record.value_dim > record.head_dim for record in records):
        raise UserError(
            f"The target in {where} has values that are wider than its keys.",
            "This is not supported; docs/reference/targets.md lists what is.",
        )
