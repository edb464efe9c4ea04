"""Verification of deterministic drafts: sample from the target at every node, accept drafts that equal the
sample.

Lossless for any tree that does not depend on the uniform random numbers: the tree only determines how many of
the target's samples are already known. As a sample depends only on the distribution and on the uniform of its
position, text with speculation equals text without, token for token. A temperature of zero is a one-hot
distribution, for which this is greedy verification.

Legend: B requests, N window nodes, S steps, V vocabulary.
"""

import torch

from eagle_kit.ops.accept.greedy import accept_greedy
from eagle_kit.ops.accept.types import Accepted
from eagle_kit.ops.backend import Backend, uses_triton
from eagle_kit.ops.sampling import FilteredLogits, distribution_parts, probabilities, sample


def accept_target_only(
    probs: torch.Tensor | FilteredLogits,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    uniforms: torch.Tensor,
    steps: int,
    *,
    backend: Backend | None = None,
) -> Accepted:
    """Sample the target's token at every node and walk to the child that equals it.

    Nodes of one depth share a uniform; only one of them is on the path. Children are matched by token, so
    their order and repeated siblings have no effect.

    Args:
        probs: ``[B, N, V]`` or a ``FilteredLogits``, the target's distribution after each node.
        tokens, parents, depths: int64 ``[B, N]``, the window.
        uniforms: ``[B, S + 1]`` in [0, 1), for the tokens that follow nodes of depth 0..S.
        steps: S, depth of the window.
    """
    if uses_triton("accept", tokens, backend):
        from eagle_kit.ops.accept import triton

        accepted = triton.accept_target_only(
            distribution_parts(probs), tokens.contiguous(), parents.contiguous(), uniforms.contiguous(), steps
        )
        return Accepted(*accepted)
    sampled = sample(probabilities(probs), uniforms.gather(1, depths), backend="reference")
    return accept_greedy(sampled, tokens, parents, steps)
