"""Linear layer and soft cross-entropy, fused: the default training loss.

The trainer calls it. Loss and gradient are computed a chunk of rows at a time, so that the logits of a batch
are never stored whole.
"""

from functools import partial

import torch

from eagle_kit.ops.backend import Backend, uses_triton
from eagle_kit.ops.linear.padded import matmul_dtype
from eagle_kit.ops.soft_cross_entropy.reference import (
    CHUNK_ROWS,
    GROUP_ROWS,
    RowLoss,
    RowResults,
    SoftCrossEntropy,
    Teacher,
    WeightGrads,
    Weights,
    attach_gradient,
    cross_entropy_rows,
    fuse,
    fused_rows,
)

__all__ = [
    "SoftCrossEntropy",
    "Teacher",
    "WeightGrads",
    "Weights",
    "attach_gradient",
    "linear_soft_cross_entropy",
]


def linear_soft_cross_entropy(
    h: torch.Tensor,
    weight: torch.Tensor | Weights,
    teacher: Teacher,
    *,
    row_loss: RowLoss | None = None,
    weight_grad: torch.Tensor | WeightGrads | None = None,
    chunk_rows: int | None = None,
    group_rows: int | None = None,
    backend: Backend | None = None,
) -> SoftCrossEntropy:
    """Weighted sum over rows of the cross-entropy between a teacher and ``softmax(h weight^T)``.

    Args:
        h: ``[M, H]``.
        weight: ``[Vd, H]``, or several whose columns together are H; one that is frozen costs no gradient.
        teacher: distributions, and the rows that learn from them.
        row_loss: another loss of a row's logits. It is computed by torch only, as are ``factors`` of the
            teacher and several weights.
        weight_grad: of the form of ``weight``. The gradient of ``weight`` is added to it in the forward, and
            the backward of ``loss`` gives ``weight`` none, see :func:`attach_gradient`.
        chunk_rows, group_rows: rows per chunk of logits and per weight-gradient matmul; they change the
            rounding of the result only. By default 128 and 640; on a GPU 640 and 640 in torch, where launches
            cost more than a cache saves, and 4,096 in Triton, whose chunks are its groups.
    """
    weights = (weight,) if isinstance(weight, torch.Tensor) else weight
    given = weight_grad if isinstance(weight_grad, tuple) else (weight_grad,) * len(weights)
    if (
        row_loss is None
        and teacher.factors is None
        and len(weights) == 1
        and uses_triton("soft_cross_entropy", h, backend)
    ):
        from eagle_kit.ops.soft_cross_entropy import triton

        dtype = matmul_dtype(h)
        chunk = group_rows or triton.CHUNK_ROWS
        row_weights = teacher.row_weights.float().contiguous()
        probs = teacher.probs.contiguous()
        index = teacher.index.contiguous()

        def rows(h: torch.Tensor, weights: Weights, grads: WeightGrads) -> RowResults:
            dw = weights[0].new_empty(0) if grads[0] is None else grads[0]
            losses, best, dh = triton.linear_soft_cross_entropy_(
                h, weights[0], probs, index, row_weights, dw, dtype, chunk
            )
            return RowResults(losses, best, row_weights, None, dh)

        return fuse(h, weights, rows, given)
    in_torch = partial(
        fused_rows,
        teacher=teacher,
        row_loss=row_loss or cross_entropy_rows,
        chunk_rows=chunk_rows or (GROUP_ROWS if h.is_cuda else CHUNK_ROWS),
        group_rows=group_rows or GROUP_ROWS,
    )
    return fuse(h, weights, in_torch, given)
