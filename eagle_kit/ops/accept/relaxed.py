"""LOSSY verification by acceptance thresholds, as in SGLang: accepts more drafts than the target's
distribution allows.

Legend: B requests, N window nodes, S steps, V vocabulary.
"""

import torch

from eagle_kit.ops.accept.rejection import node_rows, step_to, tree_accepted, weights_or
from eagle_kit.ops.accept.types import Accepted
from eagle_kit.ops.backend import Backend, uses_triton
from eagle_kit.ops.sampling import FilteredLogits, distribution_parts, probabilities, sample

LEAST_THRESHOLD = 1e-9
"""Smallest divisor in place of a threshold of 0, as in SGLang."""


def accept_relaxed(
    probs: torch.Tensor | FilteredLogits,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    uniforms: torch.Tensor,
    bonus_uniforms: torch.Tensor,
    steps: int,
    threshold_single: float,
    threshold_acc: float,
    *,
    backend: Backend | None = None,
) -> Accepted:
    """Accept a child by two thresholds on its probability. LOSSY below thresholds of 1: the text no longer
    follows the target's distribution but leans towards the draft's proposals.

    At a node with distribution p and uniform u, children are tried in window order; x is accepted if p(x) >=
    ``threshold_single``, or if u < (the sum of p over x and the siblings tried before it) /
    ``threshold_acc``. If none is accepted, the bonus token is sampled from p without them, using
    ``bonus_uniforms``.

    With both thresholds 1 this is lossless: x is accepted with probability exactly p(x), and the bonus token
    is sampled from the remainder. It then uses two uniforms where ``accept_target_only`` uses one, so it
    emits the same distribution but not the same text.

    SGLang compares ``u <=``; here it is ``<`` with p(x) > 0, so that neither u = 0 nor a threshold of 0 emits
    a token that a filter or a grammar excludes. A repeated sibling is never accepted, since its probability
    was already counted. Source: SGLang, ``speculative_sampling.cuh``, read in 2026.

    Args:
        probs: ``[B, N, V]`` or a ``FilteredLogits``, the target's distribution after each node.
        tokens, parents: int64 ``[B, N]``, the window of a deterministic draft; -1 is an unused node.
        uniforms: ``[B, S + 1]`` in [0, 1), one per depth.
        bonus_uniforms: ``[B]`` in [0, 1), for the bonus token.
        steps: S, depth of the window.
        threshold_single, threshold_acc: 0..1.

    Raises:
        ValueError: when a threshold is not in 0..1.
    """
    for name, value in (("threshold_single", threshold_single), ("threshold_acc", threshold_acc)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is {value}. Give a number from 0 to 1; 1 is lossless.")
    least_acc = max(threshold_acc, LEAST_THRESHOLD)
    if uses_triton("accept", tokens, backend):
        from eagle_kit.ops.accept import triton

        accepted = triton.accept_stochastic(
            distribution_parts(probs),
            None,
            tokens.contiguous(),
            parents.contiguous(),
            uniforms.contiguous(),
            bonus_uniforms.contiguous(),
            steps,
            threshold_single,
            least_acc,
        )
        return Accepted(*accepted)
    probs = probabilities(probs)
    node = torch.zeros_like(parents[:, :1])
    path = node.expand(-1, steps + 1)
    num_accepted = node
    p = probs[:, 0].double()  # at the current node, without its rejected children
    tried_mass = torch.zeros_like(p[:, :1])
    for j in range(1, tokens.shape[1]):
        # Node j is tried if it is a child of the current node.
        token = tokens[:, j : j + 1]
        id = token.clamp(min=0)
        p_x = p.gather(1, id)
        is_tried = (parents[:, j : j + 1] == node) & (token >= 0)
        mass = tried_mass + p_x
        uniform = uniforms.gather(1, num_accepted)
        passes = (uniform < mass / least_acc) | (p_x >= threshold_single)
        is_accepted = is_tried & passes & (p_x > 0)
        is_rejected = is_tried & ~is_accepted

        # A rejected token is excluded; after an acceptance node j is the current one.
        p = torch.where(is_rejected, p.scatter(1, id, 0.0), p)
        p = torch.where(is_accepted, probs[:, j], p)
        tried_mass = torch.where(is_rejected, mass, tried_mass)
        tried_mass = torch.where(is_accepted, 0.0, tried_mass)
        node, num_accepted, path = step_to(j, is_accepted, node, num_accepted, path)

    # The bonus token. Where no probability is left, the thresholds had rejected all tokens: sample from p.
    weights = weights_or(p, node_rows(probs, node[:, 0]).double())
    bonus = sample(weights, bonus_uniforms, backend="reference")
    return tree_accepted(tokens, path, num_accepted[:, 0], bonus)
