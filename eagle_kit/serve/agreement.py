"""What ranks of tensor parallelism tell each other in a cycle: the best of their vocabularies, and the first
rank's choices. Rounding may differ between ranks; what they do next must not.

Legend: B requests, N window nodes, S steps, V vocabulary, R ranks.
"""

from typing import NamedTuple

import torch

from eagle_kit.kernels.accept import Accepted
from eagle_kit.kernels.collectives import Ranks
from eagle_kit.kernels.tree_build import Tree
from eagle_kit.models.targets.target import Target


class MostLikely(NamedTuple):
    """``tokens`` int64 ``[B, N]``, the most likely after each node, and ``values`` fp64 ``[B, N, R]``, the
    largest logit of every rank's part of the vocabulary, NaN where it has one."""

    tokens: torch.Tensor
    values: torch.Tensor


def most_likely(target: Target, own: torch.Tensor) -> MostLikely:
    """Most likely tokens of a rank's part of the logits ``own [B, N, V / R]``; the lowest id among equals."""
    ranks = target.ranks
    assert ranks is not None
    best = own.argmax(-1, keepdim=True)
    token = best + ranks.share.of(target.config.vocab_size).start
    pairs = ranks.stack(torch.cat((own.gather(-1, best).double(), token.double()), -1))  # [R, B, N, 2]
    values, tokens = (part.movedim(0, -1) for part in pairs.unbind(-1))
    return MostLikely(tokens.gather(-1, values.argmax(-1, keepdim=True))[..., 0].long(), values)


def agree_tree(tree: Tree, ranks: Ranks | None) -> Tree:
    """The window of the first rank."""
    return tree if ranks is None else Tree(*ranks.first(torch.stack(tuple(tree))).unbind(0))


def agree_path(accepted: Accepted, ranks: Ranks | None) -> Accepted:
    """The path and the tokens of the first rank."""
    if ranks is None:
        return accepted
    path, tokens, count = accepted
    length = path.shape[1]
    given = ranks.first(torch.cat((path, tokens, count[:, None]), 1))
    return Accepted(given[:, :length], given[:, length:-1], given[:, -1])
