"""Output layer of a draft head and top-k over its vocabulary, in one pass over the weight.

Draft steps call it. On a GPU no logits are written.

Legend: T rows, H hidden, Vd draft vocabulary, K top-k.
"""

import torch
from torch.nn import functional as F

from eagle_kit.ops.backend import Backend, uses_cpp, uses_triton
from eagle_kit.ops.draft_topk import reference

MAX_TOPK = 16


def draft_topk(
    x: torch.Tensor,
    weight: torch.Tensor,
    topk: int,
    *,
    normalized: bool = True,
    token_map: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k ids and log-probabilities of ``softmax(x weight^T)`` for ``x [T, H]`` and ``weight [Vd, H]``.

    The reference rounds logits to the dtype of ``x``, as a linear layer does, so that near-equal logits
    become equal; the kernel ranks and normalises fp32 sums. The lowest id comes first among equal logits.
    Where logits are not finite, ids are still distinct and below Vd, and log-probabilities may be NaN.

    Args:
        topk: 1 to 16.
        normalized: False returns log-probabilities of 0 and saves the sum of exponentials, for chains, which
            need no scores.
        token_map: int64 ``[Vd]``, target id of each draft id, to return target ids.

    Returns:
        int64 and fp32 ``[T, K]``, best first.
    """
    assert 1 <= topk <= min(MAX_TOPK, weight.shape[0]), "topk must be 1 to 16 and at most Vd"
    if uses_triton("draft_topk", x, backend):
        from eagle_kit.ops.draft_topk import triton

        return triton.draft_topk(x.contiguous(), weight.contiguous(), topk, normalized, token_map)
    ids, scores = reference.topk_of_logits(F.linear(x, weight), topk, normalized)
    if token_map is not None:
        ids = token_map[ids]
    return ids, scores


def topk_of_logits(
    logits: torch.Tensor, topk: int, *, normalized: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k of ``logits [T, Vd]`` of any float type, with any ``topk`` -> ids and log-probabilities as of
    :func:`draft_topk`.

    C++ is used on a CPU for a ``topk`` of at most :data:`MAX_TOPK`; torch's own operation, otherwise, leaves
    the order of equals open.
    """
    logits = logits.float()
    if topk <= MAX_TOPK and uses_cpp(logits):
        ids, scores = torch.ops.eagle_kit_cpp.draft_topk(logits.contiguous(), topk, normalized)
        return ids, scores
    if topk == 1 and not normalized:
        ids = logits.argmax(-1, keepdim=True)
        return ids, torch.zeros_like(ids, dtype=torch.float32)
    values, ids = logits.topk(topk, -1)
    if normalized:
        return ids, values - logits.logsumexp(-1, keepdim=True)
    return ids, torch.zeros_like(values)
