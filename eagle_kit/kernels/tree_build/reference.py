"""From recorded draft candidates to the window that is verified (EAGLE-2's rerank, arXiv 2406.16858).

Legend: B requests, S steps, K top-k, N nodes with the root. Candidates are numbered in the order they were
drafted: 0..K-1 at depth 1, then K * K at every further depth.
"""

from typing import NamedTuple

import torch

from eagle_kit.core.shape import SpecShape
from eagle_kit.kernels.window_attention import ancestor_bits, chain_bits


class Tree(NamedTuple):
    """A window to verify: ``tokens`` target ids, ``parents`` window indices (the root's is 0), ``depths``,
    and ``ancestors`` as bits; int64 ``[B, N]`` each, the root first and parents before their children.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor


def top_scores(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices ``[B, count]`` of the largest ``scores [B, n]``, best first, equal ones in the order of their
    index.

    A child's score never exceeds its parent's and its index is larger, so a set of best candidates always
    holds the parents of its members, also when probabilities round to 1.
    """
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def chain_build(roots: torch.Tensor, tokens: torch.Tensor) -> Tree:
    """The window of a chain, which keeps every candidate: ``roots`` int64 ``[B]``, ``tokens`` ``[B, S]``."""
    b, steps = tokens.shape
    depths = torch.arange(steps + 1, device=roots.device).expand(b, steps + 1)
    bits = chain_bits(steps + 1, roots.device).expand(b, steps + 1)
    return Tree(torch.cat((roots[:, None], tokens), 1), (depths - 1).clamp(min=0), depths, bits)


def tree_build(
    roots: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor, parents: torch.Tensor, shape: SpecShape
) -> Tree:
    """Keep the best N - 1 candidates.

    Args:
        roots: int64 ``[B]``, the last emitted token of each request.
        tokens: int64 ``[B, n]``, target ids of all candidates, n = K + (S - 1) K^2.
        scores: ``[B, n]``, log-probability of the path to each.
        parents: int64 ``[B, n]``, candidate number of each one's parent, -1 at depth 1.
    """
    chosen = top_scores(scores, shape.tokens - 1).sort(1).values
    chosen_parents = parents.gather(1, chosen)
    at = torch.searchsorted(chosen, chosen_parents.clamp(min=0)) + 1
    root = roots[:, None]
    zero = torch.zeros_like(root)
    window_parents = torch.cat((zero, torch.where(chosen_parents < 0, 0, at)), 1)
    depth = torch.where(chosen < shape.topk, 1, 2 + (chosen - shape.topk) // shape.topk**2)
    return Tree(
        tokens=torch.cat((root, tokens.gather(1, chosen)), 1),
        parents=window_parents,
        depths=torch.cat((zero, depth), 1),
        ancestors=ancestor_bits(window_parents, shape.steps),
    )
