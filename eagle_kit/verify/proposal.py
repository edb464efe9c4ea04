"""Types of proposals: a window of draft tokens, and the distribution that they were sampled from, if any.

A deterministic draft is a function of the text and has no distribution q; verifying it with a softmax as q
would change the distribution of the text. So :func:`eagle_kit.verify.verifiers.accept` refuses a verifier
that is not sound for the type of the proposal.

Legend: B requests, N window nodes, S draft steps, Q nodes with children, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from eagle_kit.ops.tree_build import Tree


@dataclass(frozen=True)
class Deterministic:
    """Proposal of any topology whose tokens depend on the text only, such as top-k drafts and n-grams."""


@dataclass(frozen=True, eq=False)
class SampledChain:
    """Chain of sampled tokens.

    Attributes:
        q: ``[B, S, V]``, distribution that the child of each node was sampled from.
    """

    q: torch.Tensor


@dataclass(frozen=True, eq=False)
class SampledTree:
    """Tree of a fixed topology, whose siblings were sampled without replacement (``sample_distinct``).

    Siblings lie in the window in the order in which they were sampled.

    Attributes:
        q: ``[B, Q, V]``, distribution that the children of each of the first Q nodes were sampled from. The
            other nodes have no children.
    """

    q: torch.Tensor


Proposal = Deterministic | SampledChain | SampledTree


class DraftOutput(NamedTuple):
    """Window to verify.

    Attributes:
        tree: tokens and topology of the window, int64 ``[B, N]`` each.
        proposal: type of the draft, with its distribution q where it was sampled.
    """

    tree: Tree
    proposal: Proposal
