"""Types of proposals: a window of drafted tokens, and how they were made.

A deterministic draft is a function of the text: its tokens were not sampled, so it has no q, and dividing by
a softmax in its place would emit another distribution than the target's. A sampled draft was sampled from q
and carries q. The types keep them apart: ``verify.verifiers.accept`` refuses a verifier that does not fit.

Legend: B requests, N window nodes, S steps, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from eagle_kit.ops.tree_build import Tree


@dataclass(frozen=True)
class Deterministic:
    """Proposal of any topology that depends on the text only: top-k drafts, n-grams."""


@dataclass(frozen=True, eq=False)
class SampledChain:
    """Chain of sampled tokens; ``q [B, S, V]`` is the distribution that the child of each node was sampled
    from."""

    q: torch.Tensor


@dataclass(frozen=True, eq=False)
class SampledTree:
    """Tree of a fixed topology, whose siblings were sampled without replacement and lie in the window in that
    order (``sample_distinct`` draws them); ``q [B, Q, V]`` is the distribution that the children of each of
    the first Q nodes were sampled from, nodes from Q on have none."""

    q: torch.Tensor


Proposal = Deterministic | SampledChain | SampledTree


class DraftOutput(NamedTuple):
    """A window to verify, and how its tokens were made."""

    tree: Tree
    proposal: Proposal
