"""Architectures of targets and draft heads, parsed from Hugging Face ``config.json`` dictionaries."""

from dataclasses import dataclass
from typing import Any

from eagle_kit.core.errors import UserError, shown
from eagle_kit.core.files import COPY_AGAIN
from eagle_kit.models.config_parts import (
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_SIZE,
    CacheSpec,
    DeltaConfig,
    KVSpec,
    LatentSpec,
    MambaConfig,
    MLAConfig,
    MoEConfig,
    StateSpec,
    read_architecture,
    read_delta,
    read_flag,
    read_ids,
    read_mamba,
    read_mla,
    read_moe,
    read_number,
    read_size,
    read_table,
    wrong_value,
    yarn_magnitude,
)
from eagle_kit.ops.attention.variant import AttentionVariant, Limits

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeForCausalLM": "glm4_moe",
    "FalconH1ForCausalLM": "falcon_h1",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}
QWEN_HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""RoPE scalings and the parameters that each requires."""
ROPE_OPTIONS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
"""Numbers that a scaling may have; 0 is none."""


class DecoderConfig:
    """Decoder layer of a target or draft head: its sizes, its attention, grouped-query or latent.

    This is no dataclass. An architecture that derives from it is one, and declares again each field that it
    takes: the sizes up to ``rope_scaling``, ``attention_bias``, and what its layer can have besides. A field
    that it does not declare keeps the default here.

    Attributes:
        num_kv_heads: equal to ``num_heads`` with latent attention.
        head_dim: size of a query or key.
        attention_bias, attention_out_bias: biases of the input and of the output projections.
        qk_norm: an RMSNorm of each query and key head.
        norms_in_fp32: weights of norms are not rounded to the dtype of others.
        gates_attention: what attention gives is multiplied by a sigmoid of a projection of its input.
        rotary_dim: number of rotated elements of a head; None for all.
        mla: latent attention in place of grouped-query attention.
        moe: experts in place of the MLP.
        sliding_window: tokens that a query attends to, its own included; None for all.
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
    norms_in_fp32: bool = False
    gates_attention: bool = False
    rotary_dim: int | None = None
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    sliding_window: int | None = None

    @property
    def attention_scale(self) -> float:
        """Factor of the attention scores. DeepSeek's YaRN multiplies it by the square of its
        ``mscale_all_dim`` magnitude."""
        scale = self.head_dim**-0.5
        if self.mla and self.rope_scaling and (mscale := self.rope_scaling.get("mscale_all_dim")):
            scale *= yarn_magnitude(self.rope_scaling["factor"], mscale) ** 2
        return scale

    @property
    def attention(self) -> AttentionVariant:
        """How a layer attends."""
        return AttentionVariant(self.attention_scale, Limits(window=self.sliding_window or 0))

    @property
    def rotation(self) -> tuple[float, dict[str, Any] | None]:
        """RoPE base and scaling, by which rotations are compared."""
        return self.rope_theta, self.rope_scaling

    @property
    def rope_dim(self) -> int:
        """Number of rotated elements of a head."""
        return self.mla.qk_rope_head_dim if self.mla else self.rotary_dim or self.head_dim

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
        delta: layers with the gated delta rule in place of attention.
        mamba: Mamba-2 beside attention.
        embedding_scale: factor of embeddings in front of the first layer; heads read them without.
        logit_scale: factor of logits.
        num_mtp_layers: next-token-prediction layers that a checkpoint has behind the decoder's.
        attends_whole: a rank of tensor parallelism has the attention of all heads (data-parallel attention).
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
    norms_in_fp32: bool = False
    gates_attention: bool = False
    rotary_dim: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    delta: DeltaConfig | None = None
    mamba: MambaConfig | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    num_mtp_layers: int = 0
    attends_whole: bool = False

    @classmethod
    def from_dict(cls, config: dict[str, Any], where: str = "the model's folder") -> "TargetConfig":
        """Parse a Hugging Face config, with old or new RoPE keys.

        Args:
            where: its folder, for messages.

        Raises:
            UserError: an unknown architecture, or a value that is missing or impossible.
        """
        name = read_architecture(config, where)
        family = FAMILIES.get(name)
        if family is None:
            raise UserError(
                f"The target architecture {name} is not supported.",
                f"Use one of {', '.join(FAMILIES)}.",
            )
        config = text_config(config, where)
        is_hybrid, is_glm = family in QWEN_HYBRIDS, family == "glm4_moe"
        if not is_hybrid and not is_glm and not family.startswith("deepseek"):
            _refuse_partial_rotation(config, family, where)
        bias = read_flag(config, "attention_bias", where)
        mla = read_mla(config, where) if family.startswith("deepseek") else None
        return cls(
            model_type=family,
            **read_decoder(config, where, mla, has_mlp=family not in ("qwen3_5_moe",)),
            num_layers=read_size(config, "num_hidden_layers", where, most=MAX_LAYERS),
            max_position_embeddings=_context(config, family, where),
            tie_word_embeddings=read_flag(config, "tie_word_embeddings", where),
            attention_bias=family == "qwen2" or bias,
            attention_out_bias=bias and family not in ("qwen2", "glm4_moe"),
            mlp_bias=read_flag(config, "mlp_bias", where),
            qk_norm=is_hybrid
            or family in ("qwen3", "qwen3_moe")
            or (is_glm and read_flag(config, "use_qk_norm", where)),
            norms_in_fp32=is_hybrid,
            gates_attention=is_hybrid,
            rotary_dim=read_rotary_dim(config, where, 0.5 if is_glm else 0.25)
            if is_hybrid or is_glm
            else None,
            eos_token_ids=read_ids(config, "eos_token_id", where),
            mla=mla,
            moe=read_moe(config, family, where),
            delta=read_delta(config, where) if is_hybrid else None,
            mamba=read_mamba(config, where) if family == "falcon_h1" else None,
            embedding_scale=float(read_number(config, "embedding_multiplier", where, 1.0)),
            logit_scale=float(read_number(config, "lm_head_multiplier", where, 1.0)),
            num_mtp_layers=read_size(config, mtp_count(config), where, 0, least=0, most=MAX_LAYERS),
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
        return self.cache_of(self.num_attention_layers)

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention."""
        return self.num_layers - (0 if self.delta is None else len(self.delta.layers))

    @property
    def states(self) -> StateSpec | None:
        """What its recurrent layers keep of a text; None without any."""
        recurrent = self.delta or self.mamba
        return None if recurrent is None else recurrent.states


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
        own_embedding: the head has an embedding of its own, and does not read the target's.
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
    own_embedding: bool = False
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
    def most_steps(self) -> int | None:
        """Steps that it is trained for, no more and no fewer; None for any number."""
        return self.num_modules if self.num_modules > 1 else None

    def block_rows(self, steps: int) -> int:
        """Rows of the block that drafts ``steps`` tokens; 0 of heads that draft in no blocks."""
        return 0

    @property
    def cache(self) -> CacheSpec:
        """Entry of a token in the cache of all modules."""
        return self.layer.cache_of(self.num_modules)

    @property
    def variants(self) -> list[AttentionVariant]:
        """How each layer of the cache attends."""
        return [self.layer.attention] * self.cache.num_layers


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


def text_config(config: dict[str, Any], where: str = "the model's folder") -> dict[str, Any]:
    """Config of the language model inside one that also sees; another is returned as it is."""
    inside = read_table(config, "text_config", where)
    if not inside:
        return config
    keys = "eos_token_id", "tie_word_embeddings"
    return inside | {key: config[key] for key in keys if config.get(key) is not None}


def mtp_count(config: dict[str, Any]) -> str:
    """Key that counts the layers for multi-token prediction."""
    return "mtp_num_hidden_layers" if "mtp_num_hidden_layers" in config else "num_nextn_predict_layers"


def _refuse_partial_rotation(config: dict[str, Any], family: str, where: str) -> None:
    """Raise UserError for a target that rotates a share of a head, though its family rotates all: there
    transformers ignores the share and vLLM does not."""
    rope = read_table(with_one_rope(config, where), "rope_parameters", where)
    share = {**config, **rope}.get("partial_rotary_factor")
    if share not in (None, 1, 1.0):
        raise UserError(
            f"The config.json in {where} says partial_rotary_factor {shown(share)}, and targets of the "
            f"family {family} rotate the whole head in transformers and a part of it in vLLM.",
            "Remove partial_rotary_factor from it if the model was trained with the whole head rotated.",
        )


def read_rotary_dim(config: dict[str, Any], where: str, default: float) -> int:
    """Number of rotated elements of a head, from their share, ``default`` where it is not stated. Raises
    UserError for a share that is no even number of them."""
    config = with_one_rope(config, where)
    heads = read_size(config, "num_attention_heads", where)
    head_dim = read_size(config, "head_dim", where, read_size(config, "hidden_size", where) // heads)
    rope = read_table(config, "rope_parameters", where)
    share = read_number({**config, **rope}, "partial_rotary_factor", where, default)
    count = int(head_dim * share)
    if not 0 < count <= head_dim or count % 2:
        raise wrong_value("partial_rotary_factor", share, where, "the share of an even number of a head")
    return count


def read_decoder(
    config: dict[str, Any], where: str, mla: MLAConfig | None = None, *, has_mlp: bool = True
) -> dict[str, Any]:
    """Sizes, norm and RoPE of a decoder layer, by the fields of :class:`DecoderConfig`.

    Args:
        has_mlp: some layer has an MLP that is no expert.

    Raises:
        UserError: one that is missing or impossible.
    """
    hidden, heads = (read_size(config, key, where) for key in ("hidden_size", "num_attention_heads"))
    kv_heads = heads if mla else read_size(config, "num_key_value_heads", where, heads)
    head_dim = mla.qk_head_dim if mla else read_size(config, "head_dim", where, hidden // heads)
    width = heads * (head_dim + (mla.v_head_dim if mla else 0))
    rope_dim = mla.qk_rope_head_dim if mla else head_dim
    if heads % kv_heads:
        raise UserError(
            f"The config.json in {where} shares {kv_heads} key-value heads among {heads}.", COPY_AGAIN
        )
    if rope_dim % 2:
        raise wrong_value("qk_rope_head_dim" if mla else "head_dim", rope_dim, where, "an even number")
    if width > MAX_SIZE:
        raise wrong_value("num_attention_heads", heads, where, f"fewer than {MAX_SIZE} values together")
    theta, scaling = read_rope(config, where)
    return {
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": read_size(config, "intermediate_size", where, None if has_mlp else 1),
        "vocab_size": read_size(config, "vocab_size", where),
        "rms_norm_eps": read_number(config, "rms_norm_eps", where, 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def read_rope(
    config: dict[str, Any], where: str = "the model's folder"
) -> tuple[float, dict[str, Any] | None]:
    """RoPE base and scaling of a Hugging Face config, from ``rope_parameters``, or ``rope_theta`` and
    ``rope_scaling``. Raises UserError for what cannot be computed."""
    config = with_one_rope(config, where)
    rope = read_table(config, "rope_parameters", where) or read_table(config, "rope_scaling", where)
    rope.pop("partial_rotary_factor", None)  # see read_rotary_dim
    base = {"rope_theta": rope.pop("rope_theta", None) or config.get("rope_theta")}
    theta = float(read_number(base, "rope_theta", where, 10000.0))
    old_kind = rope.pop("type", None)
    kind = rope.get("rope_type") or old_kind or "default"
    if kind == "mrope":  # the three positions of a token of text are the same
        kind = "default"
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise UserError(
            f"The RoPE scaling {shown(kind)} of this config is not supported.",
            f"Supported are {', '.join(ROPE_TYPES)}.",
        )
    if missing := [key for key in ROPE_TYPES[kind] if rope.get(key) is None]:
        raise UserError(
            f"The RoPE scaling {kind!r} of this config has no {', '.join(missing)}.",
            COPY_AGAIN,
        )
    for key in (*ROPE_TYPES[kind], *(key for key in ROPE_OPTIONS if rope.get(key) not in (None, 0))):
        read_number(rope, key, where)
    if theta <= 1.0 or (kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]):
        raise UserError(
            f"The RoPE of the config.json in {where} has the base {theta:g} and the factors {shown(rope)}.",
            f"Give a base above 1 and factors that ascend. {COPY_AGAIN}",
        )
    return theta, None if kind == "default" else {**rope, "rope_type": kind}


def with_one_rope(config: dict[str, Any], where: str) -> dict[str, Any]:
    """A config with one RoPE, that of its layers' kind, where ``rope_parameters`` has one for each kind.

    Raises:
        UserError: its layers are of several kinds with other rotations, or of one that has none.
    """
    rope = read_table(config, "rope_parameters", where)
    by_kind = {kind: value for kind, value in rope.items() if isinstance(value, dict)}
    if not by_kind:
        return config
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or not kinds:
        kinds = ["sliding_attention" if read_flag(config, "use_sliding_window", where) else "full_attention"]
    used = [by_kind.get(kind) for kind in dict.fromkeys(map(str, kinds))]
    if None in used:
        raise UserError(
            f"The rope_parameters of the config.json in {where} are those of {', '.join(by_kind)}, and its "
            f"layers are of the kind {shown(kinds[used.index(None)])}.",
            COPY_AGAIN,
        )
    if any(each != used[0] for each in used):
        raise UserError(
            f"The layers in {where} are of several kinds that rotate differently ({', '.join(by_kind)}), "
            "which is not supported.",
            "Use a model whose layers have one RoPE.",
        )
    shared = {key: value for key, value in rope.items() if key not in by_kind}
    return {**config, "rope_parameters": {**shared, **(used[0] or {})}}


def _context(config: dict[str, Any], family: str, where: str) -> int:
    """Context length in tokens; limited to a sliding window, which up to its width equals full attention."""
    context = read_size(config, "max_position_embeddings", where, 2048, most=MAX_POSITIONS)
    window = read_size(config, "sliding_window", where, 0, least=0, most=MAX_POSITIONS)
    uses_window = family in ("mistral", "mixtral") or read_flag(config, "use_sliding_window", where)
    return min(context, window) if uses_window and window else context
