"""Architectures of targets and draft heads, parsed from Hugging Face ``config.json`` dictionaries."""

from dataclasses import dataclass
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.models.config_parts import (
    CacheSpec,
    KVSpec,
    LatentSpec,
    MLAConfig,
    MoEConfig,
    read_mla,
    read_moe,
    yarn_magnitude,
)

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""RoPE scalings and the parameters that each requires."""


class DecoderConfig:
    """Decoder layer of a target or draft head: its sizes, its attention, grouped-query or latent.

    Attributes:
        num_kv_heads: equal to ``num_heads`` with latent attention.
        head_dim: size of a query or key.
        attention_bias, attention_out_bias: biases of the input and of the output projections.
        qk_norm: an RMSNorm of each query and key head.
        mla: latent attention in place of grouped-query attention.
        moe: experts in place of the MLP.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    attention_bias: bool
    attention_out_bias: bool = False
    qk_norm: bool = False
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None

    @property
    def attention_scale(self) -> float:
        """Factor of the attention scores. DeepSeek's YaRN multiplies it by the square of its
        ``mscale_all_dim`` magnitude."""
        scale = self.head_dim**-0.5
        if self.mla and self.rope_scaling and (mscale := self.rope_scaling.get("mscale_all_dim")):
            scale *= yarn_magnitude(self.rope_scaling["factor"], mscale) ** 2
        return scale

    @property
    def rope_dim(self) -> int:
        """Number of rotated elements of a head."""
        return self.mla.qk_rope_head_dim if self.mla else self.head_dim

    def cache_of(self, num_layers: int) -> CacheSpec:
        """Cache layout of ``num_layers`` layers."""
        if self.mla is None:
            return KVSpec(num_layers, self.num_kv_heads, self.head_dim)
        latent, rope = self.mla.kv_lora_rank, self.mla.qk_rope_head_dim
        return LatentSpec(num_layers, latent, rope, self.attention_scale)


@dataclass(frozen=True)
class TargetConfig(DecoderConfig):
    """Architecture of a decoder: the Llama family, and with latent attention or mixtures of experts DeepSeek,
    Qwen-MoE and Mixtral. Sizes are numbers of elements.

    Attributes:
        intermediate_size: of dense layers.
        moe: experts in place of the MLP.
        num_mtp_layers: next-token-prediction layers that a checkpoint has behind the decoder's.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    num_mtp_layers: int = 0

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "TargetConfig":
        """Parse a Hugging Face config, with old or new RoPE keys. Raises UserError for an unknown
        architecture."""
        name = (config.get("architectures") or ["?"])[0]
        family = FAMILIES.get(name)
        if family is None:
            raise UserError(
                f"The target architecture {name} is not supported.",
                f"Use one of {', '.join(FAMILIES)}.",
            )
        theta, scaling = read_rope(config)
        heads = config["num_attention_heads"]
        bias = bool(config.get("attention_bias", False))
        eos = config.get("eos_token_id")
        mla = read_mla(config) if family.startswith("deepseek") else None
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return cls(
            model_type=family,
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=heads if mla else config.get("num_key_value_heads") or heads,
            head_dim=mla.qk_head_dim if mla else head_dim,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=_context(config, family),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=family == "qwen2" or bias,
            attention_out_bias=family != "qwen2" and bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            eos_token_ids=_as_tuple(eos),
            bos_token_id=config.get("bos_token_id"),
            mla=mla,
            moe=read_moe(config, family),
            num_mtp_layers=config.get("num_nextn_predict_layers") or 0,
        )

    @property
    def default_aux_layer_ids(self) -> tuple[int, int, int]:
        """Low, middle and high: the inputs of layers 2, L // 2 and L - 3, clamped for models of few
        layers."""
        last = self.num_layers
        return min(2, last), last // 2, max(last - 3, 0)

    @property
    def cache(self) -> CacheSpec:
        """Cache layout of the model."""
        return self.cache_of(self.num_layers)


class HeadArchitecture:
    """Architecture of a draft head, whatever its kind.

    Attributes:
        hidden_size: of the head, H.
        target_hidden_size: of the target's states.
        draft_vocab_size: tokens that the head can propose, Vd.
        max_position_embeddings: positions it was trained for; 0 when unknown.
        aux_layer_ids: captured states, as *inputs* of these target layers (``hidden_states[i]`` of Hugging
            Face); empty for heads that read the target's final states.
        num_modules: 1, or one for every step of a draft.
        target: name of the target, for people and checks.
        template_hash: hash of the chat template the head was trained with; empty when unknown.
    """

    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    aux_layer_ids: tuple[int, ...]
    num_modules: int = 1
    target: str
    template_hash: str

    @property
    def layer(self) -> DecoderConfig:
        """Sizes of its decoder layer."""
        assert isinstance(self, DecoderConfig)
        return self

    @property
    def attention_scale(self) -> float:
        """Factor of the scores."""
        return self.layer.attention_scale

    @property
    def owns_output(self) -> bool:
        """True for an output layer of its own, False for the target's."""
        return True

    @property
    def cache(self) -> CacheSpec:
        """Entry of a token in the cache of all modules."""
        return self.layer.cache_of(self.num_modules)


class TiedArchitecture(HeadArchitecture):
    """Architecture of a head of the target's width that reads its final states and proposes any of its
    tokens."""

    @property
    def target_hidden_size(self) -> int:  # type: ignore[override]
        """H, the head's own."""
        return self.hidden_size

    @property
    def draft_vocab_size(self) -> int:  # type: ignore[override]
        """V, the target's vocabulary."""
        return self.vocab_size

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        """None."""
        return ()

    @property
    def owns_output(self) -> bool:
        """False: the output layer is the target's."""
        return False


def read_rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """RoPE base and scaling of a Hugging Face config, from ``rope_parameters``, or ``rope_theta`` and
    ``rope_scaling``."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    old_kind = rope.pop("type", None)
    kind = rope.get("rope_type") or old_kind or "default"
    if kind not in ROPE_TYPES:
        raise UserError(
            f"The RoPE scaling {kind!r} of this config is not supported.",
            f"Supported are {', '.join(ROPE_TYPES)}.",
        )
    if missing := [key for key in ROPE_TYPES[kind] if not isinstance(rope.get(key), int | float)]:
        raise UserError(
            f"The RoPE scaling {kind!r} of this config has no {', '.join(missing)}.",
            "Copy config.json again from its source.",
        )
    return theta, None if kind == "default" else {**rope, "rope_type": kind}


def _context(config: dict[str, Any], family: str) -> int:
    """Context length in tokens; limited to a sliding window, which up to its width equals full attention."""
    context = config.get("max_position_embeddings", 2048)
    window = config.get("sliding_window")
    uses_window = window is not None and (
        family in ("mistral", "mixtral") or config.get("use_sliding_window", False)
    )
    return min(context, window) if uses_window and window else context


def _as_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
