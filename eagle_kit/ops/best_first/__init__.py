"""Tree of the most likely paths through the candidates of a draft that makes all depths in one pass.

P-EAGLE, DFlash, DSpark and MTP drafts call it, in one launch. The tree of a draft that grows step by step
(EAGLE-2) is :mod:`eagle_kit.ops.tree_build`.

Legend: B requests, S depths, K candidates of a depth, P 1 or K, N nodes of the window with the root.
"""

from typing import Any

import torch

from eagle_kit.core.shape import SpecShape
from eagle_kit.ops.backend import Backend, uses_triton
from eagle_kit.ops.best_first import reference
from eagle_kit.ops.tree_build import Tree


def best_first(
    roots: torch.Tensor,
    tokens: torch.Tensor,
    scores: torch.Tensor,
    shape: SpecShape,
    *,
    backend: Backend | None = None,
) -> Tree:
    """Select the N - 1 most likely nodes of all K^S paths, one by one: the best whose parent is in
    the window. Nodes lie in the order of their probability; among equals the child of the earlier parent
    comes first, and of one parent the earlier candidate.

    Every node may be extended by every candidate of the next depth, which costs no forward, so no beam limits
    how many are (EAGLE-2 extends K a depth).

    Args:
        roots: int64 ``[B]``, the last emitted token of each request.
        tokens: int64 ``[B, S, K]``, target ids of the candidates of each depth.
        scores: fp32 ``[B, S, P, K]``, log-probability of each candidate given that of the depth before: P is
            1 where it does not depend on that, or K (a Markov correction). At depth 1 row 0 is read. NaN
            counts as -inf.
        shape: S, K and N.
    """
    assert tokens.shape[1:] == (shape.steps, shape.topk) and scores.shape[2] in (1, shape.topk)
    implementation: Any = reference
    if uses_triton("best_first", scores, backend):
        from eagle_kit.ops.best_first import triton

        implementation = triton
    return implementation.best_first(roots, tokens.contiguous(), scores.contiguous(), shape.tokens)
