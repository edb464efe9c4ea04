"""Protocols of grammars. :mod:`~eagle_kit.engine.grammar.compiler` implements them, and
:mod:`~eagle_kit.engine.tensor_parallel.agreement` for several ranks."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from eagle_kit.core.structured_outputs import Grammar


class Match(Protocol):
    """State of one response in its grammar; see :class:`~eagle_kit.engine.grammar.compiler.GrammarMatch`."""

    @property
    def is_complete(self) -> bool:
        """The grammar has ended, and the response with it."""

    @property
    def is_stuck(self) -> bool:
        """No token may follow."""

    def advance(self, tokens: Sequence[int]) -> int:
        """Take emitted tokens -> how many belong to the response."""

    def fill(self, parents: np.ndarray, tokens: torch.Tensor, bitmask: torch.Tensor) -> None:
        """Write the tokens allowed after each node of a window."""


class Grammars(Protocol):
    """Compiled grammars; see :class:`~eagle_kit.engine.grammar.compiler.GrammarCompiler`."""

    @property
    def num_compiled(self) -> int:
        """Grammars that are remembered."""

    def start(self, grammar: Grammar, salt: str | None = None) -> Match:
        """Return a match that has read nothing; what is compiled is shared by requests with the same cache
        ``salt``. Raise UserError for a grammar that is of no use."""
