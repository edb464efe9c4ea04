"""Verifiers, and the choice of the kernel that accepts a window: see ``ops/accept`` for the arithmetic.

Legend: B requests, N window nodes, S steps, V vocabulary.
"""

from dataclasses import dataclass

import torch

from eagle_kit.config.engine import EngineConfig
from eagle_kit.ops.accept.block import accept_block
from eagle_kit.ops.accept.rejection import accept_rejection_chain, accept_rejection_tree
from eagle_kit.ops.accept.relaxed import accept_relaxed
from eagle_kit.ops.accept.target_only import accept_target_only
from eagle_kit.ops.accept.types import Accepted
from eagle_kit.ops.backend import Backend
from eagle_kit.ops.sampling import (
    TARGET_UNIFORMS,
    VERIFY_UNIFORMS,
    FilteredLogits,
    position_uniforms,
    window_uniforms,
)
from eagle_kit.verify.proposal import Deterministic, DraftOutput, SampledChain, SampledTree


@dataclass(frozen=True)
class TargetOnly:
    """Accept deterministic drafts while the target samples the same token; lossless."""


@dataclass(frozen=True)
class RejectionSampling:
    """Accept sampled tokens with probability min(1, p / q); lossless."""


@dataclass(frozen=True)
class BlockVerification:
    """Weigh prefixes of a sampled chain (arXiv 2403.10444); lossless, accepts no fewer than rejection."""


@dataclass(frozen=True)
class Relaxed:
    """LOSSY thresholds for deterministic drafts, see ``accept_relaxed``; lossless if both are 1."""

    threshold_single: float
    threshold_acc: float


Verifier = TargetOnly | RejectionSampling | BlockVerification | Relaxed


def make_verifier(config: EngineConfig) -> Verifier | None:
    """Make the verifier that the options ask for; None leaves the choice to the drafter."""
    name = config.verifier or ("relaxed" if config.is_relaxed else None)
    if name == "relaxed":
        return Relaxed(config.accept_threshold_single, config.accept_threshold_acc)
    return {
        "target-only": TargetOnly(),
        "rejection": RejectionSampling(),
        "block": BlockVerification(),
        None: None,
    }[name]


def accept(
    probs: torch.Tensor | FilteredLogits,
    window: DraftOutput,
    verifier: Verifier,
    seeds: torch.Tensor,
    root_positions: torch.Tensor,
    steps: int,
    *,
    backend: Backend | None = None,
) -> Accepted:
    """Verify a window with uniform random numbers that depend only on each request's seed and position.

    Target-only verification uses the number of the decided token's position, so the text does not depend on
    the draft. Other verifiers use numbers of the root's position. It grows from cycle to cycle, so a number
    that was drawn for a rejected draft is not used again.

    Args:
        probs: ``[B, N, V]`` or a ``FilteredLogits``, the target's distribution after each node.
        window: the tree, and how it was made.
        verifier: a verifier that is sound for the proposal.
        seeds: int64 ``[B]``, seeds of the requests.
        root_positions: int64 ``[B]``, positions of the roots.
        steps: S, depth of the window.

    Raises:
        TypeError: the verifier is not sound for the type of the proposal.
    """
    tree, proposal = window
    n = tree.tokens.shape[1]
    if isinstance(proposal, Deterministic) and isinstance(verifier, TargetOnly):
        positions = root_positions[:, None] + 1 + torch.arange(steps + 1, device=tree.tokens.device)
        uniforms = position_uniforms(seeds, positions, TARGET_UNIFORMS, backend=backend)
        return accept_target_only(
            probs, tree.tokens, tree.parents, tree.depths, uniforms, steps, backend=backend
        )
    uniforms = window_uniforms(seeds, root_positions, n + 1, VERIFY_UNIFORMS, backend=backend)
    nodes, bonus = uniforms[:, :n], uniforms[:, n]
    match proposal, verifier:
        case Deterministic(), Relaxed(single, acc):
            # One uniform per depth; there are no more depths than nodes.
            return accept_relaxed(
                probs, tree.tokens, tree.parents, nodes, bonus, steps, single, acc, backend=backend
            )
        case SampledChain(q), RejectionSampling():
            return accept_rejection_chain(probs, q, tree.tokens, nodes[:, 1:], bonus, backend=backend)
        case SampledChain(q), BlockVerification():
            return accept_block(probs, q, tree.tokens, nodes[:, 1:], bonus, backend=backend)
        case SampledTree(q), RejectionSampling():
            return accept_rejection_tree(
                probs, q, tree.tokens, tree.parents, nodes, bonus, steps, backend=backend
            )
    raise TypeError(
        f"{type(verifier).__name__} is not sound for {type(proposal).__name__} drafts. Use "
        "TargetOnly or Relaxed for Deterministic, RejectionSampling or BlockVerification for SampledChain, "
        "RejectionSampling for SampledTree."
    )
