"""Published layout of Qwen3-Next and Qwen3.5, put into ours.

Qwen3-Next stacks queries, keys, values and gates of a recurrent layer by key head; both put the gate of an
attention head behind its query, keep the weights of norms less one, and name the shared expert in the
singular. Text models inside of models that see have a prefix.
"""

from collections.abc import Iterator

import torch

from eagle_kit.models.config import TargetConfig
from eagle_kit.models.layer_configs import DeltaConfig

PREFIX, LEFT_OUT = "language_model.", ("visual.", "mtp.")
GATED_NORM = "linear_attn.norm.weight"
"""A norm whose weight is published as it is."""


def is_exact(name: str) -> bool:
    """True for a parameter that stays in fp32: transformers adds one to the weights of norms in it."""
    return name.endswith(("norm.weight", "A_log", "dt_bias")) and not name.endswith(GATED_NORM)


def rename(name: str) -> str | None:
    """See :class:`~eagle_kit.models.loading.arrangement.Arrangement`."""
    inner = name.removeprefix(PREFIX)
    return None if inner.startswith(LEFT_OUT) else inner.replace(".shared_expert.", ".shared_experts.")


def changes(name: str, config: TargetConfig) -> bool:
    """See :class:`~eagle_kit.models.loading.arrangement.Arrangement`."""
    stacked = ("self_attn.q_proj.weight", "self_attn.q_proj.bias", "in_proj_qkvz.weight", "in_proj_ba.weight")
    return name.endswith(stacked) or (is_exact(name) and name.endswith("norm.weight"))


def parts(name: str, tensor: torch.Tensor, config: TargetConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """See :class:`~eagle_kit.models.loading.arrangement.Arrangement`."""
    delta = config.delta
    if name.endswith("norm.weight"):
        yield name, tensor + 1.0
    elif ".self_attn.q_proj." in name and len(tensor) == 2 * config.num_heads * config.head_dim:
        halves = tensor.unflatten(0, (config.num_heads, 2, config.head_dim))
        yield name, halves[:, 0].flatten(0, 1)
        yield name.replace("q_proj", "gate_proj"), halves[:, 1].flatten(0, 1)
    elif delta is None:
        yield name, tensor
    elif name.endswith("in_proj_qkvz.weight") and len(tensor) == sum(_sizes(delta)) * delta.num_key_heads:
        groups = tensor.unflatten(0, (delta.num_key_heads, -1)).split(_sizes(delta), 1)
        q, k, v, z = (group.flatten(0, 1) for group in groups)
        yield name.replace("in_proj_qkvz", "in_proj_qkv"), torch.cat((q, k, v))
        yield name.replace("in_proj_qkvz", "in_proj_z"), z
    elif name.endswith("in_proj_ba.weight") and len(tensor) == 2 * delta.num_heads:
        halves = tensor.unflatten(0, (delta.num_key_heads, 2, -1))
        yield name.replace("in_proj_ba", "in_proj_b"), halves[:, 0].flatten(0, 1)
        yield name.replace("in_proj_ba", "in_proj_a"), halves[:, 1].flatten(0, 1)
    else:
        yield name, tensor


def _sizes(delta: DeltaConfig) -> tuple[int, int, int, int]:
    """Rows of a key head: query, key, values, gates."""
    values = delta.num_heads // delta.num_key_heads * delta.value_dim
    return delta.key_dim, delta.key_dim, values, values
