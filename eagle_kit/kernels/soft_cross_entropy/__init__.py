"""The training loss: linear layer and soft cross-entropy, fused."""

import torch

from eagle_kit.kernels.backend import Backend, uses_triton
from eagle_kit.kernels.soft_cross_entropy import reference
from eagle_kit.kernels.soft_cross_entropy.reference import CHUNK_ROWS, GROUP_ROWS, SoftCrossEntropy

__all__ = ["SoftCrossEntropy", "linear_soft_cross_entropy"]


def linear_soft_cross_entropy(
    h: torch.Tensor,
    weight: torch.Tensor,
    probs: torch.Tensor,
    index: torch.Tensor,
    row_weights: torch.Tensor,
    *,
    chunk_rows: int = CHUNK_ROWS,
    group_rows: int | None = None,
    backend: Backend | None = None,
) -> SoftCrossEntropy:
    """See :func:`eagle_kit.kernels.soft_cross_entropy.reference.linear_soft_cross_entropy`.

    Args:
        group_rows: 1,024 unless given; 4,096 in the Triton form, where it is the rows per chunk of logits as
            well, since no cache holds those. ``chunk_rows`` is the reference's alone.
    """
    if not uses_triton(h, backend):
        return reference.linear_soft_cross_entropy(
            h,
            weight,
            probs,
            index,
            row_weights,
            chunk_rows=chunk_rows,
            group_rows=group_rows or GROUP_ROWS,
        )
    from eagle_kit.kernels.soft_cross_entropy import triton

    kind = h.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else h.dtype
    rows = group_rows or triton.CHUNK_ROWS
    teacher = probs.contiguous(), index.contiguous(), row_weights.float().contiguous()
    loss, row_losses, best, _, _ = triton.linear_soft_cross_entropy(h, weight, *teacher, dtype, rows)
    return SoftCrossEntropy(loss, row_losses.detach(), best)
