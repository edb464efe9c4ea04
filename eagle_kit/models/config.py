"""Architectures of targets and draft heads, parsed from Hugging Face ``config.json`` dictionaries."""

import math
from dataclasses import dataclass
from typing import Any

from eagle_kit.core.errors import UserError, shown
from eagle_kit.core.files import COPY_AGAIN
from eagle_kit.models.cache_specs import CacheSpec, KVSpec, LatentSpec, StateSpec
from eagle_kit.models.config_values import (
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_SIZE,
    read_architecture,
    read_flag,
    read_ids,
    read_number,
    read_size,
    read_table,
    wrong_value,
)
from eagle_kit.models.layer_configs import (
    DeltaConfig,
    MambaConfig,
    MLAConfig,
    MoEConfig,
    read_delta,
    read_mamba,
    read_mla,
    read_moe,
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
"""Numbers that a scaling may have. 0 counts as absent."""


class DecoderConfig:
    """Decoder layer of a target or draft head: its sizes and its attention, grouped-query or latent.

    This is no dataclass, but a base of dataclasses. A derived class declares again each field that it reads
    from a config: the sizes up to ``rope_scaling``, ``attention_bias``, and the optional parts that its layer
    can have. A field that it does not declare keeps the default of this class.

    Attributes:
        hidden_size: H.
        num_heads: number of query heads.
        num_kv_heads: number of key-value heads; equal to ``num_heads`` with latent attention.
        head_dim: size of a query or key.
        intermediate_size: of the MLP.
        rms_norm_eps: epsilon of all norms.
        rope_theta: base of RoPE.
        rope_scaling: parameters of the RoPE scaling with their ``rope_type``; None without scaling.
        attention_bias: whether the projections of queries, keys and values have biases.
        attention_out_bias: whether the output projection of attention has a bias.
        qk_norm: an RMSNorm of each query and key head.
        norms_in_fp32: weights of norms stay fp32, whatever the dtype of the others.
        gates_attention: the output of attention is multiplied by a sigmoid gate, a projection of its input.
        rotary_dim: number of rotated elements of a head; None for all.
        mla: latent attention in place of grouped-query attention.
        moe: experts in place of the MLP.
        sliding_window: number of tokens that a query attends to, its own included; None for all.
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
        if self.mla is None or self.rope_scaling is None:
            return scale
        mscale = self.rope_scaling.get("mscale_all_dim")
        if mscale:
            scale *= yarn_magnitude(self.rope_scaling["factor"], mscale) ** 2
        return scale

    @property
    def attention(self) -> AttentionVariant:
        """Variant of attention of a layer."""
        return AttentionVariant(self.attention_scale, Limits(window=self.sliding_window or 0))

    @property
    def rotation(self) -> tuple[float, dict[str, Any] | None]:
        """RoPE base and scaling, to compare the rotations of two models."""
        return self.rope_theta, self.rope_scaling

    @property
    def rope_dim(self) -> int:
        """Number of rotated elements of a head."""
        if self.mla is not None:
            return self.mla.qk_rope_head_dim
        return self.rotary_dim or self.head_dim

    def cache_of(self, num_layers: int) -> CacheSpec:
        """Cache layout of ``num_layers`` layers."""
        if self.mla is None:
            return KVSpec(num_layers, self.num_kv_heads, self.head_dim)
        return LatentSpec(num_layers, self.mla.kv_lora_rank, self.mla.qk_rope_head_dim, self.attention_scale)


@dataclass(frozen=True)
class TargetConfig(DecoderConfig):
    """Architecture of a target: the Llama family, and with latent attention, experts or recurrent layers
    DeepSeek, GLM-4, Mixtral, Qwen and Falcon-H1.

    Attributes:
        model_type: value of :data:`FAMILIES`.
        num_layers: number of decoder layers.
        intermediate_size: of the MLP of dense layers.
        vocab_size: V.
        max_position_embeddings: context length in tokens.
        tie_word_embeddings: the output layer has the weight of the embedding.
        mlp_bias: whether the layers of the MLP have biases.
        eos_token_ids: tokens that end a text.
        delta: layers with the gated delta rule in place of attention.
        mamba: Mamba-2 beside attention.
        embedding_scale: factor of embeddings in front of the first layer. Draft heads read unscaled ones.
        logit_scale: factor of logits.
        num_mtp_layers: number of layers for multi-token prediction behind the decoder's.
        data_parallel_attention: a rank of tensor parallelism has the attention of all heads, for its own
            requests.
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
    data_parallel_attention: bool = False

    @classmethod
    def from_dict(cls, config: dict[str, Any], where: str = "the model's folder") -> "TargetConfig":
        """Parse a Hugging Face config, with old or new RoPE keys.

        Args:
            where: folder of the config, for messages.

        Raises:
            UserError: an unknown architecture, or a value that is missing or impossible.
        """
        # The family, and the config of its language model.
        name = read_architecture(config, where)
        family = FAMILIES.get(name)
        if family is None:
            raise UserError(
                f"The target architecture {name} is not supported.",
                f"Use one of {', '.join(FAMILIES)}.",
            )
        config = text_config(config, where)
        is_deepseek = family.startswith("deepseek")
        is_glm = family == "glm4_moe"
        is_qwen_hybrid = family in QWEN_HYBRIDS

        # Attention: latent attention, partial rotation, norms and biases.
        mla: MLAConfig | None = None
        rotary_dim: int | None = None
        if is_deepseek:
            mla = read_mla(config, where)
        elif is_qwen_hybrid:
            rotary_dim = read_rotary_dim(config, where, 0.25)
        elif is_glm:
            rotary_dim = read_rotary_dim(config, where, 0.5)
        else:
            _refuse_partial_rotation(config, family, where)
        qk_norm = is_qwen_hybrid or family in ("qwen3", "qwen3_moe")
        if is_glm:
            qk_norm = read_flag(config, "use_qk_norm", where)
        has_bias = read_flag(config, "attention_bias", where)

        # Recurrent layers.
        delta: DeltaConfig | None = None
        mamba: MambaConfig | None = None
        if is_qwen_hybrid:
            delta = read_delta(config, where)
        if family == "falcon_h1":
            mamba = read_mamba(config, where)

        sizes = read_decoder(config, where, mla, has_mlp=family != "qwen3_5_moe")
        return cls(
            model_type=family,
            **sizes,
            num_layers=read_size(config, "num_hidden_layers", where, most=MAX_LAYERS),
            max_position_embeddings=_context(config, family, where),
            tie_word_embeddings=read_flag(config, "tie_word_embeddings", where),
            attention_bias=has_bias or family == "qwen2",
            attention_out_bias=has_bias and family not in ("qwen2", "glm4_moe"),
            mlp_bias=read_flag(config, "mlp_bias", where),
            qk_norm=qk_norm,
            norms_in_fp32=is_qwen_hybrid,
            gates_attention=is_qwen_hybrid,
            rotary_dim=rotary_dim,
            eos_token_ids=read_ids(config, "eos_token_id", where),
            mla=mla,
            moe=read_moe(config, family, where),
            delta=delta,
            mamba=mamba,
            embedding_scale=float(read_number(config, "embedding_multiplier", where, 1.0)),
            logit_scale=float(read_number(config, "lm_head_multiplier", where, 1.0)),
            num_mtp_layers=read_size(config, mtp_count(config), where, 0, least=0, most=MAX_LAYERS),
        )

    @property
    def default_aux_layer_ids(self) -> tuple[int, int, int]:
        """Layers whose inputs an EAGLE-3 head reads by default: low, middle and high, 2, L // 2 and L - 3.
        They are clamped for models of few layers."""
        low = min(2, self.num_layers)
        middle = self.num_layers // 2
        high = max(self.num_layers - 3, 0)
        return low, middle, high

    @property
    def cache(self) -> CacheSpec:
        """Cache layout of the model."""
        return self.cache_of(self.num_attention_layers)

    @property
    def num_attention_layers(self) -> int:
        """Number of layers with attention."""
        if self.delta is None:
            return self.num_layers
        return self.num_layers - len(self.delta.layers)

    @property
    def states(self) -> StateSpec | None:
        """Layout of the states of recurrent layers; None without any."""
        recurrent = self.delta or self.mamba
        if recurrent is None:
            return None
        return recurrent.states


class HeadArchitecture:
    """Architecture of a draft head of any kind.

    Attributes:
        hidden_size: hidden size of the head, H.
        target_hidden_size: size of the target's hidden states.
        vocab_size: vocabulary of the target, V.
        draft_vocab_size: number of tokens that the head can propose, Vd.
        max_position_embeddings: number of positions that the head was trained for; 0 if unknown.
        aux_layer_ids: target layers whose *inputs* the head reads (``hidden_states[i]`` of Hugging Face);
            empty for heads that read the target's final hidden states.
        num_modules: 1, or the number of steps of a draft where every step has a module of its own.
        own_embedding: the head has its own embedding, and does not read the target's.
        target: name of the target, for people and checks.
        template_hash: hash of the chat template that the head was trained with; empty if unknown.
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
        """Sizes of the head's decoder layer: this object, unless the layer has a config of its own (MTP)."""
        assert isinstance(self, DecoderConfig)
        return self

    @property
    def attention_scale(self) -> float:
        """Factor of the attention scores."""
        return self.layer.attention_scale

    @property
    def owns_output(self) -> bool:
        """True if the head has its own output layer, False if it uses the target's."""
        return True

    @property
    def most_steps(self) -> int | None:
        """Exact number of steps that the head is trained for; None for any number."""
        if self.num_modules == 1:
            return None
        return self.num_modules

    def block_rows(self, steps: int) -> int:
        """Number of rows of the block that drafts ``steps`` tokens; 0 for heads that draft without blocks."""
        return 0

    @property
    def cache(self) -> CacheSpec:
        """Cache layout of all modules."""
        return self.layer.cache_of(self.num_modules)

    @property
    def variants(self) -> list[AttentionVariant]:
        """Variant of attention of each layer of the cache."""
        return [self.layer.attention] * self.cache.num_layers


class TiedArchitecture(HeadArchitecture):
    """Architecture of a head of the target's hidden size and vocabulary, which reads its final hidden states
    and uses its output layer."""

    @property
    def target_hidden_size(self) -> int:  # type: ignore[override]
        """H, as for the head."""
        return self.hidden_size

    @property
    def draft_vocab_size(self) -> int:  # type: ignore[override]
        """V, the vocabulary of the target."""
        return self.vocab_size

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        """Empty: the head reads final hidden states."""
        return ()

    @property
    def owns_output(self) -> bool:
        """False: the output layer is the target's."""
        return False


def text_config(config: dict[str, Any], where: str = "the model's folder") -> dict[str, Any]:
    """Config of the language model inside a multimodal config; other configs are returned unchanged."""
    inside = read_table(config, "text_config", where)
    if not inside:
        return config
    for key in ("eos_token_id", "tie_word_embeddings"):
        if config.get(key) is not None:
            inside[key] = config[key]
    return inside


def mtp_count(config: dict[str, Any]) -> str:
    """Key of the number of layers for multi-token prediction."""
    if "mtp_num_hidden_layers" in config:
        return "mtp_num_hidden_layers"
    return "num_nextn_predict_layers"


def _refuse_partial_rotation(config: dict[str, Any], family: str, where: str) -> None:
    """Raise UserError for ``partial_rotary_factor`` in a family of whole rotated heads: transformers ignores
    it there, and vLLM does not."""
    rope = read_table(with_one_rope(config, where), "rope_parameters", where)
    share = {**config, **rope}.get("partial_rotary_factor")
    if share not in (None, 1, 1.0):
        raise UserError(
            f"The config.json in {where} says partial_rotary_factor {shown(share)}, and targets of the "
            f"family {family} rotate the whole head in transformers and a part of it in vLLM.",
            "Remove partial_rotary_factor from it if the model was trained with the whole head rotated.",
        )


def read_rotary_dim(config: dict[str, Any], where: str, default: float) -> int:
    """Read the number of rotated elements of a head.

    Args:
        default: rotated share of a head where the config does not state it.

    Raises:
        UserError: the share does not give an even number of elements.
    """
    config = with_one_rope(config, where)
    num_heads = read_size(config, "num_attention_heads", where)
    default_head_dim = read_size(config, "hidden_size", where) // num_heads
    head_dim = read_size(config, "head_dim", where, default_head_dim)
    rope = read_table(config, "rope_parameters", where)
    share = read_number({**config, **rope}, "partial_rotary_factor", where, default)
    rotary_dim = int(head_dim * share)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise wrong_value("partial_rotary_factor", share, where, "the share of an even number of a head")
    return rotary_dim


def read_decoder(
    config: dict[str, Any], where: str, mla: MLAConfig | None = None, *, has_mlp: bool = True
) -> dict[str, Any]:
    """Read sizes, norm and RoPE of a decoder layer, by the fields of :class:`DecoderConfig`.

    Args:
        mla: its latent attention, if it has one.
        has_mlp: some layer has an MLP besides experts.

    Raises:
        UserError: a value that is missing or impossible.
    """
    # Heads.
    hidden_size = read_size(config, "hidden_size", where)
    num_heads = read_size(config, "num_attention_heads", where)
    if mla is None:
        num_kv_heads = read_size(config, "num_key_value_heads", where, num_heads)
        head_dim = read_size(config, "head_dim", where, hidden_size // num_heads)
        width = num_heads * head_dim
        if head_dim % 2:
            raise wrong_value("head_dim", head_dim, where, "an even number")
    else:
        num_kv_heads = num_heads
        head_dim = mla.qk_head_dim
        width = num_heads * (head_dim + mla.v_head_dim)
        if mla.qk_rope_head_dim % 2:
            raise wrong_value("qk_rope_head_dim", mla.qk_rope_head_dim, where, "an even number")
    if num_heads % num_kv_heads:
        raise UserError(
            f"The config.json in {where} shares {num_kv_heads} key-value heads among {num_heads}.",
            COPY_AGAIN,
        )
    if width > MAX_SIZE:
        raise wrong_value("num_attention_heads", num_heads, where, f"fewer than {MAX_SIZE} values together")

    # The size of the MLP must be stated only where there is one.
    default_intermediate_size: int | None = None
    if not has_mlp:
        default_intermediate_size = 1
    theta, scaling = read_rope(config, where)
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": read_size(config, "intermediate_size", where, default_intermediate_size),
        "vocab_size": read_size(config, "vocab_size", where),
        "rms_norm_eps": read_number(config, "rms_norm_eps", where, 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def read_rope(
    config: dict[str, Any], where: str = "the model's folder"
) -> tuple[float, dict[str, Any] | None]:
    """Read base and scaling of RoPE, from ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``.

    Returns:
        The base, and the parameters of the scaling with their ``rope_type``; None without scaling.

    Raises:
        UserError: a scaling that is not supported, or a value that is missing or impossible.
    """
    # Parameters, base and type; older configs say ``type`` in place of ``rope_type``.
    config = with_one_rope(config, where)
    rope = read_table(config, "rope_parameters", where) or read_table(config, "rope_scaling", where)
    rope.pop("partial_rotary_factor", None)  # see read_rotary_dim
    base = rope.pop("rope_theta", None) or config.get("rope_theta")
    theta = float(read_number({"rope_theta": base}, "rope_theta", where, 10000.0))
    old_type = rope.pop("type", None)
    rope_type = rope.get("rope_type") or old_type or "default"
    if rope_type == "mrope":  # the three positions of a text token are equal
        rope_type = "default"
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        raise UserError(
            f"The RoPE scaling {shown(rope_type)} of this config is not supported.",
            f"Supported are {', '.join(ROPE_TYPES)}.",
        )

    # Required parameters must be there, and all of them must be numbers.
    required = ROPE_TYPES[rope_type]
    missing = [key for key in required if rope.get(key) is None]
    if missing:
        raise UserError(
            f"The RoPE scaling {rope_type!r} of this config has no {', '.join(missing)}.",
            COPY_AGAIN,
        )
    options = [key for key in ROPE_OPTIONS if rope.get(key) not in (None, 0)]
    for key in (*required, *options):
        read_number(rope, key, where)

    # A base of 1 rotates nothing, and Llama 3's factors must ascend.
    has_descending_factors = rope_type == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]
    if theta <= 1.0 or has_descending_factors:
        raise UserError(
            f"The RoPE of the config.json in {where} has the base {theta:g} and the factors {shown(rope)}.",
            f"Give a base above 1 and factors that ascend. {COPY_AGAIN}",
        )
    if rope_type == "default":
        return theta, None
    return theta, {**rope, "rope_type": rope_type}


def with_one_rope(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Replace ``rope_parameters`` that are stated for each type of layer by those of the model's layers.

    Other configs are returned unchanged.

    Raises:
        UserError: the layers have different rotations, or a type without parameters.
    """
    # Parameters by type of layer, such as ``full_attention``.
    rope = read_table(config, "rope_parameters", where)
    by_type = {key: value for key, value in rope.items() if isinstance(value, dict)}
    if not by_type:
        return config

    # Types of the model's layers.
    types = config.get("layer_types")
    if not isinstance(types, list) or not types:
        types = ["full_attention"]
        if read_flag(config, "use_sliding_window", where):
            types = ["sliding_attention"]

    # All of them must have the same parameters.
    used: list[dict[str, Any]] = []
    for layer_type in types:
        parameters = by_type.get(str(layer_type))
        if parameters is None:
            raise UserError(
                f"The rope_parameters of the config.json in {where} are those of {', '.join(by_type)}, and "
                f"its layers are of the kind {shown(layer_type)}.",
                COPY_AGAIN,
            )
        used.append(parameters)
    if any(parameters != used[0] for parameters in used):
        raise UserError(
            f"The layers in {where} are of several kinds that rotate differently ({', '.join(by_type)}), "
            "which is not supported.",
            "Use a model whose layers have one RoPE.",
        )
    shared = {key: value for key, value in rope.items() if key not in by_type}
    return {**config, "rope_parameters": {**shared, **used[0]}}


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor of queries and keys for a context ``factor`` times as long (arXiv 2309.00071, 3.4)."""
    if factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1.0


def _context(config: dict[str, Any], family: str, where: str) -> int:
    """Context length in tokens. A sliding window limits it: attention equals full attention only up to
    the width of the window."""
    context = read_size(config, "max_position_embeddings", where, 2048, most=MAX_POSITIONS)
    window = read_size(config, "sliding_window", where, 0, least=0, most=MAX_POSITIONS)
    uses_window = family in ("mistral", "mixtral") or read_flag(config, "use_sliding_window", where)
    if uses_window and window > 0:
        return min(context, window)
    return context
