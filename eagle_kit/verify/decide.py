"""Sampling and verification: the target's next token after every node of a window.

A node's token is sampled with the uniform random number of its position. All nodes of one depth share a
number, and only one of them is on the path. A deterministic draft is accepted as far as it agrees with these
tokens, so the text is the one that plain decoding draws with the same seed.

Legend: B requests, N window nodes, V vocabulary.
"""

import torch

from eagle_kit.ops.accept import Accepted, accept_most_likely
from eagle_kit.ops.sampling import (
    TARGET_UNIFORMS,
    FilteredLogits,
    SamplingBatch,
    adjust_logits,
    position_uniforms,
    sample,
    target_distribution,
)
from eagle_kit.ops.tree_build import Tree
from eagle_kit.verify.proposal import Deterministic, DraftOutput
from eagle_kit.verify.verifiers import Verifier, accept


def choose(
    logits: torch.Tensor,
    tree: Tree,
    seq_lens: torch.Tensor,
    sampling: SamplingBatch | None,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample a token after every node: ``logits [B, N, V]`` -> int64 ``[B, N]``.

    Args:
        tree: the window; a token's penalties depend on the path to its node.
        seq_lens: int64 ``[B]``, position of the root.
        sampling: None takes the most likely token everywhere.
        allowed: bool ``[B, N, V]``, the tokens that a grammar allows; at least one per node.
    """
    if sampling is None:
        return _masked(logits, allowed).argmax(-1)
    positions = seq_lens[:, None] + 1 + tree.depths
    uniforms = position_uniforms(sampling.seeds, positions, TARGET_UNIFORMS)
    return sample(distribution_of(logits, tree, sampling, allowed), uniforms)


def decide(
    logits: torch.Tensor,
    window: DraftOutput,
    verifier: Verifier,
    seq_lens: torch.Tensor,
    sampling: SamplingBatch | None,
    allowed: torch.Tensor | None,
    steps: int,
) -> Accepted:
    """Accept a path of the window and sample the bonus token.

    Args:
        logits: ``[B, N, V]``, the target's logits after each node.
        window: the tree, and how it was made.
        verifier: verifier of requests that sample.
        seq_lens, sampling, allowed: see :func:`choose`.
        steps: S, depth of the window.
    """
    tree, proposal = window
    if sampling is None:
        assert isinstance(proposal, Deterministic), "a draft of greedy requests is deterministic"
        return accept_most_likely(_masked(logits, allowed), tree.tokens, tree.parents, steps)
    distribution = distribution_of(logits, tree, sampling, allowed)
    return accept(distribution, window, verifier, sampling.seeds, seq_lens, steps)


def distribution_of(
    logits: torch.Tensor, tree: Tree, sampling: SamplingBatch, allowed: torch.Tensor | None
) -> torch.Tensor | FilteredLogits:
    """Return the target's distribution after every node.

    It has the penalties, biases, grammar, temperature and filters of each request.
    """
    if sampling.counts is not None or sampling.bias is not None:
        logits = adjust_logits(logits.float(), sampling, tree.tokens, tree.ancestors)
    return target_distribution(_masked(logits, allowed), sampling)


def _masked(logits: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    return logits if allowed is None else logits.masked_fill(~allowed, float("-inf"))
