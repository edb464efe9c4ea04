"""Bounds on the length of a response: its least number of tokens, and the most of its reasoning.

Both are masks: tokens that end the response are forbidden until it is long enough, and the end of the
reasoning is the only continuation once the budget is spent. How many tokens a node of a window has before it
follows from its depth, so speculation changes no token.

Legend: N window nodes, W words of 32 tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from eagle_kit.core.structured_outputs import ThinkingBudget
from eagle_kit.engine.grammar.masks import num_bytes
from eagle_kit.engine.grammar.protocols import Match

FIRST = -1
"""Before the first token of a response that may begin with reasoning."""
ENDED = -2
"""After the reasoning, or in a response that has none."""


class _Place(NamedTuple):
    """Where a path is.

    Attributes:
        num_tokens: tokens of the response.
        num_end: tokens of the reasoning's end that the path has last; :data:`FIRST` or :data:`ENDED`.
        num_thought: tokens of the reasoning, its opener excluded.
    """

    num_tokens: int
    num_end: int
    num_thought: int = 0


class BoundedMatch:
    """:class:`~eagle_kit.engine.grammar.protocols.Match` of a response with bounds, which may have a grammar.

    Where the grammar allows nothing but an end, it ends the response before ``min_tokens``.

    Args:
        stop_token_ids: tokens that end the response.
        vocab_size: V of the target.
        min_tokens: tokens of the response before one of ``stop_token_ids``.
        budget: of its reasoning; None without one.
        match: of the grammar, which has read nothing; None allows every text.
    """

    def __init__(
        self,
        stop_token_ids: frozenset[int],
        vocab_size: int,
        min_tokens: int,
        budget: ThinkingBudget | None = None,
        match: Match | None = None,
    ) -> None:
        self.match = match
        self._min_tokens = min_tokens
        self._budget = budget
        num_end = ENDED
        if budget is not None:
            num_end = 0 if budget.thought.opener is None else FIRST
        self._place = _Place(0, num_end)
        self._stops = np.zeros(num_bytes(vocab_size) // 4, dtype=np.uint32)
        for token in stop_token_ids:
            self._stops[token // 32] |= np.uint32(1 << token % 32)

    @property
    def is_spent(self) -> bool:
        """The bounds forbid nothing any more."""
        return self._place.num_tokens >= self._min_tokens and self._place.num_end == ENDED

    @property
    def is_complete(self) -> bool:
        """The grammar has ended, and the response with it."""
        return self.match is not None and self.match.is_complete

    @property
    def is_stuck(self) -> bool:
        """No token may follow."""
        return self.match is not None and self.match.is_stuck

    def advance(self, tokens: Sequence[int]) -> int:
        """Take emitted tokens -> how many belong to the response."""
        for token in tokens:
            self._place = self._after(self._place, token)
        return len(tokens) if self.match is None else self.match.advance(tokens)

    def fill(self, parents: np.ndarray, tokens: torch.Tensor, bitmask: torch.Tensor) -> None:
        """Write the tokens allowed after each node of a window; see
        :meth:`~eagle_kit.engine.grammar.compiler.GrammarMatch.fill`."""
        if self.match is not None:
            self.match.fill(parents, tokens, bitmask)
        if self.is_stuck or self.is_spent:
            return

        # The root is the last token of the response, which the place counts already.
        words = bitmask.numpy().view(np.uint32)
        places: dict[int, _Place] = {}
        for node, (parent, token) in enumerate(zip(parents.tolist(), tokens.tolist(), strict=True)):
            if node == 0:
                places[node] = self._place
            elif parent != node and parent in places:
                places[node] = self._after(places[parent], token)
            else:
                continue
            self._fill_node(places[node], words[node])

    def _fill_node(self, place: _Place, row: np.ndarray) -> None:
        """Remove from ``row``, uint32 ``[W]``, the tokens that may not follow a path."""
        budget = self._budget
        if budget is not None and place.num_end >= 0 and place.num_thought >= budget.num_tokens:
            token = budget.thought.end[place.num_end]
            row[:] = 0
            row[token // 32] = np.uint32(1 << token % 32)
        elif place.num_tokens < self._min_tokens:
            left = row & ~self._stops
            if left.any():
                row[:] = left

    def _after(self, place: _Place, token: int) -> _Place:
        """The place of a path with one more token."""
        num_tokens = place.num_tokens + 1
        if self._budget is None or place.num_end == ENDED:
            return _Place(num_tokens, ENDED)
        end = self._budget.thought.end

        # The first token opens the reasoning, or there is none.
        if place.num_end == FIRST:
            is_opener = token == self._budget.thought.opener
            return _Place(num_tokens, 0 if is_opener else ENDED)

        # Another token of the reasoning, or of its end.
        num_end = place.num_end + 1 if token == end[place.num_end] else int(token == end[0])
        return _Place(num_tokens, ENDED if num_end == len(end) else num_end, place.num_thought + 1)
