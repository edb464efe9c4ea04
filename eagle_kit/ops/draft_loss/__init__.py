"""Training losses of a draft head, fused with its output layer.

The trainer calls it for KL divergence, reverse KL, total variation, the LK losses, and weighted sums of
losses. It is in torch only.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from eagle_kit.ops.backend import Backend
from eagle_kit.ops.draft_loss.reference import entropy, row_loss
from eagle_kit.ops.soft_cross_entropy import (
    SoftCrossEntropy,
    Teacher,
    WeightGrads,
    Weights,
    linear_soft_cross_entropy,
)

__all__ = ["NEEDS_MASS", "linear_draft_loss"]

NEEDS_MASS = ("tv", "lk-alpha", "lk-hybrid")
"""Losses in terms of the acceptance rate, which depends on the target's probability outside the draft
vocabulary."""
ENTROPY_ROWS = 256
"""Teacher positions whose entropies are computed at a time."""


def linear_draft_loss(
    h: torch.Tensor,
    weight: torch.Tensor | Weights,
    teacher: Teacher,
    *,
    loss: str | Mapping[str, float] = "ce",
    eta: float = 3.0,
    returns_acceptance: bool = False,
    weight_grad: torch.Tensor | WeightGrads | None = None,
    chunk_rows: int | None = None,
    group_rows: int | None = None,
    backend: Backend | None = None,
) -> SoftCrossEntropy:
    """Weighted sum over rows of a loss between a teacher and ``softmax(h weight^T)``.

    Args:
        h: ``[M, H]``.
        weight: ``[Vd, H]``, or several, see :mod:`eagle_kit.ops.soft_cross_entropy`.
        teacher: distributions, and the rows that learn from them; ``mass`` for the losses of
            :data:`NEEDS_MASS` and the acceptance rate.
        loss: one of :mod:`eagle_kit.ops.draft_loss.reference`, or several with their weights, which are
            computed in one pass. ``ce``, ``kl`` and mixes of the two are also implemented in Triton, the
            others in torch only.
        eta: of ``lk-hybrid``.
        returns_acceptance: also return ``acceptance`` of rows, which is implemented in torch only.
        weight_grad, chunk_rows, group_rows, backend: see :mod:`eagle_kit.ops.soft_cross_entropy`.
    """
    mix = {loss: 1.0} if isinstance(loss, str) else loss

    # Losses other than cross-entropies.
    if returns_acceptance or not set(mix) <= {"ce", "kl"}:
        return linear_soft_cross_entropy(
            h,
            weight,
            teacher,
            row_loss=row_loss(mix, eta, returns_acceptance=returns_acceptance),
            weight_grad=weight_grad,
            chunk_rows=chunk_rows,
            group_rows=group_rows,
            backend=backend,
        )

    # A cross-entropy, times the sum of the weights of both.
    factor = sum(mix.values())
    result = linear_soft_cross_entropy(
        h,
        weight,
        teacher if factor == 1.0 else replace(teacher, row_weights=teacher.row_weights * factor),
        weight_grad=weight_grad,
        chunk_rows=chunk_rows,
        group_rows=group_rows,
        backend=backend,
    )
    if factor != 1.0:
        result = result._replace(row_losses=result.row_losses * factor)
    if "kl" not in mix:
        return result

    # The KL divergence is the cross-entropy without the teacher's entropy.
    entropies = torch.cat([entropy(part) for part in teacher.probs.split(ENTROPY_ROWS)])[teacher.index]
    entropies = entropies * mix["kl"]
    divergence = result.loss - (entropies * result.row_weights / factor).sum()
    return result._replace(loss=divergence, row_losses=result.row_losses - entropies)
