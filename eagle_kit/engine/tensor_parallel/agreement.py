"""What ranks of tensor parallelism tell each other in a cycle: the best of their vocabularies, and the first
rank's choices and grammars. Rounding and times may differ between ranks; what they do next must not.

Legend: B requests, N window nodes, S steps, T rows, V vocabulary, R ranks.
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


class Agreed(NamedTuple):
    """``tokens`` int64 ``[T]``, the most likely of the whole vocabulary, and ``values [T, R]``, the largest
    logit of every rank's part of it, NaN where that has one: fp64, on one rank in the logits' dtype."""

    tokens: torch.Tensor
    values: torch.Tensor


def agree_most_likely(target: Target, own: torch.Tensor) -> Agreed:
    """Find the most likely tokens, the lowest id among equals, of all ranks' parts of the logits; ``own [T,
    V / R]`` is this rank's."""
    tokens, values = most_likely(own)
    if (ranks := target.ranks) is None:
        return Agreed(tokens, values[:, None])
    tokens = tokens + ranks.share.of(target.config.vocab_size).start
    pairs = ranks.stack(torch.stack((values.double(), tokens.double()), -1))  # [R, T, 2]
    every_value, every_token = (part.t() for part in pairs.unbind(-1))
    best = every_value.argmax(-1, keepdim=True)
    return Agreed(every_token.gather(-1, best)[:, 0].long(), every_value)


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


def agree_bits(
    matches: Sequence[Match | None], tree: Tree, vocab_size: int, device: torch.device, ranks: Ranks | None
) -> torch.Tensor:
    """Tokens that grammars allow after each node, as :func:`~eagle_kit.engine.grammar.masks.allowed_bits`, on
    ``device``; those of the first rank, which alone follows the grammars."""
    if ranks is not None and not ranks.is_first:
        shape = *tree.tokens.shape, num_bytes(vocab_size)
        return ranks.first(torch.empty(shape, dtype=torch.uint8, device=device))
    bits = to_device(allowed_bits(matches, tree, vocab_size), device, torch.uint8)
    return bits if ranks is None else ranks.first(bits)


class AgreedMatch:
    """State of one reply in its grammar on one of several ranks. The first one has it, as whether a match is
    stuck depends on time; the others hear how a reply goes on.

    Args:
        own: of the first rank, None of the others.

    Attributes:
        is_complete, is_stuck: see :class:`~eagle_kit.engine.grammar.compiler.GrammarMatch`; those of the last
            :meth:`advance`.
    """

    def __init__(self, ranks: Ranks, own: Match | None) -> None:
        self._ranks, self._own = ranks, own
        self.is_complete = self.is_stuck = False

    def advance(self, tokens: Sequence[int]) -> int:
        """Take emitted tokens -> how many belong to the reply."""
        found = None
        if (own := self._own) is not None:
            found = own.advance(tokens), own.is_complete, own.is_stuck
        count: int
        count, self.is_complete, self.is_stuck = self._ranks.agree(found)
        return count

    def fill(self, parents: np.ndarray, tokens: torch.Tensor, bitmask: torch.Tensor) -> None:
        """Write the tokens allowed after each node of a window, on the first rank."""
        assert self._own is not None
        self._own.fill(parents, tokens, bitmask)


class AgreedGrammars:
    """Grammars of one of several ranks.

    Args:
        own: of the first rank, which compiles them; None of the others.
    """

    def __init__(self, ranks: Ranks, own: Grammars | None) -> None:
        self._ranks, self._own = ranks, own

    @property
    def num_compiled(self) -> int:
        """Grammars that are remembered."""
        return 0 if self._own is None else self._own.num_compiled

    def start(self, grammar: Grammar, salt: str | None = None) -> AgreedMatch:
        """Return a match that has read nothing. Raise UserError for a grammar that is of no use."""
        return AgreedMatch(self._ranks, None if self._own is None else self._own.start(grammar, salt))
