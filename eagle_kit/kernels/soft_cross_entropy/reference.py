"""Linear layer and soft cross-entropy, fused so that the logits of all rows never exist at once.

For a row with feature h, teacher p (sum 1), weight c and z = W h:

    loss = c (logsumexp(z) - p . z),     dz = c (softmax(z) - p),     dh = dz W,     dW = sum over rows of dz
    h^T.

The forward computes loss and gradients chunk by chunk (the idea of Liger's fused linear cross-entropy,
arXiv 2410.10989): three matmuls, nothing recomputed, one chunk of logits alive.

Legend: M rows, H hidden, Vd draft vocabulary, P teacher positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from eagle_kit.kernels.backend import is_differentiated
from eagle_kit.kernels.linear import linear
from eagle_kit.kernels.linear.padded import ROWS, matmul_dtype, padded_rows

CHUNK_ROWS = 128
"""Rows per chunk of logits, which must fit into the cache."""
GROUP_ROWS = 640
"""Rows that share one weight-gradient matmul."""
GRADIENT_WORDS = 2048
"""Rows of the weight whose gradient is added at a time on a CPU, so that the product stays in the cache."""


@dataclass(frozen=True)
class Teacher:
    """Distributions over the draft vocabulary, and the rows that learn from them.

    Attributes:
        probs: fp32 ``[P, Vd]``, renormalised over the draft vocabulary.
        index: int64 ``[M]``, the distribution of each row.
        row_weights: fp32 ``[M]``.
        mass: fp32 ``[P]``, the share of the target's probability that the draft vocabulary has, for losses in
            the acceptance rate; None when the draft can propose every token.
        factors: makes a factor of every row's weight from the draft's probability of the teacher's best
            token, both fp32 ``[M]``, so that all rows are one group; None leaves the weights as they are.
    """

    probs: torch.Tensor
    index: torch.Tensor
    row_weights: torch.Tensor
    mass: torch.Tensor | None = None
    factors: Callable[[torch.Tensor], torch.Tensor] | None = None


class SoftCrossEntropy(NamedTuple):
    """``loss``, a differentiable scalar, the weighted sum; ``row_losses [M]``, unweighted; ``best`` int64
    ``[M]``, the most likely draft id of each row; ``row_weights [M]``, factors included."""

    loss: torch.Tensor
    row_losses: torch.Tensor
    best: torch.Tensor
    row_weights: torch.Tensor


RowLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Any]
"""``(z, top, p, c, mass) -> (losses, dz)`` for a chunk of rows: logits fp32 ``[rows, Vd]``, which it may
overwrite, their largest ``[rows]``, the teacher ``[rows, Vd]``, weights ``[rows]``, and the share of the
target's probability that the draft vocabulary has, ``[rows]`` or None."""


def cross_entropy_rows(
    z: torch.Tensor, top: torch.Tensor, p: torch.Tensor, c: torch.Tensor, mass: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Soft cross-entropy as a :data:`RowLoss`."""
    dot = torch.linalg.vecdot(p, z)
    z = z.sub_(top[:, None]).exp_()
    total = z.sum(-1)
    losses = top + total.log() - dot
    z = z.mul_((c / total)[:, None])
    return losses, z.addcmul_(p, c[:, None], value=-1.0)


Rows = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
]
"""``(h, weight, dw) -> (row_losses, best, row_weights, dh)`` for all rows; adds the weight's gradient to
``dw``."""


class FusedRows(torch.autograd.Function):
    """Weighted sum of row losses whose gradients are computed in the forward: ``(h, weight, rows,
    weight_grad, is_trained) -> (loss, row_losses, best, row_weights)``, see
    :func:`linear_soft_cross_entropy`. The forward adds to ``weight_grad``, so it must not be run again under
    activation checkpointing."""

    @staticmethod
    def forward(
        ctx: Any,
        h: torch.Tensor,
        weight: torch.Tensor,
        rows: Rows,
        weight_grad: torch.Tensor | None,
        is_trained: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        mine = [torch.zeros_like(weight)] if is_trained and weight_grad is None else []
        row_losses, best, row_weights, dh = rows(
            h, weight, mine[0] if mine else weight_grad if is_trained else None
        )
        ctx.save_for_backward(dh, *mine)
        ctx.mark_non_differentiable(row_losses, best, row_weights)
        return (row_losses * row_weights).sum(), row_losses, best, row_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dh, *mine = ctx.saved_tensors
        return dh * grads[0], mine[0] * grads[0] if mine else None, None, None, None


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return torch.zeros((), dtype=torch.float32, device=weight.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0].mul_(grads[0]), None  # its only reader


def carried(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A zero whose gradient with respect to ``weight`` is ``gradient``.

    Added to the sum of several losses, it passes on the gradient that they have accumulated in their
    ``weight_grad``, so that one gradient of the weight is kept instead of one per loss.
    """
    zero: torch.Tensor = _Carried.apply(weight, gradient)
    return zero


def fused_rows(
    h: torch.Tensor,
    weight: torch.Tensor,
    dw: torch.Tensor | None,
    *,
    teacher: Teacher,
    row_loss: RowLoss,
    chunk_rows: int,
    group_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses, best ids, weights and ``dh`` of all rows, one chunk of logits at a time; adds the weight's
    gradient to ``dw``. Matmuls run in the dtype of autocast, everything else in fp32."""
    dtype = matmul_dtype(h)
    with torch.autocast(h.device.type, enabled=False):  # a loss may be written with a matmul of its own
        return _fused_rows(h, weight, dw, dtype, teacher, row_loss, (chunk_rows, group_rows))


def _fused_rows(
    h: torch.Tensor,
    weight: torch.Tensor,
    dw: torch.Tensor | None,
    dtype: torch.dtype,
    teacher: Teacher,
    row_loss: RowLoss,
    block: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (chunk_rows, group_rows), m, vd = block, h.shape[0], weight.shape[0]
    row_weights, tokens, confidence = teacher.row_weights, None, None
    if teacher.factors is not None:
        group_rows = m + ROWS  # all rows, with those of padding
        tokens, confidence = teacher.probs.argmax(-1), torch.empty(m, dtype=torch.float32, device=h.device)
    dh = torch.empty_like(h)
    h, weight = padded_rows(h.to(dtype)), weight.to(dtype)  # the weight is cast once, not once a chunk
    row_losses = torch.empty(m, dtype=torch.float32, device=h.device)
    best = torch.empty(m, dtype=torch.int64, device=h.device)
    group = torch.empty(min(group_rows, h.shape[0]), vd, dtype=dtype, device=h.device)
    for base in range(0, m, group_rows):
        end = min(base + group_rows, m)
        for start in range(base, end, chunk_rows):
            rows = slice(start, min(start + chunk_rows, end))
            z, at = linear(h[rows], weight).float(), teacher.index[rows]
            top, best[rows] = z.max(-1)
            mass = None if teacher.mass is None else teacher.mass[at]
            if tokens is not None and confidence is not None:
                said = z.gather(-1, tokens[at][:, None])[:, 0]
                confidence[rows] = (said - z.logsumexp(-1)).exp()
            row_losses[rows], gradient = row_loss(z, top, teacher.probs[at], teacher.row_weights[rows], mass)
            dz = group[rows.start - base : rows.stop - base]
            dz.copy_(gradient)
            dh[rows] = linear(dz, weight.t())
        if teacher.factors is not None and confidence is not None:  # the gradient is linear in the weights
            factors = teacher.factors(confidence)
            row_weights, dh = row_weights * factors, dh * factors[:, None]
            h = h * pad(factors, (0, h.shape[0] - m))[:, None].to(dtype)
        if dw is not None:
            last = min(base + group_rows, h.shape[0])
            group[end - base : last - base] = 0.0
            mine, states = group[: last - base].t(), h[base:last].t()
            for words in range(0, vd, vd if h.is_cuda else GRADIENT_WORDS):
                part = slice(words, words + (vd if h.is_cuda else GRADIENT_WORDS))
                dw[part] += linear(mine[part], states)
    return row_losses, best, row_weights, dh


def fuse(
    h: torch.Tensor,
    weight: torch.Tensor,
    rows: Rows,
    weight_grad: torch.Tensor | None,
) -> SoftCrossEntropy:
    """Apply :class:`FusedRows` to the work of ``rows``."""
    return SoftCrossEntropy(*FusedRows.apply(h, weight, rows, weight_grad, is_differentiated(weight)))
