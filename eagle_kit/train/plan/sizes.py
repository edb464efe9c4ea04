"""Sizes of heads and targets, counted from their modules without weights.

Legend: T tokens, R rows with loss, K experts of a token, E experts.
"""

from typing import NamedTuple

import torch
from torch import nn

from eagle_kit.drafts.registry import kind_of
from eagle_kit.models.bridge.config import BridgedConfig
from eagle_kit.models.config import DecoderConfig, HeadArchitecture, TargetConfig
from eagle_kit.models.targets.llama import LlamaModel


class HeadSizes(NamedTuple):
    """Matmul weights that a row meets: of ``fuse``, of one layer ``before`` and ``behind`` its attention, of
    the ``output`` layer; ``attended``, products of a row with each key, over all heads; ``inner``, values of
    a row between the matmuls of its MLP; ``total`` weights, and the layers, one for each step, or one for
    all; ``plain``, matmul weights of the ``num_plain`` layers behind it."""

    fuse: int
    before: int
    behind: int
    output: int
    attended: int
    inner: int
    total: int
    num_layers: int
    plain: int
    num_plain: int


def num_weights(target: TargetConfig) -> tuple[int, int]:
    """Matmul weights of the decoder layers that one token meets, and all matrices of the target."""
    if isinstance(target, BridgedConfig):
        return target.active_weights, target.all_weights
    with torch.device("meta"):
        model = LlamaModel(target)
    met = sum(_met(parameter, target) for parameter in model.layers.parameters())
    return met, sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)


def head_sizes(config: HeadArchitecture) -> HeadSizes:
    """Count a head."""
    with torch.device("meta"):
        head = kind_of(config).head_class(config)
    layer = config.layer
    layers: list[nn.Module] = [*head.blocks[:1], *head.extra_layers]
    block, plain = layers[0], layers[1:]
    met = {
        name: _met(parameter, layer)
        for name, parameter in block.named_parameters()
        if not name.startswith("embed_tokens.")  # its rows are looked up
    }
    behind = sum(count for name, count in met.items() if name.startswith(("mlp.", "self_attn.o_proj")))
    moe = layer.moe
    inner = layer.intermediate_size
    if moe is not None:
        inner = moe.num_experts_per_token * moe.intermediate_size + moe.shared_intermediate_size
    return HeadSizes(
        fuse=sum(
            p.numel() for name, p in head.named_parameters() if name.startswith("fc.") and name not in met
        ),
        before=sum(met.values()) - behind,
        behind=behind,
        output=config.draft_vocab_size * config.hidden_size,
        attended=attended(layer),
        inner=inner,
        total=sum(parameter.numel() for parameter in head.parameters()),
        num_layers=max(1, len(head.blocks)),
        plain=sum(_met(parameter, layer) for each in plain for parameter in each.parameters()),
        num_plain=len(plain),
    )


def attended(config: DecoderConfig) -> int:
    """Products of a query with one key and of its probability with the value, over all heads."""
    value = config.mla.v_head_dim if config.mla else config.head_dim
    return config.num_heads * (config.head_dim + value)


def _met(parameter: torch.Tensor, config: DecoderConfig) -> int:
    """Weights of a matrix, of a depthwise convolution, or of the K of E in a stack, that a token meets."""
    if parameter.ndim == 3 and parameter.shape[1] > 1:
        assert config.moe is not None
        return parameter.numel() * config.moe.num_experts_per_token // config.moe.num_experts
    return parameter.numel() if parameter.ndim > 1 else 0
