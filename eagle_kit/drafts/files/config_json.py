"""Parts of a draft's ``config.json`` that kinds share."""

from dataclasses import asdict
from typing import Any

from eagle_kit.drafts.files.draft_files import OWN
from eagle_kit.models.config import HeadArchitecture, read_decoder, read_rotary_dim, with_one_rope
from eagle_kit.models.config_values import read_table
from eagle_kit.models.layer_configs import MLAConfig
from eagle_kit.models.loading.loader import check_activation

OWN_EMBEDDING = "own_embedding"
"""Key of our part of a config: the head's embedding is its own."""
LAYER_SIZES = (
    *("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size"),
    *("rms_norm_eps", "rope_theta", "rope_scaling", "rotary_dim"),
)
"""Fields of an architecture that say what its decoder layer is."""


def layer_to_dict(config: HeadArchitecture, eps: float) -> dict[str, Any]:
    """Sizes of a decoder layer, with both spellings of RoPE, and our own part.

    ``hidden_act`` and ``mlp_bias`` describe a SwiGLU MLP without biases. A kind with another MLP adds keys of
    its own for it, because :func:`read_layer` refuses another ``hidden_act``.
    """
    layer = config.layer
    scaling = layer.rope_scaling
    theta = layer.rope_theta
    is_partial = layer.mla is None and layer.rotary_dim is not None
    is_narrower = config.hidden_size != config.target_hidden_size  # which says that it has its own
    own = {OWN_EMBEDDING: True} if config.own_embedding and not is_narrower else {}
    share = {"partial_rotary_factor": layer.rope_dim / layer.head_dim} if is_partial else {}
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        **(mla_to_dict(layer.mla) if layer.mla else {"head_dim": layer.head_dim}),
        "hidden_act": "silu",
        "mlp_bias": False,
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": theta, **share},
        **share,
        **({"max_position_embeddings": n} if (n := config.max_position_embeddings) else {}),
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        OWN: {"target": config.target, "template_hash": config.template_hash, **own},
    }


def mla_to_dict(mla: MLAConfig) -> dict[str, Any]:
    """Latent attention's part."""
    sizes = asdict(mla)
    return sizes | {"rope_interleave": sizes.pop("interleaved")}


def read_layer(
    config: dict[str, Any], where: str, mla: MLAConfig | None = None, num_layers: int = 1
) -> dict[str, Any]:
    """The :data:`LAYER_SIZES` of a draft's layers, and the share of a head that they rotate.

    Args:
        num_layers: layers that the draft has, which its config may say otherwise: the target's own number is
            often copied into it.

    Raises:
        UserError: another activation, layers that rotate differently, or a size that is missing or
            impossible.
    """
    check_activation(config, where)
    kinds = config.get("layer_types")
    own = config if not isinstance(kinds, list) else config | {"layer_types": kinds[:num_layers]}
    sizes = read_decoder(own, where, mla)
    return sizes | {"rotary_dim": None if mla is not None else partial_rotary_dim(own, where)}


def partial_rotary_dim(config: dict[str, Any], where: str) -> int | None:
    """Number of rotated elements of a head of grouped-query attention; None for all. Raises UserError."""
    rope = read_table(with_one_rope(config, where), "rope_parameters", where)
    share = {**config, **rope}.get("partial_rotary_factor")
    return None if share in (None, 1, 1.0) else read_rotary_dim(config, where, 1.0)
