"""Published checkpoint layouts of our parameters: names, shapes, and weights in fp8 with their scales.

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
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Part(NamedTuple):
    """Name and shape of a published tensor."""

    name: str
    shape: tuple[int, ...]


def published_names(name: str) -> list[str]:
    """Names of the published tensors that a parameter (other than experts) is stacked from, in order."""
    for fused, parts in FUSED.items():
        if f"{fused}." in name:
            return [name.replace(fused, part) for part in parts]
    return [name]


def published_parts(
    parameters: Iterable[tuple[str, torch.Tensor]], config: TargetConfig, names: Iterable[str]
) -> dict[str, list[Part]]:
    """Published tensors of each of our ``parameters`` of layers of ``config``, for a checkpoint with tensors
    ``names``."""
    names = set(names)
    has_all_in_one = any(name.endswith(".experts.gate_up_proj") for name in names)
    renames_mixture = any(".block_sparse_moe." in name for name in names)
    found = {}
    for name, parameter in parameters:
        shape = tuple(parameter.shape)
        if ".mlp.experts." in name and not has_all_in_one:
            parts = _one_by_one(name, shape, config.model_type == "mixtral")
        else:
            parts = _rows(name, shape, config)
        if renames_mixture:
            parts = [Part(part.name.replace(".mlp.", ".block_sparse_moe."), part.shape) for part in parts]
        found[name] = parts
    return found


def _rows(name: str, shape: tuple[int, ...], config: TargetConfig) -> list[Part]:
    names = published_names(name)
    keys = config.num_kv_heads * config.head_dim
    rows = [shape[0] // len(names)] * len(names)
    if len(names) == 3:
        rows = [config.num_heads * config.head_dim, keys, keys]
    if len(names) == 4 and (delta := config.delta) is not None:
        rows = [delta.channels, delta.num_heads * delta.value_dim, delta.num_heads, delta.num_heads]
    return [Part(part, (count, *shape[1:])) for part, count in zip(names, rows, strict=True)]


def _one_by_one(name: str, shape: tuple[int, ...], is_mixtral: bool) -> list[Part]:
    layer, _, leaf = name.rpartition(".")
    names = EXPERTS[leaf]
    one = (shape[1] // len(names), shape[2])
    spelling: Mapping[str, str] = MIXTRAL if is_mixtral else {}
    return [
        Part(f"{layer}.{expert}.{spelling.get(part, part)}.weight", one)
        for expert in range(shape[0])
        for part in names
    ]


def expected_shapes(
    parts: Iterable[Part], published: Mapping[str, torch.Tensor], layout: FP8Layout | None
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all required tensors: ``parts``, and the scales of those in fp8.

    Args:
        layout: of the scales; None where fp8 is not expected.
    """
    shapes = {}
    for name, shape in parts:
        shapes[name] = shape
        if layout is not None and name in published and published[name].dtype in FP8:
            allowed = layout.scale_shapes(shape)
            scale = published.get(name + layout.suffix)
            is_one = scale is not None and tuple(scale.shape) in allowed
            shapes[name + layout.suffix] = tuple(scale.shape) if is_one else allowed[0]  # type: ignore[union-attr]
    return shapes


def take_fp8(published: dict[str, torch.Tensor], name: str, layout: FP8Layout) -> FP8Weight:
    """Remove a tensor and its scales from ``published`` and return them as they are."""
    return layout.weight(published.pop(name), published.pop(name + layout.suffix))


def take(
    published: dict[str, torch.Tensor], name: str, dtype: torch.dtype, layout: FP8Layout | None
) -> torch.Tensor:
    """Remove a tensor from ``published`` and return it in ``dtype``, fp8 multiplied by its scales."""
    tensor = published.pop(name)
    scale = None if layout is None else published.pop(name + layout.suffix, None)
    if scale is None or layout is None:
        return tensor.to(dtype)
    return layout.weight(tensor, scale).dense(dtype)


def dequantised(
    published: Mapping[str, torch.Tensor], layout: FP8Layout | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by name, one after another: fp8 multiplied by its scales, the others as they are."""
    suffix = None if layout is None else layout.suffix
    scales = {name + suffix for name in published if suffix is not None} & published.keys()
    for name in sorted(published.keys() - scales):
        parts = {key: published[key] for key in (name, f"{name}{suffix}") if key in published}
        dtype = parts[name].dtype
        yield name, take(parts, name, torch.float32 if dtype in FP8 else dtype, layout)


def is_mtp(name: str, config: TargetConfig) -> bool:
    """Return whether a published tensor belongs to a next-token-prediction layer behind the decoder's."""
    match = re.match(r"layers\.(\d+)\.", name)
    return match is not None and 0 <= int(match[1]) - config.num_layers < config.num_mtp_layers
