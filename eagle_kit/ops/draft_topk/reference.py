"""Top-k of logits in torch, the reference of the kernel.

Legend: T rows, H hidden, Vd draft vocabulary.
"""

import torch


def best_of(logits: torch.Tensor, topk: int) -> torch.Tensor:
    """Ids ``[T, K]`` of the largest of ``logits [T, Vd]`` fp32, best first, the lowest id first among equals.

    ``torch.topk`` leaves the order of equals open, and a stable sort is ten times slower. So it is applied to
    distinct integers of the same order: the bits of the float (inverted if negative) followed by the id.
    """
    if topk == 1:
        return logits.argmax(-1, keepdim=True)
    bits = (logits + 0.0).view(torch.int32)  # -0 becomes 0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return ((order << 32) - ids).topk(topk, -1).indices


def topk_of_logits(
    logits: torch.Tensor, topk: int, normalized: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits [T, Vd]`` -> ids and log-probabilities ``[T, K]``."""
    logits = logits.float()
    ids = best_of(logits, topk)
    if normalized:
        scores = logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
    else:
        scores = torch.zeros_like(ids, dtype=torch.float32)
    return ids, scores
