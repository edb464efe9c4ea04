"""Architectures of bridged targets, read from transformers' own configs."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from eagle_kit.core.errors import UserError, first_line
from eagle_kit.core.files import COPY_AGAIN
from eagle_kit.models.bridge.attention import NAME, register
from eagle_kit.models.bridge.records import LayerRecord, probe
from eagle_kit.models.bridge.recurrence import take_over_recurrence
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
"""Types of models that are refused by name, since they may run and be wrong."""
PINNED_ROPE = ("longrope", "dynamic")
"""RoPE scalings whose angles depend on the longest text of a batch: the context ends where they would
change."""

NORMS = "norm", "final_layernorm", "ln_f", "final_layer_norm", "norm_f"
LAYER_LISTS = "layers", "h", "blocks", "decoder_layers"


@dataclass(frozen=True)
class BridgedConfig(TargetConfig):
    """Architecture of a bridged target.

    Attributes:
        source: its ``config.json``.
        records: its attention layers, without their sinks.
        recurrent: what its recurrent layers keep of a text; None without any.
        soft_cap: of the logits.
        num_chosen_experts: experts of a token.
        active_weights, layer_weights, all_weights: elements of the matrices that a token meets in the layers,
            of all that are in them, and of the whole model's.
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
        """Keys and values of the attention layers, all as wide as the widest key."""
        heads = tuple(record.num_kv_heads for record in self.records)
        differ = heads if min(heads) < max(heads) else None
        return KVSpec(len(heads), max(heads), max(record.head_dim for record in self.records), differ)

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
    """Make transformers' config of a ``config.json``.

    Raises:
        UserError: a type of model that it does not know, or that is refused.
    """
    from transformers import CONFIG_MAPPING, __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    name = read_architecture(config, where)
    kind = config.get("model_type")
    if kind in REFUSED:
        raise UserError(
            f"The target in {where} is of the type {kind}, which {REFUSED[kind]}.",
            "This is not supported; docs/targets.md lists what is.",
        )
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise UserError(
            f"The target in {where} is of the type {kind!r}, which transformers {__version__} does not know.",
            "Upgrade transformers, or use another target.",
        )
    if name in CLASSES.values() and CLASSES.get(kind) != name:
        raise UserError(
            f"The config.json in {where} says the architecture {name}, and the type {kind}, "
            "which has another.",
            COPY_AGAIN,
        )
    try:
        return CONFIG_MAPPING[kind].from_dict(_with_floats(config))
    except Exception as error:  # configs check their values by errors of many kinds
        reason = first_line(error)
        raise UserError(f"The config.json in {where} cannot be read ({reason}).", COPY_AGAIN) from error


def _with_floats(value: Any) -> Any:
    """Numbers that JSON lacks, which transformers writes as ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(each) for key, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def read_bridged_config(config: dict[str, Any], where: str = "the model's folder") -> BridgedConfig:
    """Read the architecture of a target that is not written here, from a model without weights.

    Raises:
        UserError: a type of model that is not known or not supported.
    """
    whole = transformers_config(config, where)
    text = whole.get_text_config()
    model = new_model(whole, where)
    learned = probe(model, decoder_of(model), text)
    records = tuple(replace(each, sinks=None) for each in learned.records)
    _check_values(records, where)
    heads = int(text.num_attention_heads)
    rope = _rope(text)
    active, in_layers, in_all = _count(model, text)
    context = int(getattr(text, "max_position_embeddings", None) or 2048)
    eos = config.get("eos_token_id", getattr(text, "eos_token_id", None))
    return BridgedConfig(
        model_type=str(config["model_type"]),
        hidden_size=int(text.hidden_size),
        num_layers=int(text.num_hidden_layers),
        num_heads=heads,
        num_kv_heads=max(record.num_kv_heads for record in records),
        head_dim=min(record.value_dim for record in records),
        intermediate_size=_largest(
            _first(text, "intermediate_size", "ffn_dim", "n_inner") or 4 * text.hidden_size
        ),
        vocab_size=int(text.vocab_size),
        rms_norm_eps=float(
            _first(text, "rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon") or 1e-6
        ),
        rope_theta=float(rope.get("rope_theta") or 10000.0),
        rope_scaling=None,
        max_position_embeddings=_pinned_context(rope, text, context),
        tie_word_embeddings=model.get_input_embeddings().weight is model.get_output_embeddings().weight,
        eos_token_ids=read_ids({"eos_token_id": eos}, "eos_token_id", where),
        source=dict(config),
        records=records,
        recurrent=learned.states,
        logit_scale=_logit_scale(text),
        soft_cap=getattr(text, "final_logit_softcapping", None),
        num_chosen_experts=_num_chosen(text),
        active_weights=active,
        layer_weights=in_layers,
        all_weights=in_all,
    )


def new_model(config: Any, where: str) -> Any:
    """Make a model without weights, whose attention is ours."""
    from transformers import AutoModelForCausalLM

    register()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=NAME, trust_remote_code=False
            ).eval()
        pin_rope(model)
        take_over_recurrence(model)
        return model
    except UserError:
        raise
    except (ImportError, KeyError, ValueError) as error:
        reason = first_line(error)
        raise UserError(
            f"The target in {where} is no causal language model whose attention can be replaced ({reason}).",
            "Use a model of another family; docs/targets.md lists those that work.",
        ) from error


def pin_rope(model: torch.nn.Module) -> None:
    """Keep the angles of RoPE scalings that would change them with the longest text of a batch."""
    module: Any
    for module in model.modules():
        if getattr(module, "rope_type", None) in PINNED_ROPE:
            module.rope_type = "default"


def decoder_of(model: Any) -> Any:
    """The text decoder inside a causal language model."""
    decoder = model.get_decoder()
    return model.model if decoder is model else decoder


def _largest(size: int | list[int]) -> int:
    return max(size) if isinstance(size, list) else int(size)


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None))), None)


def _rope(config: Any) -> dict[str, Any]:
    """RoPE of a config; of a model with several, that of its layers with full attention."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    nested = [value for value in rope.values() if isinstance(value, dict) and "rope_theta" in value]
    return dict(rope.get("full_attention") or nested[0]) if nested else rope


def _pinned_context(rope: dict[str, Any], config: Any, context: int) -> int:
    if rope.get("rope_type") not in PINNED_ROPE:
        return context
    original = rope.get("original_max_position_embeddings")
    return min(context, int(original or getattr(config, "original_max_position_embeddings", None) or context))


def _logit_scale(config: Any) -> float:
    """Factor of logits by its names in configs: of Cohere, Granite, Falcon-H1 and HyperCLOVA X."""
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)
    if config.model_type == "hyperclovax":
        return divisor
    return float(_first(config, "logit_scale", "lm_head_multiplier") or 1.0) / divisor


def _num_chosen(config: Any) -> int:
    chosen = _first(config, "num_experts_per_tok", "moe_topk", "num_experts_per_token") or 1
    return int(max(chosen) if isinstance(chosen, list) else chosen)


def _count(model: Any, config: Any) -> tuple[int, int, int]:
    """Matrix elements that a token meets in the layers, those in them, and those of the model; experts are
    matrices of three dimensions, the first of which is theirs."""
    decoder = decoder_of(model)
    parts = {*decoder.parameters(), *model.get_output_embeddings().parameters()}
    chosen = _num_chosen(config)
    matrices = [p for p in layers_of(decoder, config.num_hidden_layers).parameters() if p.ndim > 1]
    met = [p.numel() if p.ndim == 2 else p.numel() * chosen // p.shape[0] for p in matrices]
    in_layers, in_all = (sum(p.numel() for p in each if p.ndim > 1) for each in (matrices, parts))
    return sum(met), in_layers, in_all


def layers_of(decoder: torch.nn.Module, count: int) -> torch.nn.ModuleList:
    """Find the layers of a decoder. Raises UserError where there is no list of ``count``."""
    for name in LAYER_LISTS:
        layers = getattr(decoder, name, None)
        if isinstance(layers, torch.nn.ModuleList) and len(layers) == count:
            return layers
    raise UserError(
        f"The {count} layers of {type(decoder).__name__} were not found.",
        "Use a model of another family; docs/targets.md lists those that work.",
    )


def norm_of(decoder: torch.nn.Module) -> torch.nn.Module:
    """Find the norm behind the last layer of a decoder. Raises UserError where there is none."""
    name = norm_name(decoder)
    return getattr(decoder, name)


def norm_name(decoder: torch.nn.Module) -> str:
    """Name of the norm behind the last layer of a decoder. Raises UserError where there is none."""
    name = next((name for name in NORMS if isinstance(getattr(decoder, name, None), torch.nn.Module)), None)
    if name is None:
        raise UserError(
            f"The norm behind the layers of {type(decoder).__name__} was not found.",
            "Use a model of another family; docs/targets.md lists those that work.",
        )
    return name


def _check_values(records: tuple[LayerRecord, ...], where: str) -> None:
    """Raise UserError where values are wider than keys: their store has the width of keys."""
    if any(record.value_dim > record.head_dim for record in records):
        raise UserError(
            f"The target in {where} has values that are wider than its keys.",
            "This is not supported; docs/targets.md lists what is.",
        )
