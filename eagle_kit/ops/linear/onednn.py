"""``y = x w^T + b`` in fp32 on a CPU through oneDNN.

Torch sends fp32 matmuls to MKL, which reaches a third of oneDNN's rate on AMD processors and reads a weight
once per row at small T. From two rows on, oneDNN also sums over K in the same order for every T (tested);
one-row inputs are padded to two rows where the order would differ. So a token's logits do not depend on the
number of tokens in its window.

The gradients are matmuls of the same kind: dx = dy w (a linear with ``w^T``), dw = dy^T x (a linear with
``x^T``). oneDNN takes transposed views of weights as they are. Columns cut out of a matrix are copied first:
for such a weight it falls back to loops that take a thousand times as long.
"""

from typing import Any, NamedTuple

import torch

PACKED_MAX_ROWS = 256
"""Largest number of rows for which the blocked weight layout, chosen for small T, is faster than the plain
one."""
COMPARED_OUTPUTS = 64
"""Least number of outputs by which orders of summation are compared."""
_POINTWISE: Any = None
if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    _POINTWISE = torch.ops.mkldnn._linear_pointwise.default


def available() -> bool:
    """Return whether this torch has the oneDNN operators."""
    return _POINTWISE is not None


def matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [T, K]``, ``weight [N, K]`` (plain, a transposed view, or blocked) -> ``[T, N]``, no gradient."""
    if weight.layout is torch.strided and not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()
    return _POINTWISE(x, weight, bias, "none", [], "")


class Packed(NamedTuple):
    """Weight in oneDNN's ``blocked`` layout, an opaque tensor; ``needs_padding`` if one-row inputs must be
    padded to two rows to keep the summation order, as is the case where K is split."""

    blocked: torch.Tensor
    needs_padding: bool


def pack(weight: torch.Tensor) -> Packed:
    """Copy ``weight [N, K]`` into oneDNN's layout for :func:`packed_matmul`, and test whether one-row inputs
    need padding: another order of summation changes most outputs."""
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    n, k = weight.shape
    x = torch.randn(max(2, -(-COMPARED_OUTPUTS // n)), k, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together = matmul(x, blocked)
        alone = torch.cat([matmul(row, blocked) for row in x[: max(1, len(x) - 1)].split(1)])
    return Packed(blocked, needs_padding=not torch.equal(alone, together[: len(alone)]))


def packed_matmul(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [T, K]`` -> ``[T, N]``, no gradient; a row's result does not depend on T."""
    if weight.needs_padding and len(x) == 1:
        return matmul(x.expand(2, -1), weight.blocked, bias)[:1]
    return matmul(x, weight.blocked, bias)


class _Linear(torch.autograd.Function):
    """``(x, weight, bias) -> y``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return matmul(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dy = grads[0]
        x, weight = ctx.saved_tensors
        dx = matmul(dy, weight.t()) if ctx.needs_input_grad[0] else None
        dw = matmul(dy.t(), x.t()) if ctx.needs_input_grad[1] else None
        db = dy.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return dx, dw, db


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [T, K]``, ``weight [N, K]``, ``bias [N]``, all fp32 on the CPU -> ``[T, N]``; differentiable."""
    if not torch.is_grad_enabled():
        return matmul(x, weight, bias)
    return _Linear.apply(x, weight, bias)
