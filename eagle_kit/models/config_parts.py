"""Optional parts of a target's config (latent attention, mixture of experts), and cache layouts.

Sources: DeepSeek-V2 (arXiv 2405.04434, sections 2.1 and 2.2), DeepSeek-V3 (arXiv 2412.19437, section 2.1).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from eagle_kit.core.errors import UserError

TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True)
class KVSpec:
    """Cache layout of a key and a value of ``num_heads`` heads of ``head_dim`` in each of ``num_layers``
    layers."""

    num_layers: int
    num_heads: int
    head_dim: int

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


V3_NEEDS = ("routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob")
"""Keys of DeepSeek-V3 configs without a commonly accepted default."""


def read_mla(config: dict[str, Any]) -> MLAConfig:
    """Parse the latent attention of a DeepSeek config."""
    return MLAConfig(
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        interleaved=config.get("rope_interleave") is not False,
    )


def read_moe(config: dict[str, Any], family: str) -> MoEConfig | None:
    """Parse the mixture of experts of a config; None without one. Raises UserError for an unsupported
    gate."""
    layers = range(config["num_hidden_layers"])
    if family == "mixtral":
        return MoEConfig(
            config["num_local_experts"],
            config["num_experts_per_tok"],
            config["intermediate_size"],
            normalises=True,
        )
    if family == "qwen3_moe":
        dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
        return MoEConfig(
            config["num_experts"] if "num_experts" in config else config["num_local_experts"],
            config["num_experts_per_tok"],
            config["moe_intermediate_size"],
            dense_layers=tuple(i for i in layers if i in dense or (i + 1) % step),
            normalises=bool(config.get("norm_topk_prob", False)),
        )
    if not family.startswith("deepseek") or not config.get("n_routed_experts"):
        return None
    is_v3 = family == "deepseek_v3"
    method = config.get("topk_method") or ("noaux_tc" if is_v3 else "greedy")
    scoring: Any = config.get("scoring_func") or ("sigmoid" if is_v3 else "softmax")
    for name, value, known in (("topk_method", method, TOPK_METHODS), ("scoring_func", scoring, SCORINGS)):
        if value not in known:
            raise UserError(
                f"The config's {name} {value!r} is not supported.", f"Supported are {', '.join(known)}."
            )
    if is_v3 and (missing := [name for name in V3_NEEDS if config.get(name) is None]):
        raise UserError(
            f"The config of a DeepSeek-V3 lacks {', '.join(missing)}.",
            "Copy config.json again from its source.",
        )
    first, step = config.get("first_k_dense_replace") or 0, config.get("moe_layer_freq") or 1
    limited = method != "greedy"
    moe = MoEConfig(
        config["n_routed_experts"],
        config["num_experts_per_tok"],
        config["moe_intermediate_size"],
        shared_intermediate_size=(config.get("n_shared_experts") or 0) * config["moe_intermediate_size"],
        dense_layers=tuple(i for i in layers if i < first or i % step),
        scoring=scoring,
        has_bias=method == "noaux_tc",
        num_groups=(limited and config.get("n_group")) or 1,
        num_kept_groups=(limited and config.get("topk_group")) or 1,
        normalises=bool(config.get("norm_topk_prob", is_v3)),
        scale=float(config.get("routed_scaling_factor") or 1.0),
    )
    kept = moe.num_experts // moe.num_groups * moe.num_kept_groups
    if (
        moe.num_experts % moe.num_groups
        or moe.num_kept_groups > moe.num_groups
        or kept < moe.num_experts_per_token
    ):
        raise UserError(
            f"The config keeps {moe.num_kept_groups} of {moe.num_groups} groups of its {moe.num_experts} "
            f"experts, and sends a token to {moe.num_experts_per_token}.",
            "Copy config.json again from its source.",
        )
    return moe


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor of queries and keys for a context ``factor`` times as long (arXiv 2309.00071, 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
