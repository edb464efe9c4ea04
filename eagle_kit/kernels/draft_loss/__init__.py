"""Training losses of a draft head, fused with its output layer."""

import torch

from eagle_kit.kernels.backend import Backend
from eagle_kit.kernels.draft_loss.reference import entropy, row_loss
from eagle_kit.kernels.soft_cross_entropy import SoftCrossEntropy, Teacher, linear_soft_cross_entropy

__all__ = ["NEEDS_MASS", "linear_draft_loss"]

NEEDS_MASS = ("tv", "lk-alpha", "lk-hybrid")
"""Losses in terms of the acceptance rate, which depends on the target's probability outside the draft
vocabulary."""
ENTROPY_ROWS = 256


def linear_draft_loss(
    h: torch.Tensor,
    weight: torch.Tensor,
    teacher: Teacher,
    *,
    loss: str = "ce",
    eta: float = 3.0,
    weight_grad: torch.Tensor | None = None,
    chunk_rows: int | None = None,
    group_rows: int | None = None,
    backend: Backend | None = None,
) -> SoftCrossEntropy:
    """Weighted sum over rows of a loss between a teacher and ``softmax(h weight^T)``.

    Args:
        h: ``[M, H]``.
        weight: ``[Vd, H]``; frozen, it costs no gradient.
        teacher: distributions, and the rows that learn from them; ``mass`` for the losses of
            :data:`NEEDS_MASS`.
        loss: ``ce``; ``kl``, the Kullback-Leibler divergence from the teacher to the draft, whose gradient is
            that of ``ce`` and whose value is less by the teacher's entropy; or one of
            :mod:`eagle_kit.kernels.draft_loss.reference`. The first two have a Triton form, the others are
            torch's everywhere.
        eta: of ``lk-hybrid``.
        weight_grad, chunk_rows, group_rows, backend: see :mod:`eagle_kit.kernels.soft_cross_entropy`.
    """
    result = linear_soft_cross_entropy(
        h,
        weight,
        teacher,
        row_loss=None if loss in ("ce", "kl") else row_loss(loss, eta),
        weight_grad=weight_grad,
        chunk_rows=chunk_rows,
        group_rows=group_rows,
        backend=backend,
    )
    if loss != "kl":
        return result
    entropies = torch.cat([entropy(part) for part in teacher.probs.split(ENTROPY_ROWS)])[teacher.index]
    divergence = result.loss - (entropies * teacher.row_weights).sum()
    return SoftCrossEntropy(divergence, result.row_losses - entropies, result.best)
