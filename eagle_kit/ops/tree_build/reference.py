"""Expansion and reranking of a draft tree (EAGLE-2, arXiv 2406.16858) in torch, the reference of the kernels.

Legend: B requests, S steps, K top-k, N nodes with the root, n = K + (S - 1) K^2 candidates. Candidates are
numbered in the order they were drafted: 0..K-1 at depth 1, then K * K at every further depth.
"""

from typing import NamedTuple

import torch

from eagle_kit.core.shape import SpecShape
from eagle_kit.ops.attention.window import ancestor_bits, chain_bits


class Tree(NamedTuple):
    """A window to verify: ``tokens`` target ids, ``parents`` window indices (the root's is 0), ``depths``,
    and ``ancestors`` as bits; int64 ``[B, N]`` each, the root first and parents before their children.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor


class Beam(NamedTuple):
    """The K nodes that a draft step extends, best first; int64 except ``scores``.

    Attributes:
        tokens: ``[B, K]``, target ids.
        scores: fp32 ``[B, K]``, log-probabilities of the paths to them.
        ids: ``[B, K]``, their candidate numbers.
        rows: ``[B * K]``, row of the last step's output that holds each node's features (of the first beam,
            row of the state, one per request).
        ancestors: ``[B, K]``, bits over the scratch window of all beams so far, each node's own included; a
            node beyond bit 63 has no bit of its own.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    ids: torch.Tensor
    rows: torch.Tensor
    ancestors: torch.Tensor


class Candidates(NamedTuple):
    """All candidates of a draft in the order they were drafted, ``[B, n]`` each: target ids ``tokens``
    int64, ``scores`` fp32 of the paths to them, and the candidate numbers of their ``parents`` int64, -1
    at depth 1."""

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor


def num_candidates(shape: SpecShape) -> int:
    """Number of candidates n."""
    return shape.topk + (shape.steps - 1) * shape.topk**2


def top_scores(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices ``[B, count]`` of the largest ``scores [B, n]``, best first, equal ones in the order of their
    index; NaN is the smallest, like -inf."""
    scores = scores.nan_to_num(float("-inf"), float("inf"), float("-inf"))
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def start_beam(tokens: torch.Tensor, scores: torch.Tensor, shape: SpecShape) -> tuple[Beam, Candidates]:
    """First beam and the record of candidates, from ``tokens``, ``scores [B, K]`` of depth 1."""
    b, topk = tokens.shape
    k = torch.arange(topk, device=tokens.device).expand(b, topk)
    rows = torch.arange(b, device=tokens.device).repeat_interleave(topk)
    size = (b, num_candidates(shape))
    candidates = Candidates(tokens.new_empty(size), scores.new_empty(size), tokens.new_empty(size))
    candidates.tokens[:, :topk] = tokens
    candidates.scores[:, :topk] = scores
    candidates.parents[:, :topk] = -1
    return Beam(tokens, scores, k, rows, torch.ones_like(k) << k), candidates


def grow_beam(
    beam: Beam, candidates: Candidates, next_tokens: torch.Tensor, next_scores: torch.Tensor, step: int
) -> Beam:
    """Next beam from ``next_tokens``, ``next_scores [B * K, K]``; the children are recorded."""
    # Record the children.
    b, topk = beam.tokens.shape
    tokens = next_tokens.view(b, topk**2)
    scores = (beam.scores[:, :, None] + next_scores.view(b, topk, topk)).view(b, topk**2)
    first = topk + (step - 1) * topk**2
    children = slice(first, first + topk**2)
    candidates.tokens[:, children] = tokens
    candidates.scores[:, children] = scores
    candidates.parents[:, children] = beam.ids.repeat_interleave(topk, 1)

    # Keep the best of them.
    best = top_scores(scores, topk)
    parent = best // topk
    first_row = torch.arange(b, device=best.device)[:, None] * topk
    key = step * topk + torch.arange(topk, device=best.device)
    own_bit = torch.where(key < 64, torch.ones_like(key) << key.clamp(max=63), 0)
    return Beam(
        tokens=tokens.gather(1, best),
        scores=scores.gather(1, best),
        ids=first + best,
        rows=(first_row + parent).view(-1),
        ancestors=beam.ancestors.gather(1, parent) | own_bit,
    )


def chain_build(roots: torch.Tensor, tokens: torch.Tensor) -> Tree:
    """The window of a chain, which keeps every candidate: ``roots`` int64 ``[B]``, ``tokens`` ``[B, S]``."""
    b, steps = tokens.shape
    depths = torch.arange(steps + 1, device=roots.device).expand(b, steps + 1)
    bits = chain_bits(steps + 1, roots.device).expand(b, steps + 1)
    return Tree(torch.cat((roots[:, None], tokens), 1), (depths - 1).clamp(min=0), depths, bits)


def tree_build(
    roots: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor, parents: torch.Tensor, shape: SpecShape
) -> Tree:
    """Keep the best N - 1 candidates, ``tokens``, ``scores`` and ``parents [B, n]``.

    A candidate counts no more than its ancestors, which have smaller numbers. So those of the best are among
    the best, whatever the scores hold, also when probabilities round to 1.
    """
    # Scores no better than those of all ancestors, by pointer doubling: 1, 3, 7, ... of them are seen.
    number = torch.arange(parents.shape[1], device=parents.device)
    up = torch.where(parents < 0, number, parents)
    for _ in range((shape.steps - 1).bit_length()):
        scores = torch.minimum(scores, scores.gather(1, up))
        up = up.gather(1, up)

    # The best, in the order of their numbers, are the nodes behind the root.
    chosen = top_scores(scores, shape.tokens - 1).sort(1).values
    chosen_parents = parents.gather(1, chosen)
    parent_nodes = torch.searchsorted(chosen, chosen_parents.clamp(min=0)) + 1
    root = roots[:, None]
    zero = torch.zeros_like(root)
    window_parents = torch.cat((zero, torch.where(chosen_parents < 0, 0, parent_nodes)), 1)
    depth = torch.where(chosen < shape.topk, 1, 2 + (chosen - shape.topk) // shape.topk**2)
    return Tree(
        tokens=torch.cat((root, tokens.gather(1, chosen)), 1),
        parents=window_parents,
        depths=torch.cat((zero, depth), 1),
        ancestors=ancestor_bits(window_parents, shape.steps),
    )
