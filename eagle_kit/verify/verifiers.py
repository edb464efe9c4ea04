"""Verifiers, and the selection of the kernel that accepts a window.

The modules of ``ops/accept`` contain the arithmetic and its proofs.

Legend: B requests, N window nodes, S draft steps, V vocabulary.
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
    """Accept a deterministic draft token if the target samples the same token; lossless.

    Every token is accepted with the same probability as by the rule of EAGLE's code for top-k drafts, which
    tries the siblings in turn with q = 1 and renormalises p after each rejection.
    """


@dataclass(frozen=True)
class RejectionSampling:
    """Accept a sampled token with probability min(1, p / q) (arXiv 2211.17192); lossless."""


@dataclass(frozen=True)
class BlockVerification:
    """Accept a prefix of a sampled chain as a whole (arXiv 2403.10444); lossless.

    The expected number of accepted tokens is at least that of :class:`RejectionSampling`.
    """


@dataclass(frozen=True)
class Relaxed:
    """Accept a deterministic draft token by thresholds on its probability (``accept_relaxed``).

    LOSSY, unless both thresholds are 1.

    Attributes:
        threshold_single: probability in [0, 1] from which a token is always accepted.
        threshold_acc: number in [0, 1] by which the summed probability of tried siblings is divided.
    """

    threshold_single: float
    threshold_acc: float


Verifier = TargetOnly | RejectionSampling | BlockVerification | Relaxed


def make_verifier(config: EngineConfig) -> Verifier | None:
    """Make the verifier that the config names; None if the drafter chooses it."""
    name = config.verifier
    if name is None and config.is_relaxed:
        name = "relaxed"
    match name:
        case "target-only":
            return TargetOnly()
        case "relaxed":
            return Relaxed(config.accept_threshold_single, config.accept_threshold_acc)
        case "rejection":
            return RejectionSampling()
        case "block":
            return BlockVerification()
        case None:
            return None


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
    """Verify a window with uniform random numbers that depend on the seed and position of a request only.

    The numbers of target-only verification belong to the position of the sampled token, so the text does not
    depend on the draft. The numbers of the other verifiers belong to the position of the root. Each cycle has
    another root, so a number of a rejected draft is never used again.

    Args:
        probs: ``[B, N, V]`` or a ``FilteredLogits``, the target's distribution after each node.
        window: the window and its proposal.
        verifier: rule of acceptance.
        seeds: int64 ``[B]``.
        root_positions: int64 ``[B]``, position of the root of each window.
        steps: S, depth of the window.
        backend: implementation of the kernels; None for the default of the device.

    Raises:
        TypeError: the verifier is not sound for the type of the proposal.
    """
    tree, proposal = window

    # Target-only verification: a uniform for the position after each depth.
    if isinstance(proposal, Deterministic) and isinstance(verifier, TargetOnly):
        depths = torch.arange(steps + 1, device=tree.tokens.device)
        positions = root_positions[:, None] + 1 + depths
        uniforms = position_uniforms(seeds, positions, TARGET_UNIFORMS, backend=backend)
        return accept_target_only(
            probs, tree.tokens, tree.parents, tree.depths, uniforms, steps, backend=backend
        )

    # Other verifiers: a uniform for each node and one for the bonus token.
    num_nodes = tree.tokens.shape[1]
    uniforms = window_uniforms(seeds, root_positions, num_nodes + 1, VERIFY_UNIFORMS, backend=backend)
    nodes = uniforms[:, :num_nodes]
    drafts = nodes[:, 1:]  # the root was not drafted
    bonus = uniforms[:, num_nodes]
    match proposal, verifier:
        case Deterministic(), Relaxed(threshold_single, threshold_acc):
            # The kernel reads one uniform for each depth. There are no more depths than nodes.
            return accept_relaxed(
                probs,
                tree.tokens,
                tree.parents,
                nodes,
                bonus,
                steps,
                threshold_single,
                threshold_acc,
                backend=backend,
            )
        case SampledChain(q), RejectionSampling():
            return accept_rejection_chain(probs, q, tree.tokens, drafts, bonus, backend=backend)
        case SampledChain(q), BlockVerification():
            return accept_block(probs, q, tree.tokens, drafts, bonus, backend=backend)
        case SampledTree(q), RejectionSampling():
            return accept_rejection_tree(
                probs, q, tree.tokens, tree.parents, nodes, bonus, steps, backend=backend
            )
    raise TypeError(
        f"{type(verifier).__name__} is not sound for {type(proposal).__name__} drafts. Use "
        "TargetOnly or Relaxed for Deterministic, RejectionSampling or BlockVerification for SampledChain, "
        "RejectionSampling for SampledTree."
    )
