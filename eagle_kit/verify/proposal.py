"""Types of proposals: a window of drafted tokens, and how they were made.

A deterministic draft is a function of the text. Its tokens were not sampled, so it has no distribution q, and
rejection sampling with a softmax in place of q would change the distribution of the text. A sampled draft was
sampled from q and carries q. ``verify.verifiers.accept`` refuses a verifier that does not fit the type.

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
    """Chain of sampled tokens.

    Attributes:
        q: ``[B, S, V]``, the distribution that the child of each node was sampled from.
    """

    q: torch.Tensor


@dataclass(frozen=True, eq=False)
class SampledTree:
    """Tree of a fixed topology, whose siblings were sampled without replacement (``sample_distinct``).

    Siblings lie in the window in the order in which they were drawn.

    Attributes:
        q: ``[B, Q, V]``, the distribution that the children of each of the first Q nodes were sampled from.
            Later nodes have no children.
    """

    q: torch.Tensor


Proposal = Deterministic | SampledChain | SampledTree


class DraftOutput(NamedTuple):
    """A window to verify, and how its tokens were made."""

    tree: Tree
    proposal: Proposal
