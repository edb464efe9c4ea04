"""Linear layer and soft cross-entropy, fused so that the logits of all rows never exist at once.

For a row with feature h, teacher p (sum 1), weight c and z = W h:

    loss = c (logsumexp(z) - p . z),     dz = c (softmax(z) - p),
    dh = dz W,                           dW = sum over rows of dz h^T.

The forward computes loss and gradients chunk by chunk (the idea of Liger's fused linear cross-entropy,
arXiv 2410.10989): three matmuls, nothing recomputed, one chunk of logits alive.

W may be several weights side by side, each over its own columns of h (an output layer, and a low-rank
correction of its logits): z is the sum of their products, and those that are frozen cost no gradient.

Legend: M rows, H hidden (columns of all weights), Vd draft vocabulary, P teacher positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from eagle_kit.ops.backend import is_differentiated
from eagle_kit.ops.linear import linear
from eagle_kit.ops.linear.padded import ROWS, matmul_dtype, padded_rows

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
        factors: function from the draft's probability of the teacher's best token to a factor of the row's
            weight, both fp32 ``[M]``. It needs all rows at once, so all are one group. None leaves the
            weights as they are.
    """

    probs: torch.Tensor
    index: torch.Tensor
    row_weights: torch.Tensor
    mass: torch.Tensor | None = None
    factors: Callable[[torch.Tensor], torch.Tensor] | None = None


class SoftCrossEntropy(NamedTuple):
    """Loss of all rows.

    Attributes:
        loss: the weighted sum, a differentiable scalar.
        row_losses: ``[M]``, unweighted.
        best: int64 ``[M]``, the most likely draft id of each row.
        row_weights: ``[M]``, factors included.
        acceptance: ``[M]``, the probability that a sampled draft token is accepted; None where the loss does
            not compute it.
    """

    loss: torch.Tensor
    row_losses: torch.Tensor
    best: torch.Tensor
    row_weights: torch.Tensor
    acceptance: torch.Tensor | None = None


Weights = tuple[torch.Tensor, ...]
"""One or several weights ``[Vd, H_j]``, whose columns are side by side."""
WeightGrads = tuple[torch.Tensor | None, ...]
"""Gradients that are added to, of the shapes of weights; None for a frozen one."""


RowLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Any]
"""Loss of a chunk of rows: ``(z, top, p, c, mass) -> (losses, dz, acceptance)``.

The arguments are the logits fp32 ``[rows, Vd]``, which it may overwrite, their largest ``[rows]``, the
teacher ``[rows, Vd]``, the weights ``[rows]``, and the share of the target's probability that the draft
vocabulary has, ``[rows]`` or None. The acceptance rate ``[rows]`` is None unless it was asked for."""


def cross_entropy_rows(
    z: torch.Tensor, top: torch.Tensor, p: torch.Tensor, c: torch.Tensor, mass: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Soft cross-entropy as a :data:`RowLoss`."""
    dot = torch.linalg.vecdot(p, z)
    z = z.sub_(top[:, None]).exp_()
    total = z.sum(-1)
    losses = top + total.log() - dot
    z = z.mul_((c / total)[:, None])
    return losses, z.addcmul_(p, c[:, None], value=-1.0), None


class RowResults(NamedTuple):
    """Fields of :class:`SoftCrossEntropy` of all rows, and ``dh``, the gradient of h."""

    row_losses: torch.Tensor
    best: torch.Tensor
    row_weights: torch.Tensor
    acceptance: torch.Tensor | None
    dh: torch.Tensor


Rows = Callable[[torch.Tensor, Weights, WeightGrads], RowResults]
"""``(h, weights, grads) -> results`` for all rows; adds the weights' gradients to ``grads``."""


class FusedRows(torch.autograd.Function):
    """Weighted sum of row losses whose gradients are computed in the forward: ``(h, rows, weight_grads,
    is_trained, *weights) -> (loss, row_losses, best, row_weights, acceptance)``, see
    :func:`linear_soft_cross_entropy`.

    The forward adds to ``weight_grads``, so it must not be run again under activation checkpointing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: torch.Tensor,
        rows: Rows,
        weight_grads: WeightGrads,
        is_trained: tuple[bool, ...],
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        # Gradients of trained weights: the given ones, or new ones, which the backward returns.
        own_grads: list[torch.Tensor | None] = []
        grads: list[torch.Tensor | None] = []
        for weight, learns, given in zip(weights, is_trained, weight_grads, strict=True):
            own = torch.zeros_like(weight) if learns and given is None else None
            own_grads.append(own)
            grads.append(given if learns and own is None else own)

        results = rows(h, weights, tuple(grads))
        ctx.save_for_backward(results.dh, *own_grads)
        outputs = (results.row_losses, results.best, results.row_weights, results.acceptance)
        ctx.mark_non_differentiable(*(output for output in outputs if output is not None))
        return (results.row_losses * results.row_weights).sum(), *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dh, *own_grads = ctx.saved_tensors
        scaled = (None if own is None else own * grads[0] for own in own_grads)
        return dh * grads[0], None, None, None, *scaled


class _Carried(torch.autograd.Function):
    """``(weight, gradient) -> 0``; the gradient of ``weight`` is ``gradient``."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return torch.zeros((), dtype=torch.float32, device=weight.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0].mul_(grads[0]), None  # its only reader


def attach_gradient(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A zero whose gradient with respect to ``weight`` is ``gradient``.

    Added to the sum of several losses, it passes on the gradient that they have accumulated in their
    ``weight_grad``, so that one gradient of the weight is kept instead of one per loss.
    """
    zero: torch.Tensor = _Carried.apply(weight, gradient)
    return zero


def fused_rows(
    h: torch.Tensor,
    weights: Weights,
    grads: WeightGrads,
    *,
    teacher: Teacher,
    row_loss: RowLoss,
    chunk_rows: int,
    group_rows: int,
) -> RowResults:
    """Losses, best ids, weights and ``dh`` of all rows, one chunk of logits at a time; adds the weights'
    gradients to ``grads``. Matmuls run in the dtype of autocast, everything else in fp32."""
    dtype = matmul_dtype(h)
    with torch.autocast(h.device.type, enabled=False):  # a loss may be written with a matmul of its own
        return _fused_rows(h, weights, grads, dtype, teacher, row_loss, chunk_rows, group_rows)


def _fused_rows(
    h: torch.Tensor,
    weights: Weights,
    grads: WeightGrads,
    dtype: torch.dtype,
    teacher: Teacher,
    row_loss: RowLoss,
    chunk_rows: int,
    group_rows: int,
) -> RowResults:
    # With factors, all rows are one group, and the draft's probability of the teacher's best token is kept.
    m = h.shape[0]
    row_weights = teacher.row_weights
    best_tokens = None
    best_probs = None
    if teacher.factors is not None:
        group_rows = m + ROWS  # all rows, with those of padding
        best_tokens = teacher.probs.argmax(-1)
        best_probs = torch.empty(m, dtype=torch.float32, device=h.device)

    # Results, operands in ``dtype``, which are cast once, and dz of a group.
    dh = torch.empty_like(h)
    widths = [weight.shape[1] for weight in weights]
    h = padded_rows(h.to(dtype))
    weights = tuple(weight.to(dtype) for weight in weights)
    row_losses = torch.empty(m, dtype=torch.float32, device=h.device)
    best = torch.empty(m, dtype=torch.int64, device=h.device)
    acceptance: list[torch.Tensor] = []
    group = torch.empty(min(group_rows, h.shape[0]), weights[0].shape[0], dtype=dtype, device=h.device)
    for base in range(0, m, group_rows):
        end = min(base + group_rows, m)
        for start in range(base, end, chunk_rows):
            # Logits of a chunk, and the teacher of its rows.
            rows = slice(start, min(start + chunk_rows, end))
            z = _logits(h[rows], weights, widths)
            index = teacher.index[rows]
            top, best[rows] = z.max(-1)
            mass = None if teacher.mass is None else teacher.mass[index]
            if best_tokens is not None and best_probs is not None:
                best_logits = z.gather(-1, best_tokens[index][:, None])[:, 0]
                best_probs[rows] = (best_logits - z.logsumexp(-1)).exp()

            # Losses and dz, then dh.
            row_losses[rows], gradient, rates = row_loss(
                z, top, teacher.probs[index], teacher.row_weights[rows], mass
            )
            if rates is not None:
                acceptance.append(rates)
            dz = group[rows.start - base : rows.stop - base]
            dz.copy_(gradient)
            for part, weight in zip(dh[rows].split(widths, 1), weights, strict=True):
                part.copy_(linear(dz, weight.t()))

        # Apply the factors: gradients are linear in the weights of rows.
        if teacher.factors is not None and best_probs is not None:
            factors = teacher.factors(best_probs)
            row_weights = row_weights * factors
            dh = dh * factors[:, None]
            h = h * pad(factors, (0, h.shape[0] - m))[:, None].to(dtype)

        # Gradients of the weights, over the rows of the group, padded with zeros.
        last = min(base + group_rows, h.shape[0])
        group[end - base : last - base] = 0.0
        for dw, states in zip(grads, h[base:last].split(widths, 1), strict=True):
            if dw is not None:
                _add_product(dw, group[: last - base].t(), states)
    return RowResults(row_losses, best, row_weights, torch.cat(acceptance) if acceptance else None, dh)


def _logits(h: torch.Tensor, weights: Weights, widths: list[int]) -> torch.Tensor:
    """Sum of the products of weights and their columns of ``h``, fp32."""
    first, *more = (linear(x, w) for x, w in zip(h.split(widths, 1), weights, strict=True))
    z = first.float()
    for product in more:
        z += product
    return z


def _add_product(dw: torch.Tensor, dz: torch.Tensor, states: torch.Tensor) -> None:
    """Add ``dz [Vd, M]`` times ``states [M, H]`` to ``dw [Vd, H]``."""
    step = len(dw) if dw.is_cuda else GRADIENT_WORDS
    for words in range(0, len(dw), step):
        dw[words : words + step] += linear(dz[words : words + step], states.t())


def fuse(h: torch.Tensor, weights: Weights, rows: Rows, weight_grads: WeightGrads) -> SoftCrossEntropy:
    """Apply :class:`FusedRows` to the work of ``rows``."""
    is_trained = tuple(is_differentiated(weight) for weight in weights)
    outputs = FusedRows.apply(h, rows, weight_grads, is_trained, *weights)
    return SoftCrossEntropy(*outputs)
