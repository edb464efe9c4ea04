"""Responses without forbidden words: a token is masked where it would complete the tokens of a word.

The rule is that of vLLM's `bad_words`. Only the tokens of the response count, not those of the prompt. The
masks are those of grammars, for each node of a window by its own path, so that speculation changes no token.

Legend: N window nodes, W words of 32 tokens.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from eagle_kit.core.errors import UserError, shown
from eagle_kit.engine.grammar.masks import num_bytes
from eagle_kit.engine.grammar.protocols import Match

MAX_TOKENS = 2048
"""Tokens of all forbidden sequences of a request together."""


def bad_word_ids(tokenizer: Any, words: Sequence[str], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Tokenise each word without and with a leading blank -> the sequences of tokens to forbid, each once.

    A sequence with a token outside the target's vocabulary is left out, since the target cannot emit it.

    Raises:
        UserError: a word has no tokens, or all words together have more than :data:`MAX_TOKENS`.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        forms = [tuple(_encode(tokenizer, text)) for text in (bare, " " + bare)]
        if not bare or not all(forms):
            raise UserError(
                f"bad_words has the word {shown(word)}, which the tokenizer makes no tokens of.",
                "Leave it out, or give a word with other characters than blanks.",
            )
        known = [form for form in forms if max(form) < vocab_size]
        found.update(dict.fromkeys(known))
    count = sum(map(len, found))
    if count > MAX_TOKENS:
        raise UserError(
            f"bad_words have {count} tokens with and without leading blanks, {MAX_TOKENS} are allowed.",
            "Give fewer or shorter words.",
        )
    return tuple(found)


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


class MatchWithoutBadWords:
    """:class:`~eagle_kit.engine.grammar.protocols.Match` of a response that has no forbidden word, and may
    have a grammar.

    Args:
        sequences: tokens of each forbidden word; at least one token each, below ``vocab_size``.
        vocab_size: V of the target.
        match: of the response's grammar, which has read nothing; None allows every text.
        allowed_token_ids: tokens that the response may have; None allows all.
    """

    def __init__(
        self,
        sequences: Iterable[Sequence[int]],
        vocab_size: int,
        match: Match | None = None,
        allowed_token_ids: Sequence[int] | None = None,
    ) -> None:
        self._match = match
        self._has_failed = False
        # Words of several tokens: their last tokens, by the tokens before.
        self._last_tokens: dict[tuple[int, ...], set[int]] = {}
        singles: set[int] = set()
        for sequence in sequences:
            before = tuple(sequence[:-1])
            if before:
                self._last_tokens.setdefault(before, set()).add(sequence[-1])
            else:
                singles.add(sequence[-1])
        self._lengths = sorted({len(before) for before in self._last_tokens})
        self._longest = max(self._lengths, default=0)
        self._tail: tuple[int, ...] = ()

        # Words of one token are forbidden everywhere, as what is not in the list of allowed tokens.
        self._singles = singles
        if allowed_token_ids is None:
            self._always = ~_bits(singles, vocab_size)
        else:
            self._always = _bits(allowed_token_ids, vocab_size) & ~_bits(singles, vocab_size)

    @property
    def is_complete(self) -> bool:
        """The grammar has ended, and the response with it."""
        return self._match is not None and not self._has_failed and self._match.is_complete

    @property
    def is_stuck(self) -> bool:
        """No token may follow."""
        return self._has_failed or (self._match is not None and self._match.is_stuck)

    def advance(self, tokens: Sequence[int]) -> int:
        """Take emitted tokens -> how many belong to the response. The match is stuck at a forbidden one,
        which the masks let through only where they forbid all (`masks.allowed_bits`)."""
        num_good = 0
        for token in tokens:
            if token in self._singles or token in self._forbidden_after(self._tail):
                break
            self._tail = self._after(self._tail, token)
            num_good += 1
        count = num_good if self._match is None else self._match.advance(tokens[:num_good])
        ends_before = count < num_good or self.is_complete
        self._has_failed = num_good < len(tokens) and not ends_before
        return count

    def fill(self, parents: np.ndarray, tokens: torch.Tensor, bitmask: torch.Tensor) -> None:
        """Write the tokens allowed after each node of a window; see
        :meth:`~eagle_kit.engine.grammar.compiler.GrammarMatch.fill`."""
        if self._match is not None:
            self._match.fill(parents, tokens, bitmask)
        if self.is_stuck:
            return
        words = bitmask.numpy().view(np.uint32)
        tails: dict[int, tuple[int, ...]] = {}
        for node, (parent, token) in enumerate(zip(parents.tolist(), tokens.tolist(), strict=True)):
            # The root is the last token of the response, which the tail has.
            if node == 0:
                tail = self._tail
            elif parent == node or parent not in tails:
                continue
            else:
                tail = self._after(tails[parent], token)
            tails[node] = tail
            words[node] &= self._always
            if forbidden := self._forbidden_after(tail):
                _clear(words[node], forbidden)

    def _after(self, tail: tuple[int, ...], token: int) -> tuple[int, ...]:
        """The last tokens of a path with one more token, as many as a word has before its last."""
        path = (*tail, token)
        return path[max(0, len(path) - self._longest) :]

    def _forbidden_after(self, tail: tuple[int, ...]) -> set[int]:
        """Tokens that complete a word of several tokens behind ``tail``."""
        found: set[int] = set()
        for length in self._lengths:
            if length > len(tail):
                break
            found |= self._last_tokens.get(tail[len(tail) - length :], set())
        return found


def _clear(row: np.ndarray, tokens: set[int]) -> None:
    """Clear the bits of ``tokens`` in ``row``, uint32 ``[W]``, in one operation however many they are."""
    ids = np.fromiter(tokens, dtype=np.int64, count=len(tokens))
    bits = np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32))
    np.bitwise_and.at(row, ids // 32, ~bits)


def _bits(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """Bits of ``tokens``, uint32 ``[W]``."""
    words = np.zeros(num_bytes(vocab_size) // 4, dtype=np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words
