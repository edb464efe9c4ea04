"""Training losses of a draft head, fused with its output layer."""

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
        loss: one of :mod:`eagle_kit.ops.draft_loss.reference`, or several with their weights, which cost
            one pass too. ``ce``, ``kl`` and mixes of the two have a Triton form, the others are torch's
            everywhere.
        eta: of ``lk-hybrid``.
        returns_acceptance: return ``acceptance`` of rows too, which has torch's form only.
        weight_grad, chunk_rows, group_rows, backend: see :mod:`eagle_kit.ops.soft_cross_entropy`.
    """
    mix = {loss: 1.0} if isinstance(loss, str) else loss
    is_cross = set(mix) <= {"ce", "kl"} and not returns_acceptance
    cross = sum(mix.values()) if is_cross else 1.0
    result = linear_soft_cross_entropy(
        h,
        weight,
        teacher if cross == 1.0 else replace(teacher, row_weights=teacher.row_weights * cross),
        row_loss=None if is_cross else row_loss(mix, eta, returns_acceptance=returns_acceptance),
        weight_grad=weight_grad,
        chunk_rows=chunk_rows,
        group_rows=group_rows,
        backend=backend,
    )
    result = result._replace(row_losses=result.row_losses * cross) if cross != 1.0 else result
    if not is_cross or "kl" not in mix:
        return result
    entropies = torch.cat([entropy(part) for part in teacher.probs.split(ENTROPY_ROWS)])[teacher.index]
    entropies = entropies * mix["kl"]
    divergence = result.loss - (entropies * result.row_weights / cross).sum()
    return result._replace(loss=divergence, row_losses=result.row_losses - entropies)
