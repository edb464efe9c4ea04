"""Linear layers. On a CPU: oneDNN for fp32, or C++ over packed weights; padded rows for half types. On a GPU:
Triton for few rows where a table of measurements says so, or torch. Also layers whose weight is fp8."""

from typing import Any, NamedTuple

import torch
from torch import nn

from eagle_kit.ops.backend import uses_triton
from eagle_kit.ops.linear.fp8 import FP8Linear
from eagle_kit.ops.linear.packed import Packed, can_pack, pack, packed_matmul, takes_packed
from eagle_kit.ops.linear.plain import choose, linear
from eagle_kit.ops.small_linear import small_linear_swiglu
from eagle_kit.ops.swiglu import swiglu

__all__ = [
    "FP8Linear",
    "Linear",
    "MergedLinear",
    "Packed",
    "can_pack",
    "linear",
    "pack",
    "pack_merged",
    "pack_weights",
    "packed_matmul",
    "packed_parts",
    "takes_packed",
]


class Linear(nn.Linear):
    """``nn.Linear`` over ``[T, K]`` rows that calls :func:`linear`, with an optional packed copy of the
    weight for inference."""

    _packed: Packed | None = None
    _is_merged = False

    def pack(self) -> None:
        """Keep a packed copy of the weight, unless :func:`pack_merged` has one; the module must not be
        trained afterwards."""
        if can_pack(self.weight) and not self._is_merged:
            self._packed = pack(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in_features]`` -> ``[T, out_features]``."""
        packed = self._packed
        if packed is not None and takes_packed(x, packed):
            return packed_matmul(x, packed, self.bias)
        return linear(x, self.weight, self.bias)

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(gate) up`` of a layer whose outputs are gate and up: ``[T, in_features]`` -> ``[T,
        out_features / 2]``, within the matmul where that is Triton's."""
        if uses_triton("small_linear", x) and choose(x, self.weight, self.bias) == "triton":
            return small_linear_swiglu(x, self.weight, self.bias, backend="triton")
        return swiglu(self(x))


class MergedLinear(NamedTuple):
    """Linear layers with the same input, packed as one matmul; ``sizes`` are their numbers of outputs."""

    weight: Packed
    bias: torch.Tensor | None
    sizes: list[int]

    def outputs(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``x [T, K]``, for which :func:`takes_packed` must hold -> ``[T, N]`` of each layer."""
        return packed_matmul(x, self.weight, self.bias).split_with_sizes(self.sizes, -1)


def pack_merged(*layers: Linear) -> MergedLinear | None:
    """Pack layers with the same input into one matmul, in place of packing each; None where they cannot be
    packed."""
    biases = [layer.bias for layer in layers]
    has_bias = biases[0] is not None
    if not all(can_pack(layer.weight) and (layer.bias is not None) == has_bias for layer in layers):
        return None
    for layer in layers:
        layer._is_merged = True
    weight = torch.cat([layer.weight.detach() for layer in layers])
    bias = torch.cat([bias.detach() for bias in biases]) if has_bias else None
    return MergedLinear(pack(weight), bias, [layer.out_features for layer in layers])


def pack_weights(module: nn.Module) -> None:
    """Call ``pack`` on every submodule of ``module`` that has it, such as :meth:`Linear.pack`."""
    for child in module.modules():
        own_pack = getattr(child, "pack", None)
        if own_pack is not None:
            own_pack()


def packed_parts(module: nn.Module) -> list[Any]:
    """Packed weights that :func:`pack_weights` has left in submodules of ``module``: tuples that contain
    tensors."""
    return [child._packed for child in module.modules() if getattr(child, "_packed", None) is not None]
