"""Linear layers and routed experts of a target in fp8: as they are published, or cast when they are loaded.

Other weights keep the dtype of the model: embedding, output layer, norms, routers and gates of shared
experts, which are small or read by draft heads and losses, and the expansion of latents, which latent
attention multiplies in parts.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import nn

from eagle_kit.core.errors import UserError
from eagle_kit.models.blocks.moe import Experts, FP8Experts
from eagle_kit.models.loading.fp8_layout import FP8Layout
from eagle_kit.models.loading.published import Part, take, take_fp8
from eagle_kit.ops.fp8 import FP8Weight, quantize_fp8, stack_fp8
from eagle_kit.ops.linear import FP8Linear, Linear

Quantization = Literal["auto", "fp8", "none"]
"""Linear layers and routed experts in fp8: those that are published so (auto), all (fp8), or none."""
NOT_QUANTIZED = ("kv_b_proj", "shared_expert_gate")
"""Suffixes of linear layers inside decoder layers that are never fp8."""


def quantizable(model: nn.Module) -> Iterator[tuple[str, Linear | Experts]]:
    """Names and modules of linear layers and routed experts that can be fp8."""
    for name, module in model.named_modules():
        if not name.startswith("layers."):
            continue
        is_linear = type(module) is Linear and not name.endswith(NOT_QUANTIZED)
        if is_linear or isinstance(module, Experts):
            yield name, module  # type: ignore[misc]


def fill_fp8(
    model: nn.Module,
    parts: Mapping[str, list[Part]],
    published: dict[str, torch.Tensor],
    layout: FP8Layout | None,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    casts: bool,
) -> None:
    """Replace linear layers and routed experts of ``model`` by modules with fp8 weights.

    Without ``casts``, only modules whose weights are published in fp8 are replaced.

    Args:
        model: model on the meta device, changed in place.
        parts: published tensors of each parameter.
        published: tensors by name. Those that are used are removed.
        layout: layout of published fp8 weights; None where fp8 is not expected.
        dtype: dtype of biases.
        device: device of the new modules.
        casts: cast other weights to fp8, with a scale for each output.

    Raises:
        UserError: a weight with NaN.
    """
    for name, module in list(quantizable(model)):
        # Published tensors of each weight of the module.
        leaves = ["weight"]
        if isinstance(module, Experts):
            leaves = ["gate_up_proj", "down_proj"]
        groups = [parts[f"{name}.{leaf}"] for leaf in leaves]
        if not casts and not all(_are_stored(group, published, layout) for group in groups):
            continue

        # Its weights.
        weights: list[FP8Weight] = []
        for leaf, group in zip(leaves, groups, strict=True):
            shape = getattr(module, leaf).shape
            weights.append(_weight(group, published, layout, device).view(shape))

        # The new module.
        quantized: nn.Module
        if isinstance(module, Experts):
            gate_up, down = weights
            quantized = FP8Experts(gate_up, down)
        else:
            bias: torch.Tensor | None = None
            if module.bias is not None:
                bias = torch.cat([take(published, part.name, dtype, None) for part in parts[f"{name}.bias"]])
            quantized = FP8Linear(weights[0], bias)
        model.set_submodule(name, quantized.to(device))


def _are_stored(group: list[Part], published: Mapping[str, torch.Tensor], layout: FP8Layout | None) -> bool:
    """True if all tensors of a group are published in e4m3."""
    return layout is not None and all(layout.is_stored(published, part.name) for part in group)


def _weight(
    group: list[Part],
    published: dict[str, torch.Tensor],
    layout: FP8Layout | None,
    device: torch.device | str,
) -> FP8Weight:
    """Stack the tensors of a group: as they are if all are e4m3, and cast otherwise."""
    stacked: list[FP8Weight] = []
    if layout is None or not _are_stored(group, published, layout):
        for part in group:
            wide = take(published, part.name, torch.float32, layout)
            stacked.append(quantize_fp8(wide.to(device)))
        return stack_fp8(stacked)
    for part in group:
        weight = take_fp8(published, part.name, layout)
        is_nan = (weight.values.view(torch.uint8) & 0x7F) == 0x7F
        if is_nan.any():
            raise UserError(f"The fp8 weight {part.name} has NaN.", "Copy or download the checkpoint again.")
        stacked.append(weight)
    return stack_fp8(stacked)
