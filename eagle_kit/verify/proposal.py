"""Types of proposals: a window of draft tokens, and the distribution that they were sampled from, if any.

A deterministic draft is a function of the text and has no distribution q; verifying it with a softmax as q
would change the distribution of the text. So :func:`eagle_kit.verify.verifiers.accept` refuses a verifier
that is not sound for the type of the proposal.

Legend: B requests, N window nodes, S draft steps, Q nodes with children, V vocabulary.
"""

from dataclasses import dataclass, replace
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

    def limit_depth(self, limits: torch.Tensor) -> "DraftOutput":
        """Make the window in which no draft below a depth can be accepted.

        Such a node is no child of another, and counts as not sampled: the token after its parent is sampled
        from the target's distribution.

        Args:
            limits: int64 ``[B]``, the greatest depth of a draft that may be accepted; 0 for none.
        """
        # A node that is its own parent is reached from no other.
        tree = self.tree
        nodes = torch.arange(tree.parents.shape[1], device=tree.parents.device)
        is_too_deep = tree.depths > limits[:, None]
        tree = tree._replace(parents=torch.where(is_too_deep, nodes, tree.parents))

        # Verifiers of sampled drafts read a row of zeros as "no child was sampled".
        proposal = self.proposal
        if isinstance(proposal, Deterministic):
            return DraftOutput(tree, proposal)
        may_have_children = tree.depths[:, : proposal.q.shape[1]] < limits[:, None]
        return DraftOutput(tree, replace(proposal, q=proposal.q * may_have_children[..., None]))
