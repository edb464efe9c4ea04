"""Top-k of logits in C++ (:mod:`eagle_kit.kernels.cpp`), one pass over each row."""

import torch


def draft_topk(logits: torch.Tensor, topk: int, normalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits [T, Vd]``, fp32 on a CPU -> what :func:`eagle_kit.kernels.draft_topk.draft_topk` returns."""
    ids, scores = torch.ops.eagle_kit_cpp.draft_topk(logits.contiguous(), topk, normalized)
    return ids, scores
