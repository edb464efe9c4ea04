"""Linear layer and soft cross-entropy, fused so that the logits of all rows never exist at once.

For a row with feature h, teacher p (sum 1), weight c and z = W h:

    loss = c (logsumexp(z) - p . z),     dz = c (softmax(z) - p),     dh = dz W,     dW = sum over rows of dz
    h^T.

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
    ``[M]``, the most likely draft id of each row; ``row_weights [M]``, factors included; ``acceptance [M]``,
    the probability that a sampled draft is accepted, of losses that tell it."""

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
"""``(z, top, p, c, mass) -> (losses, dz, acceptance)`` for a chunk of rows: logits fp32 ``[rows, Vd]``, which
it may overwrite, their largest ``[rows]``, the teacher ``[rows, Vd]``, weights ``[rows]``, and the share of
the target's probability that the draft vocabulary has, ``[rows]`` or None. The acceptance rate ``[rows]`` is
None where nobody asks for it."""


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


RowResults = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]
Rows = Callable[[torch.Tensor, Weights, WeightGrads], RowResults]
"""``(h, weights, grads) -> (row_losses, best, row_weights, acceptance, dh)`` for all rows; adds the weights'
gradients to ``grads``."""


class FusedRows(torch.autograd.Function):
    """Weighted sum of row losses whose gradients are computed in the forward: ``(h, rows, weight_grads,
    is_trained, *weights) -> (loss, row_losses, best, row_weights, acceptance)``, see
    :func:`linear_soft_cross_entropy`. The forward adds to ``weight_grads``, so it must not be run again under
    activation checkpointing."""

    @staticmethod
    def forward(
        ctx: Any,
        h: torch.Tensor,
        rows: Rows,
        weight_grads: WeightGrads,
        is_trained: tuple[bool, ...],
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        mine = [
            torch.zeros_like(weight) if learns and given is None else None
            for weight, learns, given in zip(weights, is_trained, weight_grads, strict=True)
        ]
        grads = tuple(
            (own if given is None else given) if learns else None
            for own, given, learns in zip(mine, weight_grads, is_trained, strict=True)
        )
        row_losses, best, row_weights, acceptance, dh = rows(h, weights, grads)
        ctx.save_for_backward(dh, *mine)
        ctx.mark_non_differentiable(
            *(part for part in (row_losses, best, row_weights, acceptance) if part is not None)
        )
        return (row_losses * row_weights).sum(), row_losses, best, row_weights, acceptance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dh, *mine = ctx.saved_tensors
        own = (None if each is None else each * grads[0] for each in mine)
        return dh * grads[0], None, None, None, *own


class _Carried(torch.autograd.Function):
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
        return _fused_rows(h, weights, grads, dtype, teacher, row_loss, (chunk_rows, group_rows))


def _fused_rows(
    h: torch.Tensor,
    weights: Weights,
    grads: WeightGrads,
    dtype: torch.dtype,
    teacher: Teacher,
    row_loss: RowLoss,
    block: tuple[int, int],
) -> RowResults:
    chunk_rows, group_rows = block
    m = h.shape[0]
    vd = weights[0].shape[0]
    row_weights = teacher.row_weights
    tokens = None
    confidence = None
    if teacher.factors is not None:
        group_rows = m + ROWS  # all rows, with those of padding
        tokens = teacher.probs.argmax(-1)
        confidence = torch.empty(m, dtype=torch.float32, device=h.device)
    dh = torch.empty_like(h)
    widths = [weight.shape[1] for weight in weights]
    h = padded_rows(h.to(dtype))
    weights = tuple(weight.to(dtype) for weight in weights)  # cast once, not once a chunk
    row_losses = torch.empty(m, dtype=torch.float32, device=h.device)
    best = torch.empty(m, dtype=torch.int64, device=h.device)
    rates: list[torch.Tensor] = []
    group = torch.empty(min(group_rows, h.shape[0]), vd, dtype=dtype, device=h.device)
    for base in range(0, m, group_rows):
        end = min(base + group_rows, m)
        for start in range(base, end, chunk_rows):
            rows = slice(start, min(start + chunk_rows, end))
            z = _logits(h[rows], weights, widths)
            at = teacher.index[rows]
            top, best[rows] = z.max(-1)
            mass = None if teacher.mass is None else teacher.mass[at]
            if tokens is not None and confidence is not None:
                said = z.gather(-1, tokens[at][:, None])[:, 0]
                confidence[rows] = (said - z.logsumexp(-1)).exp()
            row_losses[rows], gradient, rate = row_loss(
                z, top, teacher.probs[at], teacher.row_weights[rows], mass
            )
            rates += [] if rate is None else [rate]
            dz = group[rows.start - base : rows.stop - base]
            dz.copy_(gradient)
            for part, weight in zip(dh[rows].split(widths, 1), weights, strict=True):
                part.copy_(linear(dz, weight.t()))
        if teacher.factors is not None and confidence is not None:  # the gradient is linear in the weights
            factors = teacher.factors(confidence)
            row_weights = row_weights * factors
            dh = dh * factors[:, None]
            h = h * pad(factors, (0, h.shape[0] - m))[:, None].to(dtype)
        last = min(base + group_rows, h.shape[0])
        group[end - base : last - base] = 0.0
        for dw, states in zip(grads, h[base:last].split(widths, 1), strict=True):
            if dw is not None:
                _add_product(dw, group[: last - base].t(), states)
    return row_losses, best, row_weights, torch.cat(rates) if rates else None, dh


def _logits(h: torch.Tensor, weights: Weights, widths: list[int]) -> torch.Tensor:
    """Sum of the products of weights and their columns of ``h``, fp32."""
    first, *more = (linear(x, w) for x, w in zip(h.split(widths, 1), weights, strict=True))
    z = first.float()
    for product in more:
        z += product
    return z


def _add_product(dw: torch.Tensor, dz: torch.Tensor, states: torch.Tensor) -> None:
    """Add ``dz [Vd, M]`` times ``states [M, H]`` to ``dw``."""
    step = len(dw) if dw.is_cuda else GRADIENT_WORDS
    for words in range(0, len(dw), step):
        dw[words : words + step] += linear(dz[words : words + step], states.t())


def fuse(h: torch.Tensor, weights: Weights, rows: Rows, weight_grads: WeightGrads) -> SoftCrossEntropy:
    """Apply :class:`FusedRows` to the work of ``rows``."""
    is_trained = tuple(is_differentiated(weight) for weight in weights)
    return SoftCrossEntropy(*FusedRows.apply(h, rows, weight_grads, is_trained, *weights))
