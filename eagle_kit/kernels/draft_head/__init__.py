"""The output layer of a draft and the best K of its vocabulary, in one pass over the weight.

Legend: T rows, H hidden, Vd draft vocabulary, K top-k.
"""

import torch

from eagle_kit.kernels.backend import Backend, uses_triton
from eagle_kit.kernels.draft_head import reference

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
    """``x [T, H]`` times ``weight [Vd, H]`` transposed -> the K best ids and their log-probabilities.

    The reference rounds logits to the dtype of ``x``, as a linear layer does, so that near ones become equal;
    the kernel ranks and normalizes sums in fp32. Of equal logits the lowest id is first. Logits are finite.

    Args:
        topk: 1 to 16.
        normalized: False leaves the log-probabilities at 0 and spares the sum of exponentials, for a chain,
            which ranks nothing.
        token_map: int64 ``[Vd]``, target id of each draft id, if target ids are wanted.

    Returns:
        int64 and fp32 ``[T, K]``, best first.
    """
    assert 1 <= topk <= min(MAX_TOPK, weight.shape[0]), "topk is 1 to 16, and Vd at most"
    if uses_triton(x, backend):
        from eagle_kit.kernels.draft_head import triton

        return triton.draft_topk(x.contiguous(), weight.contiguous(), topk, normalized, token_map)
    return reference.draft_topk(x, weight, topk, normalized, token_map)
