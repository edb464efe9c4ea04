"""Linear layers and routed experts of a target in fp8: kept as published, or cast when they are loaded.

Kept wide are embedding, output layer, norms, routers and gates of shared experts (small, or read by heads and
losses), and the expansion of latents, which latent attention multiplies in parts.
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
"""Of linear layers and routed experts: fp8 where the checkpoint has them so, fp8 everywhere, or wide."""
WIDE = ("kv_b_proj", "shared_expert_gate")


def quantizable(model: nn.Module) -> Iterator[tuple[str, Linear | Experts]]:
    """Linear layers and routed experts inside of the decoder's layers that can be in fp8, by their names."""
    for name, module in model.named_modules():
        is_linear = type(module) is Linear and not name.endswith(WIDE)
        if name.startswith("layers.") and (is_linear or isinstance(module, Experts)):
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
    """Replace linear layers and routed experts of ``model`` by those in fp8, made of tensors that are removed
    from ``published``: those whose parts all are in fp8, or with ``casts`` the others as well, with a scale
    for each output.

    Raises:
        UserError: a weight with NaN.
    """
    for name, module in list(quantizable(model)):
        leaves = ("gate_up_proj", "down_proj") if isinstance(module, Experts) else ("weight",)
        groups = {leaf: parts[f"{name}.{leaf}"] for leaf in leaves}
        if not casts and not all(_are_stored(group, published, layout) for group in groups.values()):
            continue
        first, *others = (
            _weight(group, published, layout, device).view(getattr(module, leaf).shape)
            for leaf, group in groups.items()
        )
        made: nn.Module
        if isinstance(module, Experts):
            made = FP8Experts(first, *others)
        else:
            bias = None
            if module.bias is not None:
                bias = torch.cat([take(published, part.name, dtype, None) for part in parts[f"{name}.bias"]])
            made = FP8Linear(first, bias)
        model.set_submodule(name, made.to(device))


def _are_stored(group: list[Part], published: Mapping[str, torch.Tensor], layout: FP8Layout | None) -> bool:
    return layout is not None and all(layout.is_stored(published, part.name) for part in group)


def _weight(
    group: list[Part],
    published: dict[str, torch.Tensor],
    layout: FP8Layout | None,
    device: torch.device | str,
) -> FP8Weight:
    """Parts on top of each other: as they are where all are in e4m3, cast otherwise."""
    if layout is None or not _are_stored(group, published, layout):
        wide = (take(published, part.name, torch.float32, layout) for part in group)
        return stack_fp8([quantize_fp8(part.to(device)) for part in wide])
    found = []
    for part in group:
        weight = take_fp8(published, part.name, layout)
        if ((weight.values.view(torch.uint8) & 0x7F) == 0x7F).any():
            raise UserError(f"The fp8 weight {part.name} has NaN.", "Copy or download the checkpoint again.")
        found.append(weight)
    return stack_fp8(found)
