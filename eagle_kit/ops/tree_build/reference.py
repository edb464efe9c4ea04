"""Expansion and reranking of a draft tree (EAGLE-2, arXiv 2406.16858) in torch, the reference of the kernels.

Expansion (section 4.1, :func:`start_beam` and :func:`grow_beam`): every draft step runs the K nodes of the
beam, drafts K children of each, and the K best of these K^2 are the next beam. The value of a node is the
log-probability of the path to it: the sum of the draft's log-probabilities. Reranking (section 4.2,
:func:`tree_build`): of all candidates of all depths the N - 1 of the highest value are verified.

Legend: B requests, S steps, K top-k, N nodes with the root, n = K + (S - 1) K^2 candidates, W words of
ancestor bits. A candidate's index is its place in the order of drafting: 0..K-1 at depth 1, then K^2 at every
further depth.
"""

from typing import NamedTuple

import torch

from eagle_kit.core.shape import SpecShape
from eagle_kit.ops.attention.window import ancestor_bits, chain_bits


class Tree(NamedTuple):
    """A window to verify, int64 ``[B, N]`` each, the root first and parents before their children.

    Attributes:
        tokens: target ids.
        parents: window index of each node's parent; 0 for the root.
        depths: 0 for the root.
        ancestors: bit j of a node is set if node j is its ancestor, or the node itself.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor


class Beam(NamedTuple):
    """The K nodes that a draft step runs, best first; int64 except ``scores``.

    Attributes:
        tokens: ``[B, K]``, target ids.
        scores: fp32 ``[B, K]``, log-probabilities of the paths to them.
        ids: ``[B, K]``, their candidate indices.
        rows: ``[B * K]``, row of each node's features: in the output of the last step, or in the first beam
            in the draft state, one row a request.
        ancestors: ``[B, K, W]``, bits over the scratch window of all beams so far: ancestors, and the node
            itself; key j is bit j % 64 of word j // 64. W words hold the K (S - 1) nodes that are run. Nodes
            of the last depth may have no bit of their own, because they are not run.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    ids: torch.Tensor
    rows: torch.Tensor
    ancestors: torch.Tensor


class Candidates(NamedTuple):
    """All candidates of a draft in the order of drafting, ``[B, n]`` each.

    Attributes:
        tokens: int64, target ids.
        scores: fp32, log-probabilities of the paths to them.
        parents: int64, candidate index of each one's parent; -1 at depth 1.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor


def num_candidates(shape: SpecShape) -> int:
    """Number of candidates n."""
    return shape.topk + (shape.steps - 1) * shape.topk**2


def num_words(shape: SpecShape) -> int:
    """Number of words W of ancestor bits of the nodes that a draft runs."""
    return max(1, -(-shape.num_draft_nodes // 64))


def key_words(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Words with one bit each: ``keys`` int64 ``[K]`` -> int64 ``[K, count]``. A key behind the last word has
    none: nodes of the last depth are not run."""
    word = torch.arange(count, device=keys.device)
    return torch.where((keys // 64)[:, None] == word, (torch.ones_like(keys) << keys % 64)[:, None], 0)


def top_scores(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices ``[B, count]`` of the largest ``scores [B, n]``, best first, equal ones in the order of their
    index; NaN is the smallest, like -inf."""
    scores = scores.nan_to_num(float("-inf"), float("inf"), float("-inf"))
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def start_beam(tokens: torch.Tensor, scores: torch.Tensor, shape: SpecShape) -> tuple[Beam, Candidates]:
    """Make the first beam, and the record of all candidates.

    Args:
        tokens: int64 ``[B, K]``, candidates of depth 1.
        scores: fp32 ``[B, K]``, their log-probabilities.
        shape: S, K and N.
    """
    b, topk = tokens.shape
    device = tokens.device

    # The record of all candidates; later depths are written by grow_beam.
    size = (b, num_candidates(shape))
    candidates = Candidates(tokens.new_empty(size), scores.new_empty(size), tokens.new_empty(size))
    candidates.tokens[:, :topk] = tokens
    candidates.scores[:, :topk] = scores
    candidates.parents[:, :topk].fill_(-1)

    # All of depth 1 are the first beam. Node k is key k of the scratch, and attends to itself.
    keys = torch.arange(topk, device=device)
    rows = torch.arange(b, device=device).repeat_interleave(topk)
    ancestors = key_words(keys, num_words(shape)).expand(b, -1, -1)
    return Beam(tokens, scores, keys.expand(b, topk), rows, ancestors), candidates


def grow_beam(
    beam: Beam, candidates: Candidates, next_tokens: torch.Tensor, next_scores: torch.Tensor, step: int
) -> Beam:
    """Record the K^2 children of a beam, and make the next beam of the K best.

    Args:
        beam: nodes of depth ``step``.
        candidates: record of all candidates; the children are written into it.
        next_tokens: int64 ``[B * K, K]``, children of each node.
        next_scores: fp32 ``[B * K, K]``, their log-probabilities given their parent.
        step: from 1 to S - 1.
    """
    b, topk = beam.tokens.shape

    # Expansion (EAGLE-2, section 4.1): value of a child = value of its parent + its log-probability.
    tokens = next_tokens.view(b, topk**2)
    scores = (beam.scores[:, :, None] + next_scores.view(b, topk, topk)).view(b, topk**2)

    # Record the children for the reranking.
    first = topk + (step - 1) * topk**2
    children = slice(first, first + topk**2)
    candidates.tokens[:, children] = tokens
    candidates.scores[:, children] = scores
    candidates.parents[:, children] = beam.ids.repeat_interleave(topk, 1)

    # The K best are the next beam.
    best = top_scores(scores, topk)  # [B, K], indices among the K^2 children
    parent = best // topk  # [B, K], indices in the beam

    # Node k of the next beam is key ``step * K + k`` of the scratch. It attends to its parent's ancestors and
    # to itself.
    count = beam.ancestors.shape[2]
    of_parent = beam.ancestors.gather(1, parent[:, :, None].expand(-1, -1, count))
    own = key_words(step * topk + torch.arange(topk, device=best.device), count)
    first_row = torch.arange(b, device=best.device)[:, None] * topk
    return Beam(
        tokens=tokens.gather(1, best),
        scores=scores.gather(1, best),
        ids=first + best,
        rows=(first_row + parent).view(-1),
        ancestors=of_parent | own,
    )


def chain_build(roots: torch.Tensor, tokens: torch.Tensor) -> Tree:
    """Make the window of a chain, which keeps every candidate.

    Args:
        roots: int64 ``[B]``.
        tokens: int64 ``[B, S]``.
    """
    b, steps = tokens.shape
    depths = torch.arange(steps + 1, device=roots.device).expand(b, steps + 1)
    bits = chain_bits(steps + 1, roots.device).expand(b, steps + 1)
    return Tree(torch.cat((roots[:, None], tokens), 1), (depths - 1).clamp(min=0), depths, bits)


def tree_build(
    roots: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor, parents: torch.Tensor, shape: SpecShape
) -> Tree:
    """Make the window of the N - 1 candidates of the highest value, and the root.

    The window is a tree: the value of a candidate is first capped at the values of its ancestors, ancestors
    have smaller indices, and among equal values the smaller index is selected. So every ancestor of a
    selected candidate is selected too, even where log-probabilities round to 0 or are NaN.

    Args:
        roots: int64 ``[B]``.
        tokens: int64 ``[B, n]``, target ids of all candidates.
        scores: fp32 ``[B, n]``, log-probabilities of the paths to them.
        parents: int64 ``[B, n]``, candidate index of each one's parent; -1 at depth 1.
        shape: S, K and N.
    """
    # Cap every value at the smallest on its path. After r rounds 2^r - 1 ancestors are included.
    index = torch.arange(parents.shape[1], device=parents.device)
    ancestor = torch.where(parents < 0, index, parents)  # [B, n]; a candidate of depth 1 is its own
    for _ in range((shape.steps - 1).bit_length()):
        scores = torch.minimum(scores, scores.gather(1, ancestor))
        ancestor = ancestor.gather(1, ancestor)

    # Reranking (EAGLE-2, section 4.2): the N - 1 best of all depths, in the order of drafting.
    chosen = top_scores(scores, shape.tokens - 1).sort(1).values  # [B, N - 1], candidate indices

    # Window index of each one's parent; the root is 0.
    chosen_parents = parents.gather(1, chosen)
    parent_index = torch.searchsorted(chosen, chosen_parents.clamp(min=0)) + 1
    root = roots[:, None]
    zero = torch.zeros_like(root)
    window_parents = torch.cat((zero, torch.where(chosen_parents < 0, 0, parent_index)), 1)

    # Depth, by the candidate's index: K candidates at depth 1, K^2 at each further one.
    depth = torch.where(chosen < shape.topk, 1, 2 + (chosen - shape.topk) // shape.topk**2)
    return Tree(
        tokens=torch.cat((root, tokens.gather(1, chosen)), 1),
        parents=window_parents,
        depths=torch.cat((zero, depth), 1),
        ancestors=ancestor_bits(window_parents, shape.steps),
    )
