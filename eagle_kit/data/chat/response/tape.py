"""Text of a response that arrives in pieces, for readers written as generators.

A reader yields whenever it needs more text, and continues at the same statement when more has come. It reads
each character once. Text that may be read again is marked, and returned with :meth:`Tape.rewind`.
"""

import re
from collections import deque
from collections.abc import Generator
from typing import TypeVar

from eagle_kit.data.chat.response.parts import blocks, len_of_beginning

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Generator that yields until there is more text, and returns a ``T``."""
SPACE = re.compile(r"\s*+")


class Tape:
    """Characters of a response, and the place up to which they were read.

    Attributes:
        text: a block of the response, and the unread characters before it.
        at: place in ``text`` up to which it was read.
        is_end: the response has ended: no more text will be fed.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_end = False
        self._base = 0  # place of ``text`` in the response
        self._unread: deque[str] = deque()  # blocks after ``text``
        self._marked: list[str] | None = None  # text from the mark to the end of ``text``
        self._mark = 0

    @property
    def place(self) -> int:
        """Number of characters of the response that were read."""
        return self._base + self.at

    def feed(self, text: str) -> None:
        """Append text of the response."""
        self._unread.extend(blocks(text))

    def more(self) -> Reading[bool]:
        """Append the next block to the unread characters. False at the end of the response."""
        while not self._unread:
            if self.is_end:
                return False
            yield
        block = self._unread.popleft()
        self._base += self.at
        self.text = self.text[self.at :] + block
        self.at = 0
        if self._marked is not None:
            self._marked.append(block)
        return True

    def mark(self) -> int:
        """Mark this place and return it. The text from here on is kept for :meth:`since` and
        :meth:`rewind`."""
        self._mark = self.place
        self._marked = [self.text[self.at :]]
        return self._mark

    def since(self, start: int, end: int) -> str:
        """Return the text from ``start`` to ``end``, places after the mark."""
        assert self._marked is not None
        whole = "".join(self._marked)
        return whole[start - self._mark : end - self._mark]

    def rewind(self, place: int) -> None:
        """Go back to a place after the mark, and remove the mark."""
        assert self._marked is not None
        unread = "".join(self._marked)[place - self._mark :]
        self._unread.extendleft(reversed(list(blocks(unread))))
        self._marked = None
        self._base = place
        self.text = ""
        self.at = 0

    def release(self) -> None:
        """Remove the mark."""
        self._marked = None

    def skip_space(self) -> Reading[None]:
        """Read white space. Afterwards there is another character, unless the response has ended."""
        while True:
            found = SPACE.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text) or not (yield from self.more()):
                return

    def next_is(self, *markers: str) -> Reading[str]:
        """Return the marker with which the unread text begins, without reading it; empty for none."""
        while True:
            begun = self.text[self.at : self.at + max(map(len, markers))]
            for marker in markers:
                if begun.startswith(marker):
                    return marker
            may_come = any(marker.startswith(begun) for marker in markers)
            if not may_come or not (yield from self.more()):
                return ""

    def take(self, marker: str) -> Reading[bool]:
        """Read ``marker`` if it comes next. False if it does not."""
        found = yield from self.next_is(marker)
        self.at += len(found)
        return bool(found)

    def find(self, pattern: re.Pattern[str], markers: tuple[str, ...]) -> Reading[str]:
        """Read up to the end of the first of ``markers`` and return it; empty if the response ends before.

        Args:
            pattern: matches any of the markers.
        """
        while True:
            found = pattern.search(self.text, self.at)
            if found is not None:
                self.at = found.end()
                return found[0]
            rest = self.text[self.at :]
            self.at = len(self.text) - len_of_beginning(rest, markers)
            if not (yield from self.more()):
                self.at = len(self.text)
                return ""
