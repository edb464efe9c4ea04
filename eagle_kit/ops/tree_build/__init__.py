"""Expansion of a draft tree, and its reranking to the window to verify (EAGLE-2, arXiv 2406.16858).

``reference.py`` has the algorithm with its phases. ``masks.py`` makes the tree masks of other engines from
ancestor bits.

Legend: B requests, S steps, K top-k, N nodes with the root, n = K + (S - 1) K^2 candidates.
"""

from typing import Any

import torch

from eagle_kit.core.shape import SpecShape
from eagle_kit.ops.backend import Backend, uses_triton
from eagle_kit.ops.tree_build import reference
from eagle_kit.ops.tree_build.reference import Beam, Candidates, Tree, top_scores

__all__ = [
    "Beam",
    "Candidates",
    "Tree",
    "chain_build",
    "grow_beam",
    "start_beam",
    "top_scores",
    "tree_build",
]


def start_beam(
    tokens: torch.Tensor, scores: torch.Tensor, shape: SpecShape, *, backend: Backend | None = None
) -> tuple[Beam, Candidates]:
    """Make the first beam, and the record of all candidates, whose later depths :func:`grow_beam` fills.

    Args:
        tokens: int64 ``[B, K]``, candidates of depth 1.
        scores: fp32 ``[B, K]``, their log-probabilities.
        shape: S, K and N.
    """
    return _implementation(scores, backend).start_beam(tokens.contiguous(), scores.contiguous(), shape)


def grow_beam(
    beam: Beam,
    candidates: Candidates,
    next_tokens: torch.Tensor,
    next_scores: torch.Tensor,
    step: int,
    *,
    backend: Backend | None = None,
) -> Beam:
    """Expansion: keep the K best of the K^2 children that draft step ``step`` proposed, the earlier among
    equals.

    Args:
        beam: the nodes of depth ``step``, as returned by :func:`start_beam` or the step before.
        candidates: record that the children are written into.
        next_tokens: int64 ``[B * K, K]``, target ids of each node's children.
        next_scores: fp32 ``[B * K, K]``, their log-probabilities given their parents.
        step: from 1 to S - 1.
    """
    return _implementation(next_scores, backend).grow_beam(
        beam, candidates, next_tokens.contiguous(), next_scores.contiguous(), step
    )


def tree_build(
    roots: torch.Tensor,
    tokens: torch.Tensor,
    scores: torch.Tensor,
    parents: torch.Tensor,
    shape: SpecShape,
    *,
    backend: Backend | None = None,
) -> Tree:
    """Reranking: keep the best N - 1 candidates, the earlier among equals.

    Args:
        roots: int64 ``[B]``, the last emitted token of each request.
        tokens: int64 ``[B, n]``, target ids of all candidates.
        scores: fp32 ``[B, n]``, log-probability of the path to each.
        parents: int64 ``[B, n]``, candidate index of each one's parent, -1 at depth 1.
    """
    return _implementation(scores, backend).tree_build(
        roots, tokens.contiguous(), scores.contiguous(), parents.contiguous(), shape
    )


def chain_build(roots: torch.Tensor, tokens: torch.Tensor, *, backend: Backend | None = None) -> Tree:
    """The window of a chain, which keeps every candidate: ``roots`` int64 ``[B]``, ``tokens`` ``[B, S]``."""
    return _implementation(tokens, backend).chain_build(roots, tokens.contiguous())


def _implementation(tensor: torch.Tensor, backend: Backend | None) -> Any:
    """Module that implements the operations for ``tensor``."""
    if uses_triton("tree_build", tensor, backend):
        from eagle_kit.ops.tree_build import triton

        return triton
    return reference
