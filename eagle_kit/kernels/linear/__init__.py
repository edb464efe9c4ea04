"""Linear layers: oneDNN for fp32 on a CPU, Triton for few rows on a GPU where that is faster, or torch."""

from typing import Any

import torch
from torch import nn

from eagle_kit.kernels.backend import uses_triton
from eagle_kit.kernels.linear import onednn, reference
from eagle_kit.kernels.linear.choice import MACHINE, Choices, Size
from eagle_kit.kernels.small_linear import fits_triton, small_linear


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: str = "auto",
    choices: Choices = MACHINE,
) -> torch.Tensor:
    """``x [T, K]`` times ``weight [N, K]`` transposed, plus ``bias [N]`` -> ``[T, N]``; differentiable.

    Args:
        backend: ``"auto"`` takes oneDNN for fp32 on a CPU, what ``choices`` say for few rows of half types on
            a GPU, and torch otherwise; ``"torch"``, ``"onednn"`` and ``"triton"`` force one.
        choices: between torch and Triton, by what was measured.
    """
    if backend == "auto":
        backend = _choose(x, weight, bias, choices)
    if backend == "onednn":
        return onednn.linear(x, weight, bias)
    if backend == "triton":
        return small_linear(x, weight, bias, backend="triton")
    return reference.linear(x, weight, bias)


def _choose(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, choices: Choices) -> str:
    if _fits_onednn(x, weight):
        return "onednn"
    if x.shape[0] and uses_triton(x) and fits_triton(x, weight, bias):
        return choices.form(Size.of(x, weight), x.device)
    return "torch"


def _fits_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.ndim == 2
        and x.shape[0] > 0
        and not isinstance(x, torch._subclasses.FakeTensor)
        and not torch.is_autocast_enabled("cpu")
        and onednn.available()
    )


def can_pack(weight: torch.Tensor) -> bool:
    """Whether ``weight`` can be kept in oneDNN's layout."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and onednn.available()


class Linear(nn.Linear):
    """``nn.Linear`` over ``[T, K]`` rows that calls :func:`linear`, with an optional packed copy for
    inference."""

    _packed: torch.Tensor | None = None

    def pack(self) -> None:
        """Keep a copy of the weight in oneDNN's layout for few rows; the module must not be trained
        afterwards."""
        if can_pack(self.weight):
            self._packed = onednn.pack(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in_features]`` -> ``[T, out_features]``."""
        if self._packed is not None and self._takes_packed(x):
            if isinstance(x, torch._subclasses.FakeTensor):
                return reference.linear(x, self.weight, self.bias)
            if x.shape[0] == 1:  # a lone row is summed in another order than one among others
                return onednn.matmul(x.expand(2, -1).contiguous(), self._packed, self.bias)[:1]
            return onednn.matmul(x, self._packed, self.bias)
        return linear(x, self.weight, self.bias)

    def _takes_packed(self, x: torch.Tensor) -> bool:
        few = x.shape[0] <= onednn.PACKED_MAX_ROWS
        return few and x.device.type == "cpu" and not torch.is_grad_enabled()


def pack_weights(module: nn.Module) -> None:
    """Call ``pack`` on every part of ``module`` that has one: :meth:`Linear.pack` and its like."""
    for child in module.modules():
        pack = getattr(child, "pack", None)
        if pack is not None:
            pack()


def packed_parts(module: nn.Module) -> list[Any]:
    """What :func:`pack_weights` has left in the parts of ``module``: tensors, or tuples of them."""
    return [child._packed for child in module.modules() if getattr(child, "_packed", None) is not None]
