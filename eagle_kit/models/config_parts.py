"""Values of a ``config.json``, optional parts of a target's (latent attention, experts), and cache layouts.

Sources: DeepSeek-V2 (arXiv 2405.04434, sections 2.1 and 2.2), DeepSeek-V3 (arXiv 2412.19437, section 2.1).
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from eagle_kit.core.errors import UserError, shown
from eagle_kit.core.files import COPY_AGAIN

MAX_SIZE = 2**24
MAX_LAYERS, MAX_EXPERTS, MAX_POSITIONS = 256, 1024, 2**31 - 1
"""Largest sizes of a config: the bytes of no tensor overflow, and no list takes long to make."""
NUMBERS = 1e-15, 1e15
TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True)
class KVSpec:
    """Cache layout of a key and a value of ``num_heads`` heads of ``head_dim`` in each of ``num_layers``
    layers; ``heads`` are those that each layer uses of them, where they differ."""

    num_layers: int
    num_heads: int
    head_dim: int
    heads: tuple[int, ...] | None = None

    @property
    def values_per_token(self) -> int:
        """Number of cached values per token."""
        return 2 * self.num_layers * self.num_heads * self.head_dim


@dataclass(frozen=True)
class LatentSpec:
    """Cache layout of one row in each of ``num_layers`` layers: a latent of ``latent_dim`` values, then
    ``rope_dim`` rotated values. All heads share the row; scores are multiplied by ``scale``."""

    num_layers: int
    latent_dim: int
    rope_dim: int
    scale: float

    @property
    def values_per_token(self) -> int:
        """Number of cached values per token."""
        return self.num_layers * (self.latent_dim + self.rope_dim)


CacheSpec = KVSpec | LatentSpec


@dataclass(frozen=True)
class RecurrenceSpec:
    """State of a recurrent layer: ``[num_heads, key_dim, value_dim]`` in fp32.

    Attributes:
        num_key_heads: of queries and keys, of which ``num_heads / num_key_heads`` successive heads share one.
        per_channel: every channel of a key has a decay of its own.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    per_channel: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a request's state."""
        return self.num_heads, self.key_dim, self.value_dim

    @property
    def written(self) -> int:
        """Numbers that a token writes: key, value and decay."""
        decays = self.num_heads * (self.key_dim if self.per_channel else 1)
        return self.num_key_heads * self.key_dim + self.num_heads * self.value_dim + decays


@dataclass(frozen=True)
class StateSpec:
    """What a target with recurrent layers keeps of a text besides keys and values, whatever its length.

    Attributes:
        convolutions: (channels, width) of each; the last ``width - 1`` inputs are kept.
        recurrences: of the layers, in order.
    """

    convolutions: tuple[tuple[int, int], ...] = ()
    recurrences: tuple[RecurrenceSpec, ...] = ()

    def num_bytes(self, itemsize: int) -> int:
        """Bytes of a text's state, where activations have ``itemsize`` bytes."""
        columns = sum((width - 1) * channels for channels, width in self.convolutions)
        return columns * itemsize + 4 * sum(math.prod(each.shape) for each in self.recurrences)

    def num_bytes_of_node(self, itemsize: int) -> int:
        """Bytes that a node of a window keeps until the window is committed."""
        columns = sum(channels for channels, _ in self.convolutions)
        return columns * itemsize + 4 * sum(each.written for each in self.recurrences)

    @property
    def num_bytes_of_pair(self) -> int:
        """Bytes that a layer needs for a pair of nodes of a window, where channels decay by themselves."""
        pairs = (3 * each.num_heads * each.key_dim for each in self.recurrences if each.per_channel)
        return 4 * max(pairs, default=0)


@dataclass(frozen=True)
class DeltaConfig:
    """Gated delta rule (arXiv 2412.06464) in place of the attention of some layers.

    Attributes:
        layers: numbers of those layers.
        num_key_heads, num_heads: of queries and keys, and of values.
        key_dim, value_dim: sizes of a head.
        conv_width: tokens that the convolution before it sees.
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def states(self) -> StateSpec:
        """What the layers keep of a text."""
        one = RecurrenceSpec(self.num_key_heads, self.num_heads, self.key_dim, self.value_dim)
        count = len(self.layers)
        return StateSpec(((self.channels, self.conv_width),) * count, (one,) * count)


class Multipliers(NamedTuple):
    """Factors of Falcon-H1's activations: of the attention's inputs, keys and outputs, of Mamba's inputs, of
    the five ``sections`` that its projection gives (gate, values, keys, queries, steps) and of its outputs,
    and of the MLP's gate and outputs."""

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
    """Mamba-2 (arXiv 2405.21060) beside the attention of every layer.

    Attributes:
        num_layers: of the target.
        num_heads, head_dim: of values.
        num_groups, state_dim: heads of a group share keys and queries of ``state_dim``.
        conv_width: tokens that the convolution before it sees.
        conv_bias, has_bias, out_bias: of the convolution, and of the projections in and out.
        norms, norms_before_gate: an RMSNorm of each group's outputs, before or after their gate.
        step_limits: least and most of a step.
        multipliers: part of the weights once they are loaded.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_width: int
    conv_bias: bool
    has_bias: bool
    out_bias: bool
    norms: bool
    norms_before_gate: bool
    step_limits: tuple[float, float]
    multipliers: Multipliers

    @property
    def inner(self) -> int:
        """Values of a token."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, keys and queries."""
        return self.inner + 2 * self.num_groups * self.state_dim

    @property
    def states(self) -> StateSpec:
        """What the layers keep of a text."""
        one = RecurrenceSpec(self.num_groups, self.num_heads, self.state_dim, self.head_dim)
        return StateSpec(((self.channels, self.conv_width),) * self.num_layers, (one,) * self.num_layers)


@dataclass(frozen=True)
class MLAConfig:
    """Sizes of multi-head latent attention.

    Attributes:
        q_lora_rank: size of the query's bottleneck; None without one.
        kv_lora_rank: size of the latent.
        qk_nope_head_dim, qk_rope_head_dim: sizes of the parts of a query or key without and with RoPE.
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
        num_experts, num_experts_per_token: number of routed experts, and of those chosen per token.
        intermediate_size: of a routed expert.
        shared_intermediate_size: of the shared experts together, which are one MLP; 0 without any.
        dense_layers: layers that have an MLP instead.
        scoring: function from the gate's logits to scores.
        has_bias: experts are chosen by score plus a learned bias, which does not affect their weight.
        num_groups, num_kept_groups: groups of experts, and number of best groups that experts are chosen
            from.
        normalises: weights of the chosen experts are divided by their sum.
        scale: factor of the weights.
        gates_shared: the shared experts are multiplied by a sigmoid of their own.
        own_experts: numbers of the routed experts that this process has (expert parallelism); None for all.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    dense_layers: tuple[int, ...] = ()
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False
    num_groups: int = 1
    num_kept_groups: int = 1
    normalises: bool = False
    scale: float = 1.0
    gates_shared: bool = False
    own_experts: range | None = None

    @property
    def num_own_experts(self) -> int:
        """Number of routed experts that this process has."""
        return self.num_experts if self.own_experts is None else len(self.own_experts)


V3_NEEDS = ("routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob")
"""Keys of DeepSeek-V3 configs without a commonly accepted default."""


def read_size(
    config: dict[str, Any],
    key: str,
    where: str,
    default: int | None = None,
    *,
    least: int = 1,
    most: int = MAX_SIZE,
) -> int:
    """Whole number from ``least`` to ``most``; ``default`` where it is absent or null. Raises UserError."""
    value = default if config.get(key) is None else config[key]
    if type(value) is not int or not least <= value <= most:
        raise wrong_value(key, value, where, f"a whole number from {least} to {most}")
    return value


def read_number(config: dict[str, Any], key: str, where: str, default: float | None = None) -> float:
    """Positive number; ``default`` where it is absent or null. Raises UserError."""
    value = default if config.get(key) is None else config[key]
    if type(value) not in (int, float) or not NUMBERS[0] <= value <= NUMBERS[1]:  # type: ignore[operator]
        raise wrong_value(key, value, where, f"a number from {NUMBERS[0]} to {NUMBERS[1]}")
    return value  # type: ignore[return-value]


def read_numbers(config: dict[str, Any], key: str, where: str, count: int) -> tuple[float, ...]:
    """``count`` positive numbers; ones where they are absent or null. Raises UserError."""
    values = [1.0] * count if config.get(key) is None else config[key]
    if not isinstance(values, list) or len(values) != count:
        raise wrong_value(key, values, where, f"a list of {count} numbers")
    return tuple(float(read_number({key: value}, key, where)) for value in values)


def read_flag(config: dict[str, Any], key: str, where: str, default: bool = False) -> bool:
    """True or false; ``default`` where it is absent or null. Raises UserError."""
    value = default if config.get(key) is None else config[key]
    if type(value) is not bool:
        raise wrong_value(key, value, where, "true or false")
    return value


def read_table(config: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    """Copy of an object; empty where it is absent or null. Raises UserError."""
    value = {} if config.get(key) is None else config[key]
    if not isinstance(value, dict):
        raise wrong_value(key, value, where, "an object")
    return dict(value)


def read_ids(config: dict[str, Any], key: str, where: str) -> tuple[int, ...]:
    """Whole numbers, one or a list; none where it is absent or null. Raises UserError."""
    value = config.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(number) is int and 0 <= number <= MAX_SIZE for number in ids):
        raise wrong_value(key, value, where, f"whole numbers from 0 to {MAX_SIZE}")
    return tuple(ids)


def read_architecture(config: dict[str, Any], where: str) -> str:
    """First of the ``architectures``; a question mark without one. Raises UserError."""
    names = config.get("architectures") or ["?"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise wrong_value("architectures", names, where, "a list of names")
    return names[0]


def wrong_value(key: str, value: object, where: str, wanted: str) -> UserError:
    """Error for a value of a ``config.json`` that is not the ``wanted`` one, or that is missing."""
    says = f"has no {key!r}" if value is None else f"says {key} {shown(value)} instead of {wanted}"
    return UserError(f"The config.json in {where} {says}.", COPY_AGAIN)


def read_mla(config: dict[str, Any], where: str) -> MLAConfig:
    """Parse the latent attention of a DeepSeek config. Raises UserError."""
    return MLAConfig(
        q_lora_rank=read_size(config, "q_lora_rank", where, 0, least=0) or None,
        kv_lora_rank=read_size(config, "kv_lora_rank", where),
        qk_nope_head_dim=read_size(config, "qk_nope_head_dim", where),
        qk_rope_head_dim=read_size(config, "qk_rope_head_dim", where),
        v_head_dim=read_size(config, "v_head_dim", where),
        interleaved=read_flag(config, "rope_interleave", where, True),
    )


def read_moe(config: dict[str, Any], family: str, where: str) -> MoEConfig | None:
    """Parse the mixture of experts of a config; None without one. Raises UserError for an unsupported
    gate and impossible sizes."""
    if family == "mixtral":
        moe = MoEConfig(
            read_size(config, "num_local_experts", where, most=MAX_EXPERTS),
            read_size(config, "num_experts_per_tok", where),
            read_size(config, "intermediate_size", where),
            normalises=True,
        )
    elif family in ("qwen3_moe", "qwen3_next", "qwen3_5_moe"):
        dense, step = (
            read_ids(config, "mlp_only_layers", where),
            read_size(config, "decoder_sparse_step", where, 1),
        )
        count = "num_experts" if "num_experts" in config else "num_local_experts"
        moe = MoEConfig(
            read_size(config, count, where, most=MAX_EXPERTS),
            read_size(config, "num_experts_per_tok", where),
            read_size(config, "moe_intermediate_size", where),
            dense_layers=tuple(i for i in _layers(config, where) if i in dense or (i + 1) % step),
            normalises=read_flag(config, "norm_topk_prob", where, family != "qwen3_moe"),
        )
        if family != "qwen3_moe":
            shared = read_size(config, "shared_expert_intermediate_size", where)
            moe = replace(moe, shared_intermediate_size=shared, gates_shared=True)
    elif family.startswith(("deepseek", "glm4")) and config.get("n_routed_experts"):
        moe = _read_deepseek_moe(config, family != "deepseek_v2", where)
    else:
        return None
    kept = moe.num_experts // moe.num_groups * moe.num_kept_groups
    if (
        moe.num_experts % moe.num_groups
        or moe.num_kept_groups > moe.num_groups
        or kept < moe.num_experts_per_token
    ):
        raise UserError(
            f"The config keeps {moe.num_kept_groups} of {moe.num_groups} groups of its {moe.num_experts} "
            f"experts, and sends a token to {moe.num_experts_per_token}.",
            COPY_AGAIN,
        )
    return moe


def _layers(config: dict[str, Any], where: str) -> range:
    return range(read_size(config, "num_hidden_layers", where, most=MAX_LAYERS))


def _read_deepseek_moe(config: dict[str, Any], is_v3: bool, where: str) -> MoEConfig:
    method = config.get("topk_method") or ("noaux_tc" if is_v3 else "greedy")
    scoring: Any = config.get("scoring_func") or ("sigmoid" if is_v3 else "softmax")
    for name, value, known in (("topk_method", method, TOPK_METHODS), ("scoring_func", scoring, SCORINGS)):
        if value not in known:
            raise UserError(
                f"The config's {name} {shown(value)} is not supported.", f"Supported are {', '.join(known)}."
            )
    if is_v3 and (missing := [name for name in V3_NEEDS if config.get(name) is None]):
        raise UserError(
            f"The config.json in {where} lacks {', '.join(missing)}.",
            "Copy config.json again from its source.",
        )
    first = read_size(config, "first_k_dense_replace", where, 0, least=0)
    step = read_size(config, "moe_layer_freq", where, 1)
    limited = method != "greedy"
    size = read_size(config, "moe_intermediate_size", where)
    shared = read_size(config, "n_shared_experts", where, 0, least=0, most=MAX_EXPERTS)
    return MoEConfig(
        read_size(config, "n_routed_experts", where, most=MAX_EXPERTS),
        read_size(config, "num_experts_per_tok", where),
        size,
        shared_intermediate_size=shared * size,
        dense_layers=tuple(i for i in _layers(config, where) if i < first or i % step),
        scoring=scoring,
        has_bias=method == "noaux_tc",
        num_groups=read_size(config, "n_group", where, 1) if limited else 1,
        num_kept_groups=read_size(config, "topk_group", where, 1) if limited else 1,
        normalises=read_flag(config, "norm_topk_prob", where, is_v3),
        scale=float(read_number(config, "routed_scaling_factor", where, 1.0)),
    )


def read_delta(config: dict[str, Any], where: str) -> DeltaConfig | None:
    """Parse the layers with the gated delta rule of a Qwen3-Next or Qwen3.5; None without any. Raises
    UserError."""
    every = read_size(config, "full_attention_interval", where, 4)
    count = len(_layers(config, where))
    kinds = config.get("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(count)
    ]
    known = {"linear_attention", "full_attention"}
    if not isinstance(kinds, list) or len(kinds) != count or not known.issuperset(map(str, kinds)):
        raise wrong_value("layer_types", kinds, where, f"{count} of {' and '.join(sorted(known))}")
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
    if not layers:
        return None
    if len(layers) == count:
        raise wrong_value("layer_types", kinds, where, "at least one full_attention")
    heads, keys = (read_size(config, f"linear_num_{name}_heads", where) for name in ("value", "key"))
    if heads % keys:
        raise UserError(f"The config.json in {where} shares {keys} key heads among {heads}.", COPY_AGAIN)
    key, value = (read_size(config, f"linear_{name}_head_dim", where) for name in ("key", "value"))
    return DeltaConfig(layers, keys, heads, key, value, read_size(config, "linear_conv_kernel_dim", where, 4))


def read_mamba(config: dict[str, Any], where: str) -> MambaConfig:
    """Parse the Mamba-2 layers of a Falcon-H1. Raises UserError."""
    hidden = read_size(config, "hidden_size", where)
    inner = read_size(config, "mamba_d_ssm", where, read_size(config, "mamba_expand", where, 2) * hidden)
    heads = read_size(config, "mamba_n_heads", where, 128)
    groups = read_size(config, "mamba_n_groups", where, 1)
    if inner % heads or heads % groups:
        raise UserError(
            f"The config.json in {where} divides {inner} values by {heads} heads, and those by {groups}.",
            COPY_AGAIN,
        )
    limits = config.get("time_step_limit") or (0.0, math.inf)
    try:
        least, most = (float(x["__float__"] if isinstance(x, dict) else x) for x in limits)
    except (TypeError, ValueError, KeyError):
        least, most = math.inf, 0.0
    if not 0.0 <= least < most:
        raise wrong_value("time_step_limit", limits, where, "two numbers, the smaller first")
    return MambaConfig(
        len(_layers(config, where)),
        heads,
        inner // heads,
        groups,
        read_size(config, "mamba_d_state", where, 256),
        read_size(config, "mamba_d_conv", where, 4),
        read_flag(config, "mamba_conv_bias", where, True),
        read_flag(config, "mamba_proj_bias", where),
        read_flag(config, "projectors_bias", where),
        read_flag(config, "mamba_rms_norm", where),
        read_flag(config, "mamba_norm_before_gate", where, True),
        (least, most),
        _read_multipliers(config, where),
    )


def _read_multipliers(config: dict[str, Any], where: str) -> Multipliers:
    one = partial(read_number, config, where=where, default=1.0)
    return Multipliers(
        one("attention_in_multiplier"),
        one("key_multiplier"),
        one("attention_out_multiplier"),
        one("ssm_in_multiplier"),
        read_numbers(config, "ssm_multipliers", where, 5),
        one("ssm_out_multiplier"),
        *read_numbers(config, "mlp_multipliers", where, 2),
    )


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor of queries and keys for a context ``factor`` times as long (arXiv 2309.00071, 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
