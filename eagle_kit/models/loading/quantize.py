"""Linear layers of a target in fp8: kept as published, or cast when they are loaded.

Kept wide are embedding, output layer, norms, routers and gates of shared experts (small, or read by heads and
losses), routed experts (a parameter of all, for grouped matmuls), and the expansion of latents, which latent
attention multiplies in parts.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import nn

from eagle_kit.core.errors import UserError
from eagle_kit.kernels.fp8 import FP8Weight, quantize_fp8, stack_fp8
from eagle_kit.kernels.linear import FP8Linear, Linear
from eagle_kit.models.loading.fp8_layout import FP8Layout
from eagle_kit.models.loading.published import Part, take, take_fp8

Quantization = Literal["auto", "fp8", "none"]
"""Of linear layers: fp8 where the checkpoint has them so, fp8 everywhere, or wide."""
WIDE = ("kv_b_proj", "shared_expert_gate")


def linears(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Linear layers inside of the decoder's layers that can be in fp8, by their names."""
    for name, module in model.named_modules():
        if name.startswith("layers.") and type(module) is Linear and not name.endswith(WIDE):
            yield name, module


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
    """Replace linear layers of ``model`` by those in fp8, made of tensors that are removed from
    ``published``: layers whose parts all are in fp8, or with ``casts`` the others as well, with a scale for
    each output.

    Raises:
        UserError: a weight with NaN.
    """
    for name, layer in list(linears(model)):
        of_weight = parts[f"{name}.weight"]
        weight = _stored(of_weight, published, layout)
        if weight is None and casts:
            pieces = [take(published, part.name, torch.float32, layout).to(device) for part in of_weight]
            weight = quantize_fp8(torch.cat(pieces))
        if weight is None:
            continue
        bias = None
        if layer.bias is not None:
            bias = torch.cat([take(published, part.name, dtype, None) for part in parts[f"{name}.bias"]])
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, FP8Linear(weight, bias).to(device))


def _stored(
    parts: list[Part], published: dict[str, torch.Tensor], layout: FP8Layout | None
) -> FP8Weight | None:
    """Weight of ``parts`` as it is; None, with nothing removed, where one of them is not in e4m3."""
    if layout is None or not all(layout.is_stored(published, part.name) for part in parts):
        return None
    found = []
    for part in parts:
        weight = take_fp8(published, part.name, layout)
        if ((weight.values.view(torch.uint8) & 0x7F) == 0x7F).any():
            raise UserError(f"The fp8 weight {part.name} has NaN.", "Copy or download the checkpoint again.")
        found.append(weight)
    return stack_fp8(found)
