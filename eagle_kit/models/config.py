"""Architectures as plain data, read from Hugging Face ``config.json`` dictionaries."""

from dataclasses import dataclass, replace
from typing import Any

from eagle_kit.core.errors import UserError

LLAMA_FAMILY = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""RoPE scalings and the numbers that each needs."""


@dataclass(frozen=True)
class TargetConfig:
    """A dense decoder of the Llama family. Sizes are counts of elements; ``head_dim`` is per head."""

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

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "TargetConfig":
        """Read a Hugging Face config, old or new RoPE spelling. Raises UserError for an unknown
        architecture."""
        name = (config.get("architectures") or ["?"])[0]
        family = LLAMA_FAMILY.get(name)
        if family is None:
            raise UserError(
                f"The target's architecture {name} is not one that eagle_kit knows.",
                f"Use one of {', '.join(LLAMA_FAMILY)}.",
            )
        theta, scaling = read_rope(config)
        heads = config["num_attention_heads"]
        bias = bool(config.get("attention_bias", False))
        eos = config.get("eos_token_id")
        return cls(
            model_type=family,
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
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
            qk_norm=family == "qwen3",
            eos_token_ids=_as_tuple(eos),
            bos_token_id=config.get("bos_token_id"),
        )

    @property
    def default_aux_layer_ids(self) -> tuple[int, int, int]:
        """Low, mid and high: the inputs of layers 2, L // 2 and L - 3, clamped for models of few layers."""
        last = self.num_layers
        return min(2, last), last // 2, max(last - 3, 0)


@dataclass(frozen=True)
class DraftConfig:
    """An EAGLE-3 head.

    Attributes:
        aux_layer_ids: the captured states, as *inputs* of these target layers (``hidden_states[i]`` of
            Hugging Face).
        draft_vocab_size: rows of ``lm_head``, Vd.
        fc_norm: an RMSNorm per captured state in front of ``fc`` (EAGLE-3.1, arXiv 2605.09992).
        norm_output: feed the normed state back at the next step instead of the raw one (EAGLE-3.1).
        norm_before_residual: take the residual after ``hidden_norm`` (heads of the speculators project).
        target: name of the target, for people and checks.
        template_hash: hash of the chat template the head was trained with; empty when unknown.
    """

    hidden_size: int
    target_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    aux_layer_ids: tuple[int, ...]
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    attention_bias: bool = False
    target: str = ""
    template_hash: str = ""

    @classmethod
    def for_target(cls, model: TargetConfig, draft_vocab_size: int, **overrides: Any) -> "DraftConfig":
        """The default head of a target: its sizes, its RoPE, its default captured layers."""
        base = cls(
            hidden_size=model.hidden_size,
            target_hidden_size=model.hidden_size,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            intermediate_size=model.intermediate_size,
            vocab_size=model.vocab_size,
            draft_vocab_size=draft_vocab_size,
            rms_norm_eps=model.rms_norm_eps,
            rope_theta=model.rope_theta,
            rope_scaling=model.rope_scaling,
            max_position_embeddings=model.max_position_embeddings,
            aux_layer_ids=model.default_aux_layer_ids,
        )
        return replace(base, **overrides)


def read_rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """RoPE base and scaling of a Hugging Face config, from ``rope_parameters`` or ``rope_theta`` +
    ``rope_scaling``."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.pop("type", None) or "default"
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
    """Context in tokens; a sliding window is a full one up to its width, so it bounds the context."""
    context = config.get("max_position_embeddings", 2048)
    window = config.get("sliding_window")
    uses_window = window is not None and (family == "mistral" or config.get("use_sliding_window", False))
    return min(context, window) if uses_window and window else context


def _as_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
