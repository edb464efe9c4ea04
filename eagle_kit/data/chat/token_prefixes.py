"""Comparison of the tokens of a text with the tokens of its beginnings."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def splitting_tokens(tokenizer: Any) -> dict[int, str]:
    """Added tokens, by id, at which a tokenizer always splits a text."""
    found = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if not (token.normalized or token.lstrip or token.rstrip or token.single_word):
            found[token_id] = token.content
    return found


class TokenPrefixes:
    """Compares the tokens of the beginning of a text with the first tokens of the text.

    A tokenizer first splits a text at added tokens, so the tokens before an added token do not depend on the
    text after it. The beginning is therefore tokenised from its last added token on.

    Args:
        tokenize: tokenises a text without special tokens of the tokenizer's own.
        splitting: :func:`splitting_tokens` of the tokenizer.
        text: the text.
        ids: its n tokens, int32 ``[n]``.
        starts: character at which each token begins, int64 ``[n]``.
    """

    def __init__(
        self,
        tokenize: Callable[[str], list[int]],
        splitting: Mapping[int, str],
        text: str,
        ids: np.ndarray,
        starts: np.ndarray,
    ) -> None:
        self._tokenize = tokenize
        self._splitting = splitting
        self._text = text
        self._ids = ids
        self._starts = starts
        splitting_ids = np.fromiter(splitting, dtype=np.int64, count=len(splitting))
        self._splits = np.flatnonzero(np.isin(ids, splitting_ids))
        self._pieces: dict[str, list[int]] = {}

    def are_tokens(self, stop: int, num_tokens: int) -> bool:
        """True if the tokens of ``text[:stop]`` are the first ``num_tokens`` tokens of the text."""
        first = self._last_split(num_tokens)
        start = int(self._starts[first]) if first else 0
        piece = self._text[start:stop]
        if piece not in self._pieces:
            self._pieces[piece] = self._tokenize(piece)
        return np.array_equal(self._pieces[piece], self._ids[first:num_tokens])

    def _last_split(self, num_tokens: int) -> int:
        """Index of the last added token among the first ``num_tokens``; 0 if there is none."""
        num_splits = int(np.searchsorted(self._splits, num_tokens))
        if num_splits == 0:
            return 0
        index = int(self._splits[num_splits - 1])
        name = self._splitting[int(self._ids[index])]
        return index if self._text.startswith(name, int(self._starts[index])) else 0
