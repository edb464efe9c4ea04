"""What ranks exchange within a cycle, so that all of them take the same tokens.

Rounding and times may differ between ranks. All ranks get rank 0's window, path and grammar masks, and the
most likely tokens of the whole vocabulary.

Legend: B requests, N window nodes, S draft steps, T rows, V vocabulary, R ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.distributed.collectives import Ranks
from eagle_kit.engine.grammar.masks import allowed_bits, num_bytes
from eagle_kit.engine.grammar.protocols import Grammars, Match
from eagle_kit.models.targets.target import Target
from eagle_kit.ops.accept import Accepted, most_likely
from eagle_kit.ops.transfer import to_device
from eagle_kit.ops.tree_build import Tree


class MostLikelyOfRanks(NamedTuple):
    """``tokens`` int64 ``[T]``: the most likely tokens of the whole vocabulary. ``values`` ``[T, R]``: the
    largest logit of every rank's part of the vocabulary, NaN if the part has one; fp64, or the dtype of the
    logits on one rank."""

    tokens: torch.Tensor
    values: torch.Tensor


def agree_most_likely(target: Target, logits: torch.Tensor) -> MostLikelyOfRanks:
    """Find the most likely tokens over the logits of all ranks, the lowest id among equals.

    Args:
        target: this rank's part of the target.
        logits: ``[T, V / R]``, of this rank's part of the vocabulary.
    """
    tokens, values = most_likely(logits)
    ranks = target.ranks
    if ranks is None:
        return MostLikelyOfRanks(tokens, values[:, None])

    # Gather each rank's best logit with its token id.
    tokens = tokens + ranks.share.of(target.config.vocab_size).start
    pairs = ranks.stack(torch.stack((values.double(), tokens.double()), -1))  # [R, T, 2]

    # Choose the best rank; the first among equals has the lower ids.
    values_of_ranks = pairs[..., 0].t()  # [T, R]
    tokens_of_ranks = pairs[..., 1].t()
    best_rank = values_of_ranks.argmax(-1, keepdim=True)
    best_tokens = tokens_of_ranks.gather(-1, best_rank)[:, 0].long()
    return MostLikelyOfRanks(best_tokens, values_of_ranks)


def agree_tree(tree: Tree, ranks: Ranks | None) -> Tree:
    """Return the window of rank 0."""
    if ranks is None:
        return tree
    fields = ranks.first(torch.stack(tuple(tree)))
    return Tree(*fields.unbind(0))


def agree_path(accepted: Accepted, ranks: Ranks | None) -> Accepted:
    """Return the path and the tokens of rank 0."""
    if ranks is None:
        return accepted

    # One broadcast of all three, [B, 2 * (S + 1) + 1].
    path, tokens, num_accepted = accepted
    length = path.shape[1]
    packed = ranks.first(torch.cat((path, tokens, num_accepted[:, None]), 1))
    return Accepted(packed[:, :length], packed[:, length:-1], packed[:, -1])


def agree_bits(
    matches: Sequence[Match | None], tree: Tree, vocab_size: int, device: torch.device, ranks: Ranks | None
) -> torch.Tensor:
    """Return the tokens that grammars allow after each node, as
    :func:`~eagle_kit.engine.grammar.masks.allowed_bits`, on ``device``. Rank 0 alone has the grammars; the
    other ranks receive its bits."""
    # Receive the bits.
    if ranks is not None and not ranks.is_first:
        shape = *tree.tokens.shape, num_bytes(vocab_size)
        return ranks.first(torch.empty(shape, dtype=torch.uint8, device=device))

    # Compute the bits, and send them if there are other ranks.
    bits = to_device(allowed_bits(matches, tree, vocab_size), device, torch.uint8)
    return bits if ranks is None else ranks.first(bits)


class AgreedMatch:
    """State of one response in its grammar, the same on all ranks.

    Rank 0 alone has the grammar's state, since a match may become stuck by a time limit. The other ranks
    receive the result of each :meth:`advance`.

    Args:
        ranks: of this process.
        match: the grammar's state on rank 0; None on the other ranks.

    Attributes:
        is_complete, is_stuck: of :class:`~eagle_kit.engine.grammar.compiler.GrammarMatch`, after the last
            :meth:`advance`.
    """

    def __init__(self, ranks: Ranks, match: Match | None) -> None:
        self._ranks = ranks
        self._match = match
        self.is_complete = False
        self.is_stuck = False

    def advance(self, tokens: Sequence[int]) -> int:
        """Take emitted tokens; returns how many of them belong to the response."""
        result = None
        match = self._match
        if match is not None:
            num_taken = match.advance(tokens)
            result = num_taken, match.is_complete, match.is_stuck
        count: int
        count, self.is_complete, self.is_stuck = self._ranks.agree(result)
        return count

    def fill(self, parents: np.ndarray, tokens: torch.Tensor, bitmask: torch.Tensor) -> None:
        """Write the tokens allowed after each node of a window into ``bitmask``. Rank 0 alone calls it."""
        assert self._match is not None
        self._match.fill(parents, tokens, bitmask)


class AgreedGrammars:
    """Compiler of grammars whose matches are the same on all ranks.

    Args:
        ranks: of this process.
        compiler: of rank 0; None on the other ranks.
    """

    def __init__(self, ranks: Ranks, compiler: Grammars | None) -> None:
        self._ranks = ranks
        self._compiler = compiler

    @property
    def num_compiled(self) -> int:
        """Number of compiled grammars that are kept."""
        return 0 if self._compiler is None else self._compiler.num_compiled

    def start(self, grammar: Grammar, salt: str | None = None) -> AgreedMatch:
        """Return a match before its first token. Raise UserError for a grammar that cannot be compiled."""
        match = None if self._compiler is None else self._compiler.start(grammar, salt)
        return AgreedMatch(self._ranks, match)
