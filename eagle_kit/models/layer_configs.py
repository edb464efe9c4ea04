"""Layers that only some targets have: latent attention, experts, the gated delta rule, Mamba-2.

Each has a config and a function that reads it from a Hugging Face ``config.json``.

Sources: DeepSeek-V2 (arXiv 2405.04434, sections 2.1 and 2.2), DeepSeek-V3 (arXiv 2412.19437, section 2.1),
gated delta rule (arXiv 2412.06464), Mamba-2 (arXiv 2405.21060).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from eagle_kit.core.errors import UserError, shown
from eagle_kit.core.files import COPY_AGAIN
from eagle_kit.models.cache_specs import RecurrenceSpec, StateSpec
from eagle_kit.models.config_values import (
    MAX_EXPERTS,
    MAX_LAYERS,
    read_flag,
    read_ids,
    read_number,
    read_numbers,
    read_size,
    wrong_value,
)

TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
SCORINGS = ("softmax", "sigmoid")
V3_REQUIRED = ("routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob")
"""Keys of DeepSeek-V3 configs without a commonly accepted default."""
LAYER_TYPES = ("full_attention", "linear_attention")
"""Types of layers of Qwen3-Next and Qwen3.5: with attention, and with the gated delta rule."""


@dataclass(frozen=True)
class DeltaConfig:
    """Gated delta rule in place of the attention of some layers.

    Attributes:
        layers: indices of those layers.
        num_key_heads: number of heads of queries and keys.
        num_heads: number of heads of values.
        key_dim: size of a query and of a key.
        value_dim: size of a value.
        conv_width: width of the convolution in front of the rule, in tokens.
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def states(self) -> StateSpec:
        """Layout of the states of these layers."""
        recurrence = RecurrenceSpec(self.num_key_heads, self.num_heads, self.key_dim, self.value_dim)
        convolution = (self.channels, self.conv_width)
        num_layers = len(self.layers)
        return StateSpec((convolution,) * num_layers, (recurrence,) * num_layers)


class Multipliers(NamedTuple):
    """Factors of activations of Falcon-H1. Loading multiplies the weights by them.

    Attributes:
        attention_in: factor of the inputs of attention.
        key: factor of keys.
        attention_out: factor of the outputs of attention.
        ssm_in: factor of the inputs of Mamba.
        sections: factors of the five sections of Mamba's input projection (gates, values, keys, queries,
            time steps).
        ssm_out: factor of the outputs of Mamba.
        gate: factor of the gate of the MLP.
        down: factor of the outputs of the MLP.
    """

    attention_in: float
    key: float
    attention_out: float
    ssm_in: float
    sections: tuple[float, ...]
    ssm_out: float
    gate: float
    down: float


@dataclass(frozen=True)
class MambaConfig:
    """Mamba-2 beside the attention of every layer.

    Attributes:
        num_layers: number of layers of the target.
        num_heads: number of heads of values.
        head_dim: size of a value.
        num_groups: number of groups of heads. The heads of a group share keys and queries.
        state_dim: size of a key and of a query.
        conv_width: width of the convolution, in tokens.
        conv_bias: whether the convolution has a bias.
        in_proj_bias: whether the input projection has a bias.
        out_proj_bias: whether the output projection has a bias.
        has_norm: whether the outputs of each group have an RMSNorm.
        norm_before_gate: whether that norm comes before the gate, or after it.
        time_step_limit: smallest and largest time step.
        multipliers: factors of activations.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_width: int
    conv_bias: bool
    in_proj_bias: bool
    out_proj_bias: bool
    has_norm: bool
    norm_before_gate: bool
    time_step_limit: tuple[float, float]
    multipliers: Multipliers

    @property
    def intermediate_size(self) -> int:
        """Size of the values of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: values, keys and queries."""
        return self.intermediate_size + 2 * self.num_groups * self.state_dim

    @property
    def states(self) -> StateSpec:
        """Layout of the states of these layers."""
        recurrence = RecurrenceSpec(self.num_groups, self.num_heads, self.state_dim, self.head_dim)
        convolution = (self.channels, self.conv_width)
        return StateSpec((convolution,) * self.num_layers, (recurrence,) * self.num_layers)


@dataclass(frozen=True)
class MLAConfig:
    """Sizes of multi-head latent attention.

    Attributes:
        q_lora_rank: size of the query's bottleneck; None without one.
        kv_lora_rank: size of the latent.
        qk_nope_head_dim: size of the part of a query or key without RoPE.
        qk_rope_head_dim: size of the part of a query or key with RoPE.
        v_head_dim: size of a head's value.
        interleaved: RoPE pairs are ``(2i, 2i + 1)`` instead of ``(i, i + qk_rope_head_dim / 2)``.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    interleaved: bool = True

    @property
    def qk_head_dim(self) -> int:
        """Size of a query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts in place of the MLP.

    Attributes:
        num_experts: number of routed experts.
        num_experts_per_token: number of routed experts that are chosen for each token.
        intermediate_size: of a routed expert.
        shared_intermediate_size: of the shared experts together, which are one MLP; 0 without any.
        dense_layers: indices of layers that have an MLP instead.
        scoring: function from the gate's logits to scores.
        has_bias: experts are chosen by score plus a learned bias, which does not affect their weight.
        num_groups: number of groups of experts.
        num_topk_groups: number of best groups that experts are chosen from.
        normalises: weights of the chosen experts are divided by their sum.
        scale: factor of the weights.
        gates_shared: the output of the shared experts is multiplied by a sigmoid gate.
        local_experts: indices of the routed experts of this process (expert parallelism); None for all.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    dense_layers: tuple[int, ...] = ()
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False
    num_groups: int = 1
    num_topk_groups: int = 1
    normalises: bool = False
    scale: float = 1.0
    gates_shared: bool = False
    local_experts: range | None = None

    @property
    def num_local_experts(self) -> int:
        """Number of routed experts of this process."""
        if self.local_experts is None:
            return self.num_experts
        return len(self.local_experts)


def read_mla(config: dict[str, Any], where: str) -> MLAConfig:
    """Read the latent attention of a DeepSeek config. Raises UserError for a wrong value."""
    return MLAConfig(
        q_lora_rank=read_size(config, "q_lora_rank", where, 0, least=0) or None,
        kv_lora_rank=read_size(config, "kv_lora_rank", where),
        qk_nope_head_dim=read_size(config, "qk_nope_head_dim", where),
        qk_rope_head_dim=read_size(config, "qk_rope_head_dim", where),
        v_head_dim=read_size(config, "v_head_dim", where),
        interleaved=read_flag(config, "rope_interleave", where, True),
    )


def read_moe(config: dict[str, Any], family: str, where: str) -> MoEConfig | None:
    """Read the mixture of experts of a config; None without one.

    Args:
        family: value of :data:`~eagle_kit.models.config.FAMILIES`.

    Raises:
        UserError: a gate that is not supported, or a value that is missing or impossible.
    """
    # Each family names its keys in its own way.
    if family == "mixtral":
        moe = _read_mixtral_moe(config, where)
    elif family in ("qwen3_moe", "qwen3_next", "qwen3_5_moe"):
        moe = _read_qwen_moe(config, family, where)
    elif family.startswith(("deepseek", "glm4")) and config.get("n_routed_experts"):
        moe = _read_deepseek_moe(config, family != "deepseek_v2", where)
    else:
        return None

    # Groups are of equal size, and the best of them have enough experts for a token.
    num_candidates = moe.num_experts // moe.num_groups * moe.num_topk_groups
    has_equal_groups = moe.num_experts % moe.num_groups == 0
    has_enough_groups = moe.num_topk_groups <= moe.num_groups
    if not has_equal_groups or not has_enough_groups or num_candidates < moe.num_experts_per_token:
        raise UserError(
            f"The config keeps {moe.num_topk_groups} of {moe.num_groups} groups of its {moe.num_experts} "
            f"experts, and sends a token to {moe.num_experts_per_token}.",
            COPY_AGAIN,
        )
    return moe


def _read_mixtral_moe(config: dict[str, Any], where: str) -> MoEConfig:
    """Read the experts of Mixtral."""
    return MoEConfig(
        num_experts=read_size(config, "num_local_experts", where, most=MAX_EXPERTS),
        num_experts_per_token=read_size(config, "num_experts_per_tok", where),
        intermediate_size=read_size(config, "intermediate_size", where),
        normalises=True,
    )


def _read_qwen_moe(config: dict[str, Any], family: str, where: str) -> MoEConfig:
    """Read the experts of Qwen3-MoE, Qwen3-Next and Qwen3.5. The latter two have a shared expert."""
    # Layers with an MLP: those that are listed, and all but every ``step``-th.
    listed = read_ids(config, "mlp_only_layers", where)
    step = read_size(config, "decoder_sparse_step", where, 1)
    dense_layers: list[int] = []
    for layer in _layers(config, where):
        if layer in listed or (layer + 1) % step != 0:
            dense_layers.append(layer)

    count_key = "num_local_experts"
    if "num_experts" in config:
        count_key = "num_experts"
    is_plain = family == "qwen3_moe"
    moe = MoEConfig(
        num_experts=read_size(config, count_key, where, most=MAX_EXPERTS),
        num_experts_per_token=read_size(config, "num_experts_per_tok", where),
        intermediate_size=read_size(config, "moe_intermediate_size", where),
        dense_layers=tuple(dense_layers),
        normalises=read_flag(config, "norm_topk_prob", where, not is_plain),
    )
    if is_plain:
        return moe
    shared_size = read_size(config, "shared_expert_intermediate_size", where)
    return replace(moe, shared_intermediate_size=shared_size, gates_shared=True)


def _read_deepseek_moe(config: dict[str, Any], is_v3: bool, where: str) -> MoEConfig:
    """Read the experts of DeepSeek-V2, DeepSeek-V3 and GLM-4."""
    # The gate: how experts are chosen and scored.
    method = config.get("topk_method")
    scoring: Any = config.get("scoring_func")
    if is_v3:
        method = method or "noaux_tc"
        scoring = scoring or "sigmoid"
    else:
        method = method or "greedy"
        scoring = scoring or "softmax"
    _check_supported("topk_method", method, TOPK_METHODS)
    _check_supported("scoring_func", scoring, SCORINGS)
    if is_v3:
        missing = [name for name in V3_REQUIRED if config.get(name) is None]
        if missing:
            raise UserError(
                f"The config.json in {where} lacks {', '.join(missing)}.",
                "Copy config.json again from its source.",
            )

    # Layers with an MLP: the first ones, and all but every ``step``-th.
    num_first = read_size(config, "first_k_dense_replace", where, 0, least=0)
    step = read_size(config, "moe_layer_freq", where, 1)
    dense_layers: list[int] = []
    for layer in _layers(config, where):
        if layer < num_first or layer % step != 0:
            dense_layers.append(layer)

    # Without groups, experts are chosen from all.
    num_groups = 1
    num_topk_groups = 1
    if method != "greedy":
        num_groups = read_size(config, "n_group", where, 1)
        num_topk_groups = read_size(config, "topk_group", where, 1)

    size = read_size(config, "moe_intermediate_size", where)
    num_shared = read_size(config, "n_shared_experts", where, 0, least=0, most=MAX_EXPERTS)
    return MoEConfig(
        num_experts=read_size(config, "n_routed_experts", where, most=MAX_EXPERTS),
        num_experts_per_token=read_size(config, "num_experts_per_tok", where),
        intermediate_size=size,
        shared_intermediate_size=num_shared * size,
        dense_layers=tuple(dense_layers),
        scoring=scoring,
        has_bias=method == "noaux_tc",
        num_groups=num_groups,
        num_topk_groups=num_topk_groups,
        normalises=read_flag(config, "norm_topk_prob", where, is_v3),
        scale=float(read_number(config, "routed_scaling_factor", where, 1.0)),
    )


def _check_supported(key: str, value: Any, supported: tuple[str, ...]) -> None:
    """Raise UserError for a value of a gate that is not supported."""
    if value not in supported:
        raise UserError(
            f"The config's {key} {shown(value)} is not supported.", f"Supported are {', '.join(supported)}."
        )


def _layers(config: dict[str, Any], where: str) -> range:
    """Indices of the layers of the model."""
    return range(read_size(config, "num_hidden_layers", where, most=MAX_LAYERS))


def read_delta(config: dict[str, Any], where: str) -> DeltaConfig | None:
    """Read the layers with the gated delta rule of Qwen3-Next or Qwen3.5; None without any.

    Raises:
        UserError: a value that is missing or impossible, or a model without attention.
    """
    # Types of layers; where they are not listed, every ``interval``-th layer has attention.
    interval = read_size(config, "full_attention_interval", where, 4)
    num_layers = len(_layers(config, where))
    types = config.get("layer_types")
    if not types:
        types = []
        for layer in range(num_layers):
            has_attention = (layer + 1) % interval == 0
            types.append("full_attention" if has_attention else "linear_attention")
    is_known = isinstance(types, list) and all(str(each) in LAYER_TYPES for each in types)
    if not is_known or len(types) != num_layers:
        raise wrong_value("layer_types", types, where, f"{num_layers} of {' and '.join(LAYER_TYPES)}")
    layers = tuple(layer for layer, kind in enumerate(types) if kind == "linear_attention")
    if not layers:
        return None
    if len(layers) == num_layers:
        raise wrong_value("layer_types", types, where, "at least one full_attention")

    # Heads; those of values are shared out evenly among those of keys.
    num_heads = read_size(config, "linear_num_value_heads", where)
    num_key_heads = read_size(config, "linear_num_key_heads", where)
    if num_heads % num_key_heads:
        raise UserError(
            f"The config.json in {where} shares {num_key_heads} key heads among {num_heads}.", COPY_AGAIN
        )
    return DeltaConfig(
        layers=layers,
        num_key_heads=num_key_heads,
        num_heads=num_heads,
        key_dim=read_size(config, "linear_key_head_dim", where),
        value_dim=read_size(config, "linear_value_head_dim", where),
        conv_width=read_size(config, "linear_conv_kernel_dim", where, 4),
    )


def read_mamba(config: dict[str, Any], where: str) -> MambaConfig:
    """Read the Mamba-2 layers of Falcon-H1. Raises UserError for a value that is missing or impossible."""
    hidden_size = read_size(config, "hidden_size", where)
    expanded_size = read_size(config, "mamba_expand", where, 2) * hidden_size
    size = read_size(config, "mamba_d_ssm", where, expanded_size)
    num_heads = read_size(config, "mamba_n_heads", where, 128)
    num_groups = read_size(config, "mamba_n_groups", where, 1)
    if size % num_heads or num_heads % num_groups:
        raise UserError(
            f"The config.json in {where} divides {size} values by {num_heads} heads, and those by "
            f"{num_groups}.",
            COPY_AGAIN,
        )
    return MambaConfig(
        num_layers=len(_layers(config, where)),
        num_heads=num_heads,
        head_dim=size // num_heads,
        num_groups=num_groups,
        state_dim=read_size(config, "mamba_d_state", where, 256),
        conv_width=read_size(config, "mamba_d_conv", where, 4),
        conv_bias=read_flag(config, "mamba_conv_bias", where, True),
        in_proj_bias=read_flag(config, "mamba_proj_bias", where),
        out_proj_bias=read_flag(config, "projectors_bias", where),
        has_norm=read_flag(config, "mamba_rms_norm", where),
        norm_before_gate=read_flag(config, "mamba_norm_before_gate", where, True),
        time_step_limit=_read_time_step_limit(config, where),
        multipliers=_read_multipliers(config, where),
    )


def _read_time_step_limit(config: dict[str, Any], where: str) -> tuple[float, float]:
    """Read the smallest and the largest time step.

    JSON has no infinity: transformers writes it as ``{"__float__": "Infinity"}``.
    """
    given = config.get("time_step_limit") or (0.0, math.inf)
    limits: list[float] = []
    try:
        for limit in given:
            number = limit["__float__"] if isinstance(limit, dict) else limit
            limits.append(float(number))
        smallest, largest = limits
    except (TypeError, ValueError, KeyError):
        raise _wrong_limits(given, where) from None
    if not 0.0 <= smallest < largest:
        raise _wrong_limits(given, where)
    return smallest, largest


def _wrong_limits(given: Any, where: str) -> UserError:
    return wrong_value("time_step_limit", given, where, "two numbers, the smaller first")


def _read_multipliers(config: dict[str, Any], where: str) -> Multipliers:
    """Read the factors of Falcon-H1; 1.0 where they are absent."""

    def read(key: str) -> float:
        return read_number(config, key, where, 1.0)

    gate, down = read_numbers(config, "mlp_multipliers", where, 2)
    return Multipliers(
        attention_in=read("attention_in_multiplier"),
        key=read("key_multiplier"),
        attention_out=read("attention_out_multiplier"),
        ssm_in=read("ssm_in_multiplier"),
        sections=read_numbers(config, "ssm_multipliers", where, 5),
        ssm_out=read("ssm_out_multiplier"),
        gate=gate,
        down=down,
    )
