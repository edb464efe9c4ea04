"""Sizes of heads and targets, counted from their modules without weights.

Legend: T tokens, R supervised rows, K experts of a token, E experts.
"""

from typing import NamedTuple

import torch
from torch import nn

from eagle_kit.drafts.registry import kind_of
from eagle_kit.models.bridge.config import BridgedConfig
from eagle_kit.models.config import DecoderConfig, HeadArchitecture, TargetConfig
from eagle_kit.models.targets.llama import LlamaModel


class HeadSizes(NamedTuple):
    """Sizes of a head. Weights are those that one row is multiplied with.

    Attributes:
        fuse: weights of the fusion of the target's states.
        before: weights of the first layer before its attention.
        after: weights of the first layer after its attention.
        output: weights of the output layer.
        attended: multiplications of a row with each key and value, over all heads.
        total: all trained weights.
        num_layers: layers of a head that has one for each step; else 1.
        plain: weights of all further layers.
        num_plain: number of further layers.
    """

    fuse: int
    before: int
    after: int
    output: int
    attended: int
    total: int
    num_layers: int
    plain: int
    num_plain: int


def num_weights(target: TargetConfig) -> tuple[int, int]:
    """Weights of a target.

    Returns:
        Weights of the decoder layers that one token is multiplied with, and those of all matrices.
    """
    if isinstance(target, BridgedConfig):
        return target.active_weights, target.all_weights
    with torch.device("meta"):
        model = LlamaModel(target)
    active = sum(_active_weights(parameter, target) for parameter in model.layers.parameters())
    total = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)
    return active, total


def head_sizes(config: HeadArchitecture) -> HeadSizes:
    """Count the weights of a head."""
    with torch.device("meta"):
        head = kind_of(config).head_class(config)
    layer = config.layer
    layers: list[nn.Module] = [*head.blocks[:1], *head.extra_layers]

    # The first layer. The rows of an embedding are looked up, not multiplied.
    counts: dict[str, int] = {}
    for name, parameter in layers[0].named_parameters():
        if not name.startswith("embed_tokens."):
            counts[name] = _active_weights(parameter, layer)
    after = sum(count for name, count in counts.items() if name.startswith(("mlp.", "self_attn.o_proj")))

    # Further layers.
    plain = 0
    for each in layers[1:]:
        plain += sum(_active_weights(parameter, layer) for parameter in each.parameters())

    # The fusion, unless it is a part of the first layer.
    fuse = 0
    for name, parameter in head.named_parameters():
        if name.startswith("fc.") and name not in counts:
            fuse += parameter.numel()

    return HeadSizes(
        fuse=fuse,
        before=sum(counts.values()) - after,
        after=after,
        output=config.draft_vocab_size * config.hidden_size,
        attended=attended(layer),
        total=sum(parameter.numel() for parameter in head.parameters()),
        num_layers=max(1, len(head.blocks)),
        plain=plain,
        num_plain=len(layers) - 1,
    )


def attended(config: DecoderConfig) -> int:
    """Multiplications of a query with one key and of its probability with the value, over all heads."""
    value_size = config.mla.v_head_dim if config.mla else config.head_dim
    return config.num_heads * (config.head_dim + value_size)


def _active_weights(parameter: torch.Tensor, config: DecoderConfig) -> int:
    """Weights of ``parameter`` that one token is multiplied with.

    All weights of a matrix or of a depthwise convolution; of a stack of E experts those of K; none of a
    vector.
    """
    if parameter.ndim == 3 and parameter.shape[1] > 1:
        assert config.moe is not None
        return parameter.numel() * config.moe.num_experts_per_token // config.moe.num_experts
    return parameter.numel() if parameter.ndim > 1 else 0
