"""Verification kernels: accepted draft tokens and the bonus token that follows them.

Deterministic drafts: ``accept_greedy``, ``accept_most_likely``, ``accept_target_only``, and LOSSY
``accept_relaxed``. Sampled drafts: ``accept_rejection_chain``, ``accept_rejection_tree``, ``accept_block``.
``eagle_kit.verify`` chooses among them by the type of the proposal. ``outcome`` computes the state of
requests after an accepted path.
"""

from eagle_kit.ops.accept.block import accept_block
from eagle_kit.ops.accept.greedy import accept_greedy, accept_most_likely, most_likely
from eagle_kit.ops.accept.outcome import Outcome, is_finite, outcome
from eagle_kit.ops.accept.rejection import accept_rejection_chain, accept_rejection_tree
from eagle_kit.ops.accept.relaxed import accept_relaxed
from eagle_kit.ops.accept.target_only import accept_target_only
from eagle_kit.ops.accept.types import Accepted, MostLikely

__all__ = [
    "Accepted",
    "MostLikely",
    "Outcome",
    "accept_block",
    "accept_greedy",
    "accept_most_likely",
    "accept_rejection_chain",
    "accept_rejection_tree",
    "accept_relaxed",
    "accept_target_only",
    "is_finite",
    "most_likely",
    "outcome",
]
