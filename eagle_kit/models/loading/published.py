"""Published tensors of our parameters: names, shapes, and fp8 weights with their scales.

A parameter is one published tensor or several stacked ones. Experts are published one by one, under the names
of their family, or stacked as in transformers 5 and here.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.fp8_layout import FP8Layout
from eagle_kit.ops.fp8 import FP8Weight

FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "shared_experts.gate_up_proj": ("shared_experts.gate_proj", "shared_experts.up_proj"),
    "linear_attn.in_proj": tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")),
}
"""Our fused parameters, and the published parameters that each is stacked from, in order."""
EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Our parameters of experts, and the published parameters of one expert that each is stacked from."""
MIXTRAL_EXPERTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class Part(NamedTuple):
    """Name and shape of a published tensor."""

    name: str
    shape: tuple[int, ...]


def published_names(name: str) -> list[str]:
    """Names of the published tensors that a parameter is stacked from, in order; not for experts."""
    for fused, parts in FUSED.items():
        if f"{fused}." in name:
            return [name.replace(fused, part) for part in parts]
    return [name]


def published_parts(
    parameters: Iterable[tuple[str, torch.Tensor]], config: TargetConfig, names: Iterable[str]
) -> dict[str, list[Part]]:
    """Find the published tensors that each parameter is stacked from.

    Args:
        parameters: our parameters by name.
        config: architecture that they belong to, or the config of a draft head's layer.
        names: names of all tensors of the checkpoint, which show how its experts are published.

    Returns:
        Published tensors of each parameter, in order.
    """
    names = set(names)
    has_stacked_experts = any(name.endswith(".experts.gate_up_proj") for name in names)
    has_sparse_names = any(".block_sparse_moe." in name for name in names)
    found: dict[str, list[Part]] = {}
    for name, parameter in parameters:
        shape = tuple(parameter.shape)
        if ".mlp.experts." in name and not has_stacked_experts:
            parts = _single_experts(name, shape, config.model_type == "mixtral")
        else:
            parts = _stacked_rows(name, shape, config)
        if has_sparse_names:
            parts = [Part(part.name.replace(".mlp.", ".block_sparse_moe."), part.shape) for part in parts]
        found[name] = parts
    return found


def _stacked_rows(name: str, shape: tuple[int, ...], config: TargetConfig) -> list[Part]:
    """Published tensors whose rows make a parameter of ``shape``."""
    names = published_names(name)
    num_rows = [shape[0] // len(names)] * len(names)
    if len(names) == 3:  # queries, keys and values
        key_size = config.num_kv_heads * config.head_dim
        num_rows = [config.num_heads * config.head_dim, key_size, key_size]
    if len(names) == 4:  # projections of a recurrent layer
        delta = config.delta
        assert delta is not None
        value_size = delta.num_heads * delta.value_dim
        num_rows = [delta.channels, value_size, delta.num_heads, delta.num_heads]
    parts = zip(names, num_rows, strict=True)
    return [Part(part, (rows, *shape[1:])) for part, rows in parts]


def _single_experts(name: str, shape: tuple[int, ...], is_mixtral: bool) -> list[Part]:
    """Published tensors of a parameter of ``shape`` with all experts of a layer, expert after expert."""
    layer, _, leaf = name.rpartition(".")
    names = EXPERTS[leaf]
    part_shape = (shape[1] // len(names), shape[2])
    parts: list[Part] = []
    for expert in range(shape[0]):
        for part in names:
            published = MIXTRAL_EXPERTS[part] if is_mixtral else part
            parts.append(Part(f"{layer}.{expert}.{published}.weight", part_shape))
    return parts


def expected_shapes(
    parts: Iterable[Part], published: Mapping[str, torch.Tensor], layout: FP8Layout | None
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all required tensors: ``parts``, and the scales of those that are fp8.

    Args:
        parts: published tensors of all parameters.
        published: tensors of the checkpoint by name.
        layout: layout of fp8 weights; None where fp8 is not expected.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in parts:
        shapes[name] = shape
        if layout is None or name not in published or published[name].dtype not in FP8_DTYPES:
            continue

        # Scales may have one of several shapes; a wrong one is reported beside the first of these.
        scale_name = name + layout.suffix
        allowed = layout.scale_shapes(shape)
        shapes[scale_name] = allowed[0]
        if scale_name in published:
            scale_shape = tuple(published[scale_name].shape)
            if scale_shape in allowed:
                shapes[scale_name] = scale_shape
    return shapes


def take_fp8(published: dict[str, torch.Tensor], name: str, layout: FP8Layout) -> FP8Weight:
    """Remove an fp8 tensor and its scales from ``published``, and return them as a weight."""
    values = published.pop(name)
    scales = published.pop(name + layout.suffix)
    return layout.weight(values, scales)


def take(
    published: dict[str, torch.Tensor], name: str, dtype: torch.dtype, layout: FP8Layout | None
) -> torch.Tensor:
    """Remove a tensor from ``published``, and return it in ``dtype``; fp8 is multiplied by its scales,
    which are removed as well."""
    tensor = published.pop(name)
    if layout is None:
        return tensor.to(dtype)
    scales = published.pop(name + layout.suffix, None)
    if scales is None:
        return tensor.to(dtype)
    return layout.weight(tensor, scales).dense(dtype)


def take_rows(
    published: dict[str, torch.Tensor],
    name: str,
    rows: range,
    dtype: torch.dtype,
    layout: FP8Layout | None,
) -> torch.Tensor:
    """Remove a tensor as :func:`take` does, and return some indices of its first dimension. Nothing else of
    a mapped tensor is read, but for the rest of fp8 blocks that ``rows`` cut.

    Args:
        rows: consecutive indices.
    """
    tensor = published.pop(name)
    scales = None
    if layout is not None:
        scales = published.pop(name + layout.suffix, None)
    if layout is None or scales is None:
        return tensor[rows.start : rows.stop].to(dtype)

    # Whole blocks of fp8; of stacked experts, the first dimension is not in blocks.
    weight = layout.weight(tensor, scales)
    block = 1
    if tensor.ndim == 2:
        block = weight.block[0]
    start = rows.start // block * block
    values = weight.values[start : rows.stop]
    block_scales = weight.scales[start // block : -(-rows.stop // block)]
    dense = FP8Weight(values, block_scales, weight.block).dense(dtype)
    return dense[rows.start - start :]


def dequantised(
    published: Mapping[str, torch.Tensor], layout: FP8Layout | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors, one after another: fp8 multiplied by its scales, the others as they are."""
    scale_names: set[str] = set()
    if layout is not None:
        scale_names = {name + layout.suffix for name in published} & published.keys()
    for name in sorted(published.keys() - scale_names):
        weight = {name: published[name]}
        if layout is not None and name + layout.suffix in scale_names:
            weight[name + layout.suffix] = published[name + layout.suffix]
        dtype = published[name].dtype
        if dtype in FP8_DTYPES:
            dtype = torch.float32
        yield name, take(weight, name, dtype, layout)


def is_mtp(name: str, config: TargetConfig) -> bool:
    """True for a published tensor of a layer for multi-token prediction, behind the decoder's layers."""
    match = re.match(r"layers\.(\d+)\.", name)
    if match is None:
        return False
    layer = int(match[1])
    return config.num_layers <= layer < config.num_layers + config.num_mtp_layers
