"""Training losses of a draft head, fused with its output layer."""

import torch

from eagle_kit.kernels.backend import Backend
from eagle_kit.kernels.draft_loss import reference
from eagle_kit.kernels.soft_cross_entropy import SoftCrossEntropy, linear_soft_cross_entropy
from eagle_kit.kernels.soft_cross_entropy import reference as soft_cross_entropy
from eagle_kit.kernels.soft_cross_entropy.reference import CHUNK_ROWS, GROUP_ROWS

__all__ = ["NEEDS_MASS", "linear_draft_loss"]

NEEDS_MASS = ("tv", "lk-alpha", "lk-hybrid")
"""Losses in terms of the acceptance rate, which depends on the target's probability outside the draft
vocabulary."""
ENTROPY_ROWS = 256


def linear_draft_loss(
    h: torch.Tensor,
    weight: torch.Tensor,
    probs: torch.Tensor,
    index: torch.Tensor,
    row_weights: torch.Tensor,
    *,
    loss: str = "ce",
    mass: torch.Tensor | None = None,
    eta: float = 3.0,
    weight_grad: torch.Tensor | None = None,
    chunk_rows: int = CHUNK_ROWS,
    group_rows: int | None = None,
    backend: Backend | None = None,
) -> SoftCrossEntropy:
    """Weighted sum over rows of a loss between a teacher and ``softmax(h weight^T)``.

    Args:
        h: ``[M, H]``.
        weight: ``[Vd, H]``; no gradient is computed when it is frozen.
        probs: fp32 ``[P, Vd]``, teacher distributions, renormalised over the draft vocabulary.
        index: int64 ``[M]``, the teacher row of each row.
        row_weights: fp32 ``[M]``.
        loss: ``ce``; ``kl``, the Kullback-Leibler divergence from the teacher to the draft, which has the
            gradient of ``ce`` and a value lower by the teacher's entropy; or one of
            :mod:`eagle_kit.kernels.draft_loss.reference`. The first two have a Triton implementation, the
            others run in torch everywhere.
        mass: fp32 ``[P]``, the target's total probability of the draft vocabulary, for the losses of
            :data:`NEEDS_MASS`; None when the draft vocabulary is complete.
        eta: parameter of ``lk-hybrid``.
        weight_grad, chunk_rows, group_rows, backend: see :mod:`eagle_kit.kernels.soft_cross_entropy`.
    """
    if loss in ("ce", "kl"):
        result = linear_soft_cross_entropy(
            h,
            weight,
            probs,
            index,
            row_weights,
            chunk_rows=chunk_rows,
            group_rows=group_rows,
            weight_grad=weight_grad,
            backend=backend,
        )
        return result if loss == "ce" else _less_entropy(result, probs, index, row_weights)
    if group_rows is None:
        group_rows = GROUP_ROWS
        # On a GPU, launches cost more than cache reuse saves.
        chunk_rows = GROUP_ROWS if h.is_cuda else chunk_rows
    return soft_cross_entropy.linear_soft_cross_entropy(
        h,
        weight,
        probs,
        index,
        row_weights,
        chunk_rows=chunk_rows,
        group_rows=group_rows,
        row_loss=reference.row_loss(loss, eta),
        mass=mass,
        weight_grad=weight_grad,
    )


def _less_entropy(
    result: SoftCrossEntropy, probs: torch.Tensor, index: torch.Tensor, row_weights: torch.Tensor
) -> SoftCrossEntropy:
    """Subtract the teacher's entropy: cross-entropy to Kullback-Leibler divergence."""
    entropies = torch.cat([reference.entropy(part) for part in probs.split(ENTROPY_ROWS)])[index]
    loss = result.loss - (entropies * row_weights).sum()
    return SoftCrossEntropy(loss, result.row_losses - entropies, result.best)
