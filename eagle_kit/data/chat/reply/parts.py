"""Parts of a generated reply, and what every reader of replies does."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


@dataclass
class ReplyParts:
    """Parts of a reply, or an addition to each of them; ``calls`` in the order in which they were written."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, later: "ReplyParts") -> None:
        """Append a later addition to this one."""
        self.reasoning += later.reasoning
        self.content += later.content
        self.calls += later.calls


class ReplyReader(Protocol):
    """Reader of one reply, piece by piece. However the text is cut into pieces, the additions join to the
    same parts. What cannot be read stays in the content as it was written, and text is held back only while
    it may be the beginning of a marker, or is within a call."""

    def feed(self, text: str) -> ReplyParts:
        """Read a further piece of text."""

    def finish(self, end: str = "") -> ReplyParts:
        """Release what is held back, after the last piece. ``end`` is the text of the token that ended the
        reply; empty where it was cut."""


def read_reply(reader: ReplyReader, text: str, end: str = "") -> ReplyParts:
    """Read a whole reply with a new reader; ``end`` as in :meth:`ReplyReader.finish`."""
    parts = reader.feed(text)
    parts.add(reader.finish(end))
    return parts


def len_of_beginning(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of ``text`` that one of ``markers``, longer than it, begins with."""
    markers = tuple(markers)
    for length in range(min(max(map(len, markers), default=1) - 1, len(text)), 0, -1):
        end = text[-length:]
        if any(marker.startswith(end) for marker in markers if len(marker) > length):
            return length
    return 0
