"""Parts of a draft's ``config.json`` that kinds share."""

from dataclasses import asdict
from typing import Any

from eagle_kit.core.errors import UserError, shown
from eagle_kit.kinds.support.files import OWN
from eagle_kit.models.config import HeadArchitecture, read_decoder
from eagle_kit.models.config_parts import MLAConfig
from eagle_kit.models.loading.loader import check_activation

LAYER_SIZES = (
    *("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size"),
    *("rms_norm_eps", "rope_theta", "rope_scaling"),
)
"""Fields of an architecture that say what its decoder layer is."""


def layer_to_dict(config: HeadArchitecture, eps: float) -> dict[str, Any]:
    """Sizes of a decoder layer, with both spellings of RoPE, and our own part."""
    layer = config.layer
    scaling, theta = layer.rope_scaling, layer.rope_theta
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
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": theta},
        **({"max_position_embeddings": n} if (n := config.max_position_embeddings) else {}),
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        OWN: {"target": config.target, "template_hash": config.template_hash},
    }


def mla_to_dict(mla: MLAConfig) -> dict[str, Any]:
    """Latent attention's part."""
    sizes = asdict(mla)
    return sizes | {"rope_interleave": sizes.pop("interleaved")}


def read_layer(config: dict[str, Any], where: str, mla: MLAConfig | None = None) -> dict[str, Any]:
    """The :data:`LAYER_SIZES` of a draft's only layer.

    Raises:
        UserError: several layers, another activation, or a size that is missing or impossible.
    """
    check_activation(config, where)
    if (layers := config.get("num_hidden_layers", 1)) != 1:
        raise UserError(f"The draft in {where} has {shown(layers)} layers.", "Use a head of one layer.")
    return read_decoder(config, where, mla)
