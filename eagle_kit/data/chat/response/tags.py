"""Responses with a thought between ``<think>`` and ``</think>``, and calls in one of the forms of
:mod:`.calls`.

A thought may be at the beginning only. White space around a thought, and between text and calls, is left out:
chat templates write it.
"""

import re
from collections.abc import Sequence

from eagle_kit.data.chat.messages import Tool
from eagle_kit.data.chat.response.calls import BARE_BEGINNINGS, CallForm, KnownTools
from eagle_kit.data.chat.response.parts import Collected, ResponseParts, len_of_beginning
from eagle_kit.data.chat.response.tape import Reading, Tape

THINK = "<think>"
END_THINK = "</think>"
OPENED = re.compile(r"<think>\s*+\Z")
CLOSED = re.compile(r"</think>\s*+\Z")
MOST_REREAD = 8
"""Text that is no call is read again, for a call within it, up to so many times the length of the response so
far. Beyond that it is text."""


def opens_thought(prompt: str) -> bool:
    """True for a prompt whose end has opened the thought of its response."""
    return OPENED.search(prompt) is not None


def closes_thought(prompt: str) -> bool:
    """True for a prompt whose end has closed the thought of its response."""
    return CLOSED.search(prompt) is not None


class TagReader:
    """:class:`~eagle_kit.data.chat.response.parts.ResponseReader` of tags.

    Args:
        has_thoughts: whether a thought is read.
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
        self._form = form
        self._tools = KnownTools(tools)
        self._tape = Tape()
        self._found = Collected()
        self._gap: list[str] = []  # white space that is part of the text only if more text follows
        self._has_content = False  # there is content
        self._is_fresh = False  # after a marker, where white space is left out
        self._follows_call = False
        self._num_reread = 0  # characters
        self._reading = self._read(has_thoughts, is_opened)

    def feed(self, text: str) -> ResponseParts:
        """Read a further piece of text."""
        self._tape.feed(text)
        next(self._reading)
        return self._found.take()

    def finish(self, end: str = "") -> ResponseParts:
        """Release text that is held back, after the last piece."""
        self._tape.is_end = True
        next(self._reading, None)
        if not (self._is_fresh or self._follows_call):
            self._found.add_content("".join(self._gap))
        self._gap = []
        return self._found.take()

    def _read(self, has_thoughts: bool, is_opened: bool) -> Reading[None]:
        """Read the response."""
        if has_thoughts:
            has_thought = is_opened
            begin = self._tape.mark()
            yield from self._tape.skip_space()
            if (yield from self._tape.take(THINK)):
                self._tape.release()
                has_thought = True
            else:
                self._tape.rewind(begin)
            if has_thought:
                yield from self._thought()
        while (yield from self._content()):
            pass

    def _thought(self) -> Reading[None]:
        """Read a thought and its end, without the white space around it."""
        tape = self._tape
        yield from tape.skip_space()
        while True:
            place = tape.text.find(END_THINK, tape.at)

            # The thought so far. The beginning of the end tag is held back.
            if place >= 0:
                until = place
            else:
                until = len(tape.text) - len_of_beginning(tape.text[tape.at :], (END_THINK,))
            self._add_reasoning(tape.text[tape.at : until])
            tape.at = until

            # Its end, or that of the response.
            if place >= 0:
                tape.at += len(END_THINK)
                self._gap = []
                self._is_fresh = True
                return
            if not (yield from tape.more()):
                self._found.add_reasoning("".join([*self._gap, tape.text[tape.at :]]))
                self._gap = []
                tape.at = len(tape.text)
                return

    def _add_reasoning(self, text: str) -> None:
        """Add to the reasoning; white space at its end waits for what follows."""
        stripped = text.rstrip()
        if stripped:
            self._found.add_reasoning("".join([*self._gap, stripped]))
            self._gap = []
        self._gap.append(text[len(stripped) :])

    def _content(self) -> Reading[bool]:
        """Read text up to a call, and the call. False at the end of the response."""
        tape = self._tape
        form = self._form
        if form is None:
            self._add_content(tape.text[tape.at :])
            tape.at = len(tape.text)
            return (yield from tape.more())

        # Texts that the form has between calls are left out.
        while self._follows_call and form.after:
            begin = tape.mark()
            yield from tape.skip_space()
            mark = yield from tape.next_is(*form.after)
            if not mark:
                tape.rewind(begin)
                break
            tape.at += len(mark)
            tape.release()

        # A call without a marker.
        if form.is_bare and not self._has_content:
            begin = tape.mark()
            yield from tape.skip_space()
            place = tape.place
            is_bare = yield from self._begins_bare()
            if is_bare:
                self._add_content(tape.since(begin, place))
                tape.rewind(place)
                yield from self._call(form)
                return True
            tape.rewind(begin)

        # Text up to a marker.
        while True:
            places = [tape.text.find(opener, tape.at) for opener in form.openers]
            places = [place for place in places if place >= 0]
            held_back = len_of_beginning(tape.text[tape.at :], form.openers)
            until = min(places, default=len(tape.text) - held_back)
            self._add_content(tape.text[tape.at : until])
            tape.at = until
            if places:
                yield from self._call(form)
                return True
            if not (yield from tape.more()):
                self._add_content(tape.text[tape.at :])
                tape.at = len(tape.text)
                return False

    def _begins_bare(self) -> Reading[bool]:
        """Read one of ``BARE_BEGINNINGS``, in which white space is ignored. False if the text begins
        otherwise."""
        tape = self._tape
        read = ""
        while read not in BARE_BEGINNINGS:
            yield from tape.skip_space()
            read += tape.text[tape.at : tape.at + 1]
            if tape.at == len(tape.text) or not any(each.startswith(read) for each in BARE_BEGINNINGS):
                return False
            tape.at += 1
        return True

    def _call(self, form: CallForm) -> Reading[None]:
        """Read calls. Text that is no call is content, in which another marker may follow."""
        tape = self._tape
        begin = tape.mark()
        taken = yield from form.take(tape, self._tools)

        # Calls.
        if taken.calls is not None:
            tape.release()
            self._follows_call = True
            self._is_fresh = self._is_fresh or not self._has_content
            self._found.calls += taken.calls
            return

        # No call: read on after its end, or after all that was read if that is too often.
        end = taken.end
        self._num_reread += tape.place - end
        if self._num_reread > MOST_REREAD * tape.place:
            end = tape.place
        self._add_content(tape.since(begin, end))
        tape.rewind(end)

    def _add_content(self, text: str) -> None:
        """Add content. If a call may follow, white space at its end waits for the next text."""
        if self._form is not None:
            stripped = text.rstrip()
            if not stripped:
                self._gap.append(text)
                return
            gap = text[len(stripped) :]
            text = "".join([*self._gap, stripped])
            self._gap = [gap]
        if self._is_fresh:
            text = text.lstrip()
        if text:
            self._found.add_content(text)
            self._has_content = True
            self._is_fresh = False
            self._follows_call = False


class ConstrainedReader(TagReader):
    """Reader of responses whose answer must match a grammar: everything after the thought is content, white
    space included.

    Args:
        is_opened: the prompt has opened the thought.
    """

    def __init__(self, *, is_opened: bool) -> None:
        super().__init__(has_thoughts=True, is_opened=is_opened)

    def _add_content(self, text: str) -> None:
        self._found.add_content(text)
