"""Smallest set of most likely tokens whose total weight reaches a threshold: top-k (weight 1 per token) and
top-p (weight = probability), without sorting the vocabulary.

Tokens are given by their distance d >= 0 from the best one. The bound t, the smallest distance such that the
tokens within t reach the threshold, is found by bisection over all fp32 numbers: bits of numbers >= 0 are
ordered as the numbers are, and there are fewer than 2^31 of them up to infinity. 31 rounds, each one pass
over the row, are exact, have no data-dependent shape, and cost a quarter to a half of a sort (49,152 tokens,
one core).

Legend: B requests, N window nodes, V vocabulary.
"""

import torch
from torch.nn import functional

CHUNK = 1024
"""Number of addends that are summed in fp32; the chunks' sums are added in fp64. Chunks also make the order
of additions independent of the number of rows of a call."""

_ROUNDS = 31
_INFINITY = 0x7F800000


def nearest(distance: torch.Tensor, weights: torch.Tensor, need: torch.Tensor) -> torch.Tensor:
    """Mask of the nearest tokens whose weights reach ``need``, and of no more tokens than necessary.

    Tokens of equal distance are taken in the order of their ids. If all weights together are less than
    ``need``, all tokens are taken.

    Args:
        distance: fp32 ``[B, N, V]``, 0 to infinity, no negative zero.
        weights: fp32 ``[B, N, V]``, >= 0, equal for equal distances.
        need: fp64 ``[B or 1, N or 1, 1]``, above 0.

    Returns:
        bool ``[B, N, V]``.
    """
    # Chunks of tokens, whose sums do not depend on the number of rows.
    chunk = min(CHUNK, distance.shape[-1])
    padding = (0, -distance.shape[-1] % chunk)
    chunks = (*distance.shape[:-1], -1, chunk)
    d = functional.pad(distance, padding, value=float("inf")).view(chunks)
    w = functional.pad(weights, padding).view(chunks)
    taken = torch.empty_like(w)
    need = need.expand(*distance.shape[:-1], 1)

    # Bisection: the weight within ``low`` is less than needed, that within ``high`` is not.
    low = torch.full_like(need, -1, dtype=torch.int32)
    high = torch.full_like(low, _INFINITY)
    for _ in range(_ROUNDS):
        middle = low + (high - low) // 2
        torch.le(d, middle.view(torch.float32)[..., None], out=taken)
        is_enough = _weight(taken, w) >= need
        low = torch.where(is_enough, low, middle)
        high = torch.where(is_enough, middle, high)

    # All tokens below the bound, and of those at the bound as many as are still needed.
    bound = high.view(torch.float32)
    missing = need - _weight(torch.lt(d, bound[..., None], out=taken), w)
    tied = distance == bound
    before = (tied.cumsum(-1) - 1) * weights  # total weight of ties with a lower id
    return (distance < bound) | (tied & (before < missing))


def _weight(taken: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Sum of ``w`` over the tokens ``taken``, fp64 ``[B, N, 1]``; ``taken`` is overwritten."""
    return taken.mul_(w).sum(-1).sum(-1, keepdim=True, dtype=torch.float64)
