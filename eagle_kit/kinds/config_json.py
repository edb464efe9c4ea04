"""Parts of a draft's ``config.json`` that kinds share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.kinds.files import OWN
from eagle_kit.models.config import HeadArchitecture
from eagle_kit.models.config_parts import MLAConfig


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


@contextmanager
def named_keys(where: str) -> Iterator[None]:
    """Raise UserError for a KeyError inside: a key that the config lacks."""
    try:
        yield
    except KeyError as key:
        raise _no_key(key, where) from None


def _no_key(key: object, where: str) -> UserError:
    return UserError(f"The draft's config.json in {where} has no {key}.", "Copy it from its source.")


def read_size(config: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    """A positive whole number; ``default`` where it is absent or null. Raises UserError."""
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise _no_key(repr(key), where)
    if type(value) is not int or value < 1:
        raise UserError(
            f"The draft's config.json in {where} says {key} {value!r}.", "Copy it again from its source."
        )
    return value
