"""Replies with a thought between ``<think>`` and ``</think>``, and calls in one of the forms of
:mod:`.calls`.

A thought may stand at the beginning only. White space around a thought, and between text and calls, belongs
to neither, as chat templates write it.
"""

import re
from collections.abc import Sequence

from eagle_kit.data.chat.messages import Tool
from eagle_kit.data.chat.reply.calls import BARE_BEGINNINGS, LONG_CALL, CallForm
from eagle_kit.data.chat.reply.parts import ReplyParts, len_of_beginning

THINK, END_THINK = "<think>", "</think>"
OPENED, CLOSED = re.compile(r"<think>\s*\Z"), re.compile(r"</think>\s*\Z")


def opens_thought(prompt: str) -> bool:
    """True for a prompt whose end has opened the thought of its reply."""
    return OPENED.search(prompt) is not None


def closes_thought(prompt: str) -> bool:
    """True for a prompt whose end has closed the thought of its reply."""
    return CLOSED.search(prompt) is not None


class TagReader:
    """:class:`~eagle_kit.data.chat.reply.parts.ReplyReader` of tags.

    Args:
        has_thoughts: whether a thought is looked for.
        form: of calls; None leaves them in the content.
        tools: definitions of the request's tools.
        is_opened: the prompt has opened the thought.
    """

    def __init__(
        self,
        *,
        has_thoughts: bool,
        form: CallForm | None = None,
        tools: Sequence[Tool] = (),
        is_opened: bool = False,
    ) -> None:
        self._form, self._tools = form, tools
        self._behind_opening = self._thought if is_opened else self._content
        self._step = self._opening if has_thoughts else self._content
        self._held = self._gap = ""
        self._unread: list[str] = []
        self._parts = ReplyParts()
        self._has_thought = self._has_said = False
        self._is_fresh = False  # behind a marker, so that white space is no text
        self._is_behind_call = False
        self._is_waiting = False  # within a call, for one of its closers

    def feed(self, text: str) -> ReplyParts:
        """Read a further piece of text."""
        self._unread.append(text)
        form, is_long = self._form, len(self._held) > LONG_CALL
        if self._is_waiting and is_long and form and not any(closer in text for closer in form.closers):
            return ReplyParts()
        return self._read(False)

    def finish(self, end: str = "") -> ReplyParts:
        """Release what is held back, after the last piece."""
        parts = self._read(True)
        if not (self._is_fresh or self._is_behind_call):
            parts.content += self._gap
        self._gap = ""
        return parts

    def _read(self, is_end: bool) -> ReplyParts:
        parts = self._parts = ReplyParts()
        self._held += "".join(self._unread)
        self._unread.clear()
        while self._step(is_end):
            pass
        return parts

    def _opening(self, is_end: bool) -> bool:
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held, self._step = text[len(THINK) :], self._thought
            return True
        if THINK.startswith(text) and not is_end:
            return False
        self._step = self._behind_opening
        return True

    def _thought(self, is_end: bool) -> bool:
        text = self._held if self._has_thought else self._held.lstrip()
        end = text.find(END_THINK)
        if end >= 0:
            self._think(text[:end].rstrip())
            self._held, self._step, self._is_fresh = text[end + len(END_THINK) :], self._content, True
            return True
        said = text
        if not is_end:
            said = text[: len(text) - len_of_beginning(text, (END_THINK,))].rstrip()
        self._think(said)
        self._held = text[len(said) :]
        return False

    def _think(self, text: str) -> None:
        self._parts.reasoning += text
        self._has_thought = self._has_thought or bool(text)

    def _content(self, is_end: bool) -> bool:
        text, form = self._held, self._form
        if form is None:
            self._say(text)
            self._held = ""
            return False
        begun = text.lstrip()
        if self._is_behind_call:
            for mark in form.after:
                if begun.startswith(mark):
                    self._held = begun[len(mark) :]
                    return True
                if mark.startswith(begun) and not is_end:
                    return False
        if form.is_bare and not self._has_said:
            shortened = "".join(begun.split())
            if not is_end and any(beginning.startswith(shortened) for beginning in BARE_BEGINNINGS):
                return False
            if shortened.startswith(BARE_BEGINNINGS):
                return self._begin_call(len(text) - len(begun))
        places = [place for opener in form.openers if (place := text.find(opener)) >= 0]
        if places:
            return self._begin_call(min(places))
        kept = 0 if is_end else len_of_beginning(text, form.openers)
        self._say(text[: len(text) - kept])
        self._held = text[len(text) - kept :]
        return False

    def _begin_call(self, place: int) -> bool:
        self._say(self._held[:place])
        self._held, self._step = self._held[place:], self._call
        return True

    def _call(self, is_end: bool) -> bool:
        assert self._form is not None
        taken = self._form.take(self._held, self._tools, is_end)
        self._is_waiting = taken is None
        if taken is None:
            return False
        written, self._held = self._held[: taken.length], self._held[taken.length :]
        self._step = self._content
        if taken.calls is None:
            self._say(written)
        else:
            self._is_behind_call, self._is_fresh = True, self._is_fresh or not self._has_said
            self._parts.calls += taken.calls
        return True

    def _say(self, text: str) -> None:
        """Add content; white space at its end waits for what follows, where that may be a call."""
        text, self._gap = self._gap + text, ""
        if self._form is not None:
            said = text.rstrip()
            text, self._gap = said, text[len(said) :]
        if self._is_fresh:
            text = text.lstrip()
        if text:
            self._parts.content += text
            self._has_said, self._is_fresh, self._is_behind_call = True, False, False


class BoundReader(TagReader):
    """Reader of replies whose answer is held by a grammar: all behind the thought is content, white space
    included.

    Args:
        is_opened: the prompt has opened the thought.
    """

    def __init__(self, *, is_opened: bool) -> None:
        super().__init__(has_thoughts=True, is_opened=is_opened)

    def _say(self, text: str) -> None:
        self._parts.content += text
