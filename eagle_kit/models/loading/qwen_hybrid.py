"""Conversion of the published tensors of Qwen3-Next and Qwen3.5.

Qwen3-Next stacks queries, keys, values and gates of a recurrent layer by key head. Both families store the
gate of an attention head behind its query, the weights of norms minus one, and the shared expert in the
singular. Text models inside multimodal ones have a prefix.
"""

from collections.abc import Iterator

import torch

from eagle_kit.models.config import TargetConfig
from eagle_kit.models.layer_configs import DeltaConfig

PREFIX = "language_model."
OTHER_PARTS = ("visual.", "mtp.")
"""Prefixes of tensors that are not part of the text decoder."""
GATED_NORM = "linear_attn.norm.weight"
"""A norm whose weight is published as it is, and not minus one."""
STACKED = ("self_attn.q_proj.weight", "self_attn.q_proj.bias", "in_proj_qkvz.weight", "in_proj_ba.weight")
"""Suffixes of tensors that are taken apart."""


def is_exact(name: str) -> bool:
    """True for a parameter that stays fp32: decays, and norms, since transformers adds one to their weights
    in fp32."""
    return name.endswith(("norm.weight", "A_log", "dt_bias")) and not name.endswith(GATED_NORM)


def rename(name: str) -> str | None:
    """See :class:`~eagle_kit.models.loading.arrangement.Arrangement`."""
    inner = name.removeprefix(PREFIX)
    if inner.startswith(OTHER_PARTS):
        return None
    return inner.replace(".shared_expert.", ".shared_experts.")


def changes(name: str, config: TargetConfig) -> bool:
    """See :class:`~eagle_kit.models.loading.arrangement.Arrangement`."""
    is_norm = is_exact(name) and name.endswith("norm.weight")
    return is_norm or name.endswith(STACKED)


def parts(name: str, tensor: torch.Tensor, config: TargetConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """See :class:`~eagle_kit.models.loading.arrangement.Arrangement`."""
    num_rows = len(tensor)
    delta = config.delta

    # Norms.
    if name.endswith("norm.weight"):
        yield name, tensor + 1.0
        return

    # Queries of attention, each head with its gate behind it.
    if ".self_attn.q_proj." in name and num_rows == 2 * config.num_heads * config.head_dim:
        heads = tensor.unflatten(0, (config.num_heads, 2, config.head_dim))
        yield name, heads[:, 0].flatten(0, 1)
        yield name.replace("q_proj", "gate_proj"), heads[:, 1].flatten(0, 1)
        return

    # Projections of a recurrent layer, stacked by key head.
    if delta is not None and name.endswith("in_proj_qkvz.weight"):
        sizes = _qkvz_sizes(delta)
        if num_rows == sum(sizes) * delta.num_key_heads:
            sections = tensor.unflatten(0, (delta.num_key_heads, -1)).split(sizes, 1)
            q, k, v, z = (section.flatten(0, 1) for section in sections)
            yield name.replace("in_proj_qkvz", "in_proj_qkv"), torch.cat((q, k, v))
            yield name.replace("in_proj_qkvz", "in_proj_z"), z
            return
    if delta is not None and name.endswith("in_proj_ba.weight") and num_rows == 2 * delta.num_heads:
        halves = tensor.unflatten(0, (delta.num_key_heads, 2, -1))
        yield name.replace("in_proj_ba", "in_proj_b"), halves[:, 0].flatten(0, 1)
        yield name.replace("in_proj_ba", "in_proj_a"), halves[:, 1].flatten(0, 1)
        return

    # Unexpected shapes.
    yield name, tensor


def _qkvz_sizes(delta: DeltaConfig) -> tuple[int, int, int, int]:
    """Numbers of rows of a key head: its query, its key, and the values and gates of the value heads that
    share it."""
    value_size = delta.num_heads // delta.num_key_heads * delta.value_dim
    return delta.key_dim, delta.key_dim, value_size, value_size
