"""Grammars of responses that begin with reasoning: the grammar holds from the token behind it.

Whether a node of a window is in the reasoning or behind it follows from the tokens of its path alone. So
below a draft that ends the reasoning the same window has the grammar's masks. Reasoning is free, but for
tokens that would end the response before its grammar has begun.

Legend: N window nodes, W words of 32 tokens.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from eagle_kit.core.structured_outputs import Thought
from eagle_kit.engine.grammar.protocols import Match

# States of a path, besides the number of tokens of ``Thought.end`` that it has last.
FIRST = -1
"""Before the first token of a response that may have reasoning."""
ENDED = -2
"""After the reasoning: in the grammar."""
UNUSED = -3
"""Of a node that is not used."""


class MatchBehindThought:
    """:class:`~eagle_kit.engine.grammar.protocols.Match` of a response whose grammar begins behind its
    reasoning.

    Args:
        match: of the grammar, which has read nothing; nobody else may use it.
        stop_token_ids: tokens that end a response.
    """

    def __init__(self, match: Match, thought: Thought, stop_token_ids: frozenset[int]) -> None:
        self._match = match
        self._thought = thought
        self._stop_token_ids = stop_token_ids
        self._state = 0 if thought.opener is None else FIRST

    @property
    def is_complete(self) -> bool:
        """The grammar has ended, and the response with it."""
        return self._match.is_complete

    @property
    def is_stuck(self) -> bool:
        """No token may follow."""
        return self._match.is_stuck

    def advance(self, tokens: Sequence[int]) -> int:
        """Take emitted tokens -> how many belong to the response."""
        for count, token in enumerate(tokens):
            before = self._state
            if before != ENDED:
                self._state = self._after(before, token)
            if self._state == ENDED and before < 0:  # the token that ends reasoning is none of the grammar
                return count + self._match.advance(tokens[count:])
        return len(tokens)

    def fill(self, parents: np.ndarray, tokens: torch.Tensor, bitmask: torch.Tensor) -> None:
        """Write the tokens allowed after each node of a window, where that is not all of them; see
        :meth:`~eagle_kit.engine.grammar.compiler.GrammarMatch.fill`."""
        if self._state == ENDED:
            self._match.fill(parents, tokens, bitmask)
            return
        states = [self._state]
        roots = [0]
        windows: dict[int, list[int]] = {}  # nodes of the grammar, by the one behind which it begins
        if self._state == FIRST:
            windows[0] = [0]
        above = parents.tolist()
        for node, token in enumerate(tokens.tolist()[1:], 1):
            parent = above[node]
            before = UNUSED if parent == node else states[parent]
            states.append(self._after(before, token))
            roots.append(node if before >= 0 else roots[min(parent, node - 1)])
            if states[node] == ENDED:
                windows.setdefault(roots[node], []).append(node)
        for nodes in windows.values():
            place = {node: i for i, node in enumerate(nodes)}
            inner = np.array([0, *(place[above[node]] for node in nodes[1:])])
            rows = bitmask[nodes]
            self._match.fill(inner, tokens[nodes], rows)
            bitmask[nodes] = rows
        words = bitmask.numpy().view(np.uint32)
        for node, state in enumerate(states):
            if state != ENDED:
                self._fill_thought(state, words[node])

    def _after(self, state: int, token: int) -> int:
        """State of a path with one more token."""
        end = self._thought.end
        opener = self._thought.opener
        if state == FIRST:
            return 0 if token == opener else ENDED
        if state < 0:
            return state
        state = state + 1 if token == end[state] else int(token == end[0])
        return ENDED if state == len(end) else state

    def _fill_thought(self, state: int, words: np.ndarray) -> None:
        """Write the tokens allowed within reasoning, or before the first token beside the grammar's, into
        ``words`` uint32 ``[W]``."""
        end, opener, others = self._thought
        if state == FIRST:
            assert opener is not None
            _set(words, [opener])
        elif state > 0:
            words[:] = 0
            _set(words, [end[state], *(others if state == 1 else ())])
        elif state == 0:
            for token in self._stop_token_ids:
                words[token // 32] &= ~np.uint32(1 << token % 32)


def _set(words: np.ndarray, tokens: Iterable[int]) -> None:
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
