"""Linear layer and soft cross-entropy, fused: the default training loss."""

from functools import partial

import torch

from eagle_kit.kernels.backend import Backend, uses_triton
from eagle_kit.kernels.linear.padded import matmul_dtype
from eagle_kit.kernels.soft_cross_entropy.reference import (
    CHUNK_ROWS,
    GROUP_ROWS,
    RowLoss,
    SoftCrossEntropy,
    Teacher,
    carried,
    cross_entropy_rows,
    fuse,
    fused_rows,
)

__all__ = ["SoftCrossEntropy", "Teacher", "carried", "linear_soft_cross_entropy"]


def linear_soft_cross_entropy(
    h: torch.Tensor,
    weight: torch.Tensor,
    teacher: Teacher,
    *,
    row_loss: RowLoss | None = None,
    weight_grad: torch.Tensor | None = None,
    chunk_rows: int | None = None,
    group_rows: int | None = None,
    backend: Backend | None = None,
) -> SoftCrossEntropy:
    """Weighted sum over rows of the cross-entropy between a teacher and ``softmax(h weight^T)``.

    Args:
        h: ``[M, H]``.
        weight: ``[Vd, H]``; frozen, it costs no gradient.
        teacher: distributions, and the rows that learn from them.
        row_loss: another loss of a row's logits; it has the torch form only, and so have ``factors`` of the
            teacher.
        weight_grad: as ``weight``; the gradient of ``weight`` is added to it at once, and ``loss`` then has
            none to give, see :func:`carried`.
        chunk_rows, group_rows: rows per chunk of logits and per weight-gradient matmul; the result's rounding
            depends on them, its value does not. By default 128 and 640; on a GPU 640 and 640 in the torch
            form, where launches cost more than a cache saves, and 4,096 in the Triton form, whose chunks are
            its groups.
    """
    if row_loss is None and teacher.factors is None and uses_triton(h, backend):
        from eagle_kit.kernels.soft_cross_entropy import triton

        dtype, chunk = matmul_dtype(h), group_rows or triton.CHUNK_ROWS
        weights = teacher.row_weights.float().contiguous()
        tensors = teacher.probs.contiguous(), teacher.index.contiguous(), weights

        def rows(
            h: torch.Tensor, weight: torch.Tensor, dw: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
            grown = weight.new_empty(0) if dw is None else dw
            losses, best, dh = triton.linear_soft_cross_entropy_(h, weight, *tensors, grown, dtype, chunk)
            return losses, best, weights, dh

        return fuse(h, weight, rows, weight_grad)
    in_torch = partial(
        fused_rows,
        teacher=teacher,
        row_loss=row_loss or cross_entropy_rows,
        chunk_rows=chunk_rows or (GROUP_ROWS if h.is_cuda else CHUNK_ROWS),
        group_rows=group_rows or GROUP_ROWS,
    )
    return fuse(h, weight, in_torch, weight_grad)
