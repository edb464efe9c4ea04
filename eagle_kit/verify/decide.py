"""Sampling and verification: the target's next token after every node of a window.

A node's token is sampled with the uniform random number of its position, so all nodes of one depth share a
number; only one of them is on the path. A deterministic draft is then followed as far as it agrees: whatever
was drafted, the text is the one that plain decoding draws with the same seed.

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
    """Accept drafts and sample the bonus token; arguments as of :func:`choose` and ``kernels.accept``."""
    tree, proposal = window
    if sampling is None:
        assert isinstance(proposal, Deterministic), "a draft of greedy requests is deterministic"
        return accept_most_likely(_masked(logits, allowed), tree.tokens, tree.parents, steps)
    distribution = distribution_of(logits, tree, sampling, allowed)
    return accept(distribution, window, verifier, sampling.seeds, seq_lens, steps)


def distribution_of(
    logits: torch.Tensor, tree: Tree, sampling: SamplingBatch, allowed: torch.Tensor | None
) -> torch.Tensor | FilteredLogits:
    """Sampling distribution after every node: penalties, bias, grammar, temperature, filters."""
    if sampling.counts is not None or sampling.bias is not None:
        logits = adjust_logits(logits.float(), sampling, tree.tokens, tree.ancestors)
    return target_distribution(_masked(logits, allowed), sampling)


def _masked(logits: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    return logits if allowed is None else logits.masked_fill(~allowed, float("-inf"))
