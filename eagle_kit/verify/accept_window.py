"""Sampling of the target's tokens after the nodes of a window, and acceptance of the drafts.

A node's token is sampled with the uniform random number of its position, so the nodes of one depth share a
number; at most one of them is on the accepted path. With a deterministic draft the text is therefore the text
of plain decoding with the same seed.

Legend: B requests, N window nodes, S draft steps, V vocabulary.
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


def sample_after_nodes(
    logits: torch.Tensor,
    tree: Tree,
    seq_lens: torch.Tensor,
    sampling: SamplingBatch | None,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample a token after every node.

    Args:
        logits: ``[B, N, V]``, the target's logits.
        tree: the window; the penalties after a node depend on the tokens on its path.
        seq_lens: int64 ``[B]``, position of the root.
        sampling: sampling parameters; None selects the most likely token after every node.
        allowed: bool ``[B, N, V]``, tokens that a grammar allows, at least one after each node; None for all.

    Returns:
        Tokens int64 ``[B, N]``.
    """
    # Greedy decoding.
    if sampling is None:
        return _masked(logits, allowed).argmax(-1)

    # Sampling. The token after a node has the position after that node.
    positions = seq_lens[:, None] + 1 + tree.depths
    uniforms = position_uniforms(sampling.seeds, positions, TARGET_UNIFORMS)
    distribution = distribution_of(logits, tree, sampling, allowed)
    return sample(distribution, uniforms)


def accept_window(
    logits: torch.Tensor,
    window: DraftOutput,
    verifier: Verifier,
    seq_lens: torch.Tensor,
    sampling: SamplingBatch | None,
    allowed: torch.Tensor | None,
    steps: int,
) -> Accepted:
    """Accept drafts and sample the bonus token of each request.

    Args:
        logits: ``[B, N, V]``, the target's logits.
        window: the window and its proposal.
        verifier: a verifier that is sound for the proposal; not used for greedy decoding.
        seq_lens: int64 ``[B]``, position of the root.
        sampling: sampling parameters; None for greedy decoding of all requests.
        allowed: bool ``[B, N, V]``, tokens that a grammar allows, at least one after each node; None for all.
        steps: S, depth of the window.
    """
    tree, proposal = window

    # Greedy decoding: follow the most likely tokens.
    if sampling is None:
        assert isinstance(proposal, Deterministic), "a draft of greedy requests is deterministic"
        return accept_most_likely(_masked(logits, allowed), tree.tokens, tree.parents, steps)

    # Sampling: the verifier compares the proposal with the target's distribution.
    distribution = distribution_of(logits, tree, sampling, allowed)
    return accept(distribution, window, verifier, sampling.seeds, seq_lens, steps)


def distribution_of(
    logits: torch.Tensor, tree: Tree, sampling: SamplingBatch, allowed: torch.Tensor | None
) -> torch.Tensor | FilteredLogits:
    """Sampling distribution of the target after every node; arguments as in :func:`sample_after_nodes`.

    Penalties and bias are applied first, then the grammar, then temperature and filters.
    """
    is_adjusted = sampling.counts is not None or sampling.bias is not None
    if is_adjusted:
        logits = adjust_logits(logits.float(), sampling, tree.tokens, tree.ancestors)
    return target_distribution(_masked(logits, allowed), sampling)


def _masked(logits: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    """``logits`` with -inf for tokens that are not allowed."""
    if allowed is None:
        return logits
    return logits.masked_fill(~allowed, float("-inf"))
