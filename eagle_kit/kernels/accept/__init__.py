"""Verification: which drafts are kept and which token follows them.

Deterministic drafts: ``accept_greedy``, ``accept_most_likely``, ``accept_target_only``, and LOSSY
``accept_relaxed``. Sampled drafts: ``accept_rejection_chain``, ``accept_rejection_tree``, ``accept_block``.
``accept`` draws the coins and refuses a verifier that does not fit the law of the draft.
"""

from eagle_kit.kernels.accept.block import accept_block
from eagle_kit.kernels.accept.proposal import (
    Block,
    Deterministic,
    Proposal,
    Rejection,
    Relaxed,
    SampledChain,
    SampledTree,
    TargetOnly,
    Verifier,
    accept,
    check_distinct_siblings,
    default_verifier,
)
from eagle_kit.kernels.accept.reference import Accepted, accept_greedy, accept_most_likely
from eagle_kit.kernels.accept.rejection import accept_rejection_chain, accept_rejection_tree
from eagle_kit.kernels.accept.relaxed import accept_relaxed
from eagle_kit.kernels.accept.target_only import accept_target_only

__all__ = [
    "Accepted",
    "Block",
    "Deterministic",
    "Proposal",
    "Rejection",
    "Relaxed",
    "SampledChain",
    "SampledTree",
    "TargetOnly",
    "Verifier",
    "accept",
    "accept_block",
    "accept_greedy",
    "accept_most_likely",
    "accept_rejection_chain",
    "accept_rejection_tree",
    "accept_relaxed",
    "accept_target_only",
    "check_distinct_siblings",
    "default_verifier",
]
