"""Linear layer and soft cross-entropy, fused: the default training loss."""

import torch

from eagle_kit.kernels.backend import Backend, is_differentiated, uses_triton
from eagle_kit.kernels.soft_cross_entropy import reference
from eagle_kit.kernels.soft_cross_entropy.reference import (
    CHUNK_ROWS,
    GROUP_ROWS,
    FusedRows,
    SoftCrossEntropy,
    carried,
)

__all__ = ["SoftCrossEntropy", "carried", "linear_soft_cross_entropy"]


def linear_soft_cross_entropy(
    h: torch.Tensor,
    weight: torch.Tensor,
    probs: torch.Tensor,
    index: torch.Tensor,
    row_weights: torch.Tensor,
    *,
    chunk_rows: int = CHUNK_ROWS,
    group_rows: int | None = None,
    weight_grad: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> SoftCrossEntropy:
    """See :func:`eagle_kit.kernels.soft_cross_entropy.reference.linear_soft_cross_entropy`.

    Args:
        group_rows: default 640; 4,096 in Triton, where it is also the number of rows per chunk of logits,
            since no cache holds those. ``chunk_rows`` applies to the reference only.
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
            weight_grad=weight_grad,
        )
    from eagle_kit.kernels.soft_cross_entropy import triton

    kind = h.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else h.dtype
    chunk = group_rows or triton.CHUNK_ROWS
    weights = row_weights.float().contiguous()
    teacher = probs.contiguous(), index.contiguous(), weights

    def rows(
        h: torch.Tensor, weight: torch.Tensor, dw: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grown = weight.new_empty(0) if dw is None else dw
        return triton.linear_soft_cross_entropy_(h, weight, *teacher, grown, dtype, chunk)

    is_trained = is_differentiated(weight)
    return SoftCrossEntropy(*FusedRows.apply(h, weight, weights, rows, weight_grad, is_trained))
