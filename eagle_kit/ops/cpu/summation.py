"""Sizes of matmuls on a CPU for which sums have one order, so that a token's bits do not depend on the
window, chunk or batch in which it is computed.

They were found by comparing MKL's fp32 products of all sizes with AVX2 (as on AMD) and AVX-512 (on Intel);
``tests/kv`` tests attention with them. With AVX2, terms are added up in runs of 384. With AVX-512 the last
385 to 767 terms of a sum are two halves, and two threads may share the terms of a single matrix.
"""

from functools import cache
from itertools import pairwise

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

FEW_ROWS = 4
"""Number of rows from which on BLAS adds up as for many rows, with AVX2."""
MOST_LEAST_ROWS = 16
"""Number of rows from which on BLAS adds up as for many rows on every processor."""
SPLIT_TERMS = 384
"""Terms that BLAS adds up in one run. Numbers of terms between half of it and all of it are two halves."""
COLUMNS = 64
"""Numbers of columns are rounded up to a multiple of this."""


def round_columns(count: int) -> int:
    """Round ``count`` keys up to a number of columns whose sums have one order."""
    columns = -(-count // COLUMNS) * COLUMNS
    return SPLIT_TERMS if SPLIT_TERMS // 2 < columns < SPLIT_TERMS else columns


def least_rows(terms: int, matrices: int) -> int:
    """Return the number of rows of a matrix below which BLAS adds up ``terms`` in another order than for
    more, in a product of ``matrices`` pairs. The rows of a single matrix are shared by threads."""
    if matrices == 1:
        return MOST_LEAST_ROWS
    if _adds_in_runs():
        return FEW_ROWS
    return min(MOST_LEAST_ROWS, max(FEW_ROWS, terms // 24 + 2))


def pad_rows(matrices: torch.Tensor) -> torch.Tensor:
    """Return ``matrices [B, M, K]`` with rows of zeros behind them where they have fewer than
    :func:`least_rows`."""
    count, rows, terms = matrices.shape
    missing = least_rows(terms, count) - rows
    return F.pad(matrices, (0, 0, 0, missing)) if missing > 0 else matrices


def least_nodes(group: int, head_dim: int, matrices: int) -> int:
    """Nodes to which a window is padded when it has fewer; ``group`` query heads share a KV head of
    ``head_dim``, of which a batch has ``matrices``."""
    return -(-least_rows(head_dim, matrices) // group)


def weighted_sum(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Batched product of ``weights [B, M, C]`` and ``values [B, C, E]`` -> ``[B, M, E]``, whose terms are
    added up in runs of ``SPLIT_TERMS``, whatever C is, where BLAS does not do so by itself."""
    terms = weights.shape[2]
    if terms <= SPLIT_TERMS or weights.device.type != "cpu" or _adds_in_runs():
        return torch.bmm(weights, values)
    last = (terms - 1) // SPLIT_TERMS * SPLIT_TERMS
    bounds = [*range(0, last + 1, SPLIT_TERMS if len(weights) == 1 else last), terms]
    out = torch.bmm(weights[..., : bounds[1]], values[:, : bounds[1]])
    for start, stop in pairwise(bounds[1:]):
        out.baddbmm_(weights[..., start:stop], values[:, start:stop])
    return out


@cache
def _adds_in_runs() -> bool:
    """Return whether a sum of more than ``SPLIT_TERMS`` terms has the bits of its runs, added in order."""
    with _disable_current_modes():  # real tensors, where the caller's are fake, counted or recorded
        terms = torch.arange(2 * (SPLIT_TERMS + COLUMNS), dtype=torch.float32, device="cpu").view(2, -1)
        weights = terms.add(0.1).sin()[:, None].expand(2, FEW_ROWS, -1).contiguous()
        values = terms.add(0.1).cos()[..., None].repeat(1, 1, COLUMNS)
        runs = torch.bmm(weights[..., :SPLIT_TERMS], values[:, :SPLIT_TERMS])
        runs.baddbmm_(weights[..., SPLIT_TERMS:], values[:, SPLIT_TERMS:])
        return torch.equal(torch.bmm(weights, values), runs)
