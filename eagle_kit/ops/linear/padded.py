"""``y = x w^T + b`` in half precision on a CPU, with the rows padded to a multiple of :data:`ROWS`.

oneDNN compiles a matmul for every size. With matrix instructions (AMX) that takes 5 to 40 ms, for a matmul
that takes 3. The number of rows with loss differs in every packed sequence and step of training-time test, so
without padding most sizes would be used once. Rows of zeros change no other row, and add zeros to the
gradient of the weight.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from eagle_kit.ops.backend import uses_triton

ROWS = 32
"""Rows are padded to a multiple of this number, unless there are no more than that."""


def fits(x: torch.Tensor) -> bool:
    """Return whether rows ``x [T, K]`` are padded: on a CPU, where the matmul is in half precision."""
    if x.device.type != "cpu" or x.ndim != 2 or x.shape[0] <= ROWS or x.shape[0] % ROWS == 0:
        return False
    is_half = matmul_dtype(x) != torch.float32 and not uses_triton("small_linear", x)
    return is_half and not isinstance(x, torch._subclasses.FakeTensor)


def matmul_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which autocast would run a matmul of ``x``."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [T, K]``, ``weight [N, K]``, ``bias [N]`` -> ``[T, N]`` in :func:`matmul_dtype`; differentiable."""
    dtype = matmul_dtype(x)
    bias = None if bias is None else bias.to(dtype)
    out: torch.Tensor = _Padded.apply(x.to(dtype), weight.to(dtype), bias)
    return out


def padded_rows(x: torch.Tensor) -> torch.Tensor:
    """``x [T, K]`` with rows of zeros up to a multiple of :data:`ROWS`, where it :func:`fits`."""
    return _pad(x) if fits(x) else x


def _pad(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, 0, 0, -x.shape[0] % ROWS))


class _Padded(torch.autograd.Function):
    """``(x, weight, bias) -> y``, all of one dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast("cpu", enabled=False):
            return F.linear(_pad(x), weight, bias)[: x.shape[0]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = _pad(grads[0])
        needs = ctx.needs_input_grad
        dx = (dy @ weight)[: grads[0].shape[0]] if needs[0] else None
        dw = dy.t() @ _pad(x) if needs[1] else None
        db = grads[0].sum(0) if needs[2] else None
        return dx, dw, db
