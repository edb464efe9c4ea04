"""Incremental detokenisation with stop texts.

Two things are held back: the end of a text that may be the first bytes of a character (it decodes to U+FFFD),
and the beginning of a stop text. Both are released by :meth:`TextStream.finish` when nothing follows.

``tokenizers.decoders.DecodeStream`` is not used: it cannot release what it holds back at the end of a
response, it raises when a run of byte tokens turns out to be ill-formed, and it decodes an ever longer window
while the text ends in ill-formed bytes, which sampling at a high temperature does produce.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from eagle_kit.data.chat.response.parts import len_of_beginning

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_HELD_IDS = 32
"""Tokens that may end in an unfinished character before the window is cut; a character has 4 bytes."""
MAX_UNFINISHED_IDS = 3
"""Last tokens of a text that may be the beginning of a character."""
MIN_CONTEXT_IDS = 8
"""Tokens of a prompt that a response is decoded behind, where these have a text."""
MAX_ILL_FORMED_IDS = 64
"""Tokens of a prompt that are searched for the beginning of a character."""


class TextContext(NamedTuple):
    """End of a prompt that the text of a response continues.

    Attributes:
        token_ids: last tokens of the prompt that have a text of their own; it comes before the response's.
        unfinished: the tokens after them, which begin a character; it is part of the response's text.
    """

    token_ids: tuple[int, ...] = ()
    unfinished: tuple[int, ...] = ()


def text_context(
    tokenizer: Any, prompt_ids: Sequence[int], *, is_text: bool, skip_special_tokens: bool = True
) -> TextContext:
    """Select the end of a prompt that a response has to be decoded behind.

    Args:
        tokenizer: see :class:`Detokenizer`.
        prompt_ids: the prompt.
        is_text: the prompt was tokenised from a text, so its last character is complete.
        skip_special_tokens: special tokens are no text.
    """
    rust = _rust(tokenizer)

    def decode(start: int, stop: int) -> str:
        return rust.decode(list(prompt_ids[start:stop]), skip_special_tokens=skip_special_tokens)

    # Find the last complete character. A prompt that ends in ill-formed bytes throughout is complete.
    end = len(prompt_ids)
    if not is_text:
        for stop in range(end, max(-1, end - MAX_UNFINISHED_IDS - 1), -1):
            if not decode(_context_start(decode, stop), stop).endswith(REPLACEMENT):
                end = stop
                break
    return TextContext(tuple(prompt_ids[_context_start(decode, end) : end]), tuple(prompt_ids[end:]))


def _context_start(decode: Callable[[int, int], str], stop: int) -> int:
    """Go back from ``stop`` to where the tokens have a text that begins with a whole character, or over
    :data:`MAX_ILL_FORMED_IDS` tokens of a text that does not."""
    size = MIN_CONTEXT_IDS
    while size < stop:
        for start in range(stop - size, max(-1, stop - size - 4), -1):
            text = decode(start, stop)
            if text and not text.startswith(REPLACEMENT):
                return start
        if text and size >= MAX_ILL_FORMED_IDS:
            return stop - size
        size *= 2
    return 0


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the ids of all special tokens."""
    added = _rust(tokenizer).get_added_tokens_decoder().items()
    return frozenset(token for token, about in added if about.special)


def _byte_tokens(rust: Any) -> frozenset[int]:
    """Return the ids of tokens that are single bytes to a decoder with byte fallback; empty where there are
    none."""
    found = (rust.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token for token in found if token is not None)


def _rust(tokenizer: Any) -> Any:
    """Return the Rust tokenizer itself: the wrapper around it costs five times the decoding of a short
    window."""
    return getattr(tokenizer, "backend_tokenizer", None) or tokenizer


class Detokenizer:
    """Incremental decoder: the pieces that :meth:`push` and :meth:`flush` return join to the decoded text.

    A window of recent tokens is decoded every time, and its new text is returned. It starts with tokens whose
    text was already returned, since decoders treat the first token in a special way (SentencePiece
    drops its leading space).

    Args:
        tokenizer: a fast Hugging Face tokenizer, or anything with its ``decode``.
        included_special_tokens: special tokens that are text all the same; others are left out.
        context: end of the prompt that the text continues; empty for a text of its own.
    """

    def __init__(
        self,
        tokenizer: Any,
        included_special_tokens: frozenset[int] = frozenset(),
        context: TextContext = TextContext(),  # noqa: B008
    ) -> None:
        self._tokenizer = _rust(tokenizer)
        self._skips_special_tokens = not included_special_tokens
        # Left out before they are decoded, since a window of tokens without a text would only grow.
        self._excluded = special_tokens(tokenizer) - included_special_tokens
        self._byte_tokens = _byte_tokens(self._tokenizer)

        # The window: tokens whose text was returned, then those after them.
        self._window = list(context.token_ids)
        self._num_returned_ids = len(self._window)
        self._returned_text = self._decode(self._window) if self._window else ""
        self._window += context.unfinished

    def push(self, token_ids: Sequence[int]) -> str:
        """Decode further tokens -> their text, without an unfinished character at the end.

        The text does not depend on how tokens are divided over calls.
        """
        excluded = self._excluded
        new_ids = [token for token in token_ids if token not in excluded]

        # A byte makes all bytes before it ill-formed that are decoded with it, so bytes are read one by one.
        if len(new_ids) > 1 and not self._byte_tokens.isdisjoint(new_ids):
            return "".join([self.push((token,)) for token in new_ids])

        self._window += new_ids
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._take_new(text)

        # Return what is before the unfinished character.
        settled = text.rstrip(REPLACEMENT)
        if len(settled) > len(self._returned_text):
            new = settled[len(self._returned_text) :]
            self._returned_text = settled
            return new

        # An unfinished character makes the whole run of byte tokens ill-formed (SentencePiece).
        new = self._take_finished()
        if not new and len(self._window) - self._num_returned_ids > MAX_HELD_IDS:
            return self._cut(text)
        return new

    def flush(self) -> str:
        """Release the text held back; an unfinished character is U+FFFD."""
        return self._take_new(self._decode(self._window))

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips_special_tokens)

    def _take_new(self, text: str) -> str:
        """Return the addition of ``text``, the decoded window, and start the next window with it."""
        # By length, not as a prefix: byte tokens that were a character turn into U+FFFD when ill-formed ones
        # follow them (SentencePiece), and what was returned stays.
        new = text[len(self._returned_text) :]
        new_ids = self._window[self._num_returned_ids :]
        new_text = self._decode(new_ids)
        if new_text:
            self._window = new_ids
            self._num_returned_ids = len(new_ids)
            self._returned_text = new_text
        else:
            self._returned_text = text
            self._leave_out_nameless()
        return new

    def _leave_out_nameless(self) -> None:
        """Remove tokens without effect from the window's new ones, since a model may emit them without end:
        ids beyond the tokenizer's, and an empty token behind another."""
        kept = self._window[: self._num_returned_ids]
        name_before: str | None = None
        for token in self._window[self._num_returned_ids :]:
            name = self._tokenizer.id_to_token(token)
            if name is None or (name == "" and name_before == ""):
                continue
            kept.append(token)
            name_before = name
        self._window = kept

    def _take_finished(self) -> str:
        """Return what is new in the text without the window's last tokens, which may be the beginning of a
        character; empty where that text ends in another unfinished one."""
        for count in range(1, MAX_UNFINISHED_IDS + 1):
            finished = self._window[:-count]
            if len(finished) <= self._num_returned_ids:
                return ""
            text = self._decode(finished)
            if len(text) <= len(self._returned_text):
                return ""
            if not text.endswith(REPLACEMENT):
                unfinished = self._window[-count:]
                self._window = finished
                new = self._take_new(text)
                self._window = self._window + unfinished
                return new
        return ""

    def _cut(self, text: str) -> str:
        """Release the front of a long run of ill-formed bytes, up to a place that no later byte can
        change."""
        for cut in range(len(self._window) - 8, len(self._window) - 4):
            front = self._decode(self._window[:cut])
            rest = self._decode(self._window[cut:])
            if front + rest == text and len(front) >= len(self._returned_text):
                new = front[len(self._returned_text) :]
                self._window = self._window[cut:]
                self._num_returned_ids = 0
                self._returned_text = ""
                return new
        return self._cut_rest(text)

    def _cut_rest(self, text: str) -> str:
        """Release a run of byte tokens that is ill-formed whatever follows (SentencePiece), in which each is
        U+FFFD, and keep its beginning."""
        for size in (self._num_returned_ids, self._num_returned_ids + 8):
            head = self._window[:size]
            head_text = self._decode(head)
            is_rest_ill_formed = head_text + REPLACEMENT * (len(self._window) - size) == text
            if is_rest_ill_formed and self._is_ill_formed(head):
                new = text[len(self._returned_text) :]
                self._window = head
                self._num_returned_ids = size
                self._returned_text = head_text
                return new
        return ""

    def _is_ill_formed(self, ids: list[int]) -> bool:
        """True if these end within a run of bytes that no later byte makes well-formed: one that may be has
        the end of a character in its last places."""
        if len(ids) <= MAX_UNFINISHED_IDS:
            return False
        ends = range(len(ids) - MAX_UNFINISHED_IDS, len(ids) + 1)
        return all(self._decode(ids[:end]).endswith(REPLACEMENT) for end in ends)


class TextStream:
    """Text of one response while its tokens arrive.

    Of several stop texts the one that is complete first ends the response, of two that are complete at the
    same character the one that began first; so the text does not depend on how it was cut into tokens.

    Args:
        tokenizer: see :class:`Detokenizer`.
        stop: texts that end the response, none of them empty.
        included_special_tokens: see :class:`Detokenizer`.
        context: see :class:`Detokenizer`.
        min_tokens: first tokens, with which no stop text ends the response. One may begin in their text.
        includes_stop: the stop text is a part of the text.

    Attributes:
        text: final text so far; it only grows.
        stopped: whether a stop text was completed.
        num_decoded: tokens of the response that :meth:`decode` has taken.
        num_kept: tokens up to the one that completed a stop text; None where none did.
        failure: what the tokenizer raised in :meth:`decode` or :meth:`finish`, after which the text ends.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        included_special_tokens: frozenset[int] = frozenset(),
        context: TextContext = TextContext(),  # noqa: B008
        min_tokens: int = 0,
        includes_stop: bool = False,
    ) -> None:
        assert all(stop), "an empty stop text would end every response"
        self.text = ""
        self.stopped = False
        self.num_decoded = 0
        self.num_kept: int | None = None
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._stop = tuple(stop)
        self._num_unsearched = min_tokens
        self._includes_stop = includes_stop
        self._detokenizer = Detokenizer(tokenizer, included_special_tokens, context)
        self._held = ""

    @property
    def has_stops(self) -> bool:
        """True if a text may end the response."""
        return bool(self._stop)

    def decode(self, token_ids: Sequence[int], count: int) -> None:
        """Append the text of those of the first ``count`` tokens of a response that were not decoded yet. Any
        thread may call it: what one has decoded, another does not decode again."""
        with self._lock, self._failures():
            new = () if self.stopped or self.failure else token_ids[self.num_decoded : count]
            if not new:
                return
            kept = self.push(new)
            if kept is not None:
                self.num_kept = self.num_decoded + kept
            self.num_decoded += len(new) if kept is None else kept

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Take further tokens.

        Returns:
            None, or how many of these tokens are kept when they complete a stop text: those up to the token
            that completes it. What follows the stop text is no part of :attr:`text`, nor is the stop text
            itself, unless it is included.
        """
        assert not self.stopped, "the response has ended"
        if not self._stop:
            self.text += self._detokenizer.push(token_ids)
            return None
        for count, token in enumerate(token_ids, 1):
            is_searched = self._num_unsearched == 0
            self._num_unsearched = max(0, self._num_unsearched - 1)
            if self._append_text(self._detokenizer.push((token,)), is_searched):
                return count
        return None

    def finish(self) -> None:
        """Release the text held back, after the last token. May be called again."""
        with self._lock, self._failures():
            if not (self.stopped or self.failure) and not self._append_text(self._detokenizer.flush()):
                self.text += self._held
                self._held = ""

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Keep what the tokenizer raises, a panic of its Rust included: it concerns this response alone."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            logging.getLogger(__name__).error("The text of a response could not be made.", exc_info=error)
            self.failure = error

    def _append_text(self, new: str, is_searched: bool = True) -> bool:
        """Append decoded text, but for the beginning of a stop text. Return True when it completes one that
        is looked for."""
        if not new:
            return False
        text = self._held + new

        # A stop text ends in the new text; what ended before was not looked for.
        ends = []
        for stop in self._stop if is_searched else ():
            at = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if at >= 0:
                ends.append((at + len(stop), at))
        if ends:
            end, start = min(ends)
            self.text += text[: end if self._includes_stop else start]
            self._held = ""
            self.stopped = True
            return True
        hold = len_of_beginning(text, self._stop)
        self.text += text[: len(text) - hold]
        self._held = text[len(text) - hold :]
        return False
