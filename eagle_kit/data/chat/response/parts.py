"""Parts of a generated response, and the interface of its readers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

BLOCK = 512
"""Characters that a reader processes at a time. To copy so many costs no more than a statement."""


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


@dataclass
class ResponseParts:
    """Parts of a response, or an addition to each of them. Calls are in the order in which they were
    written."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, later: "ResponseParts") -> None:
        """Append a later addition to this one."""
        self.reasoning += later.reasoning
        self.content += later.content
        self.calls += later.calls


class Collected:
    """Texts and calls of a response since they were last taken. Pieces are joined once, so the time is linear
    in their length."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self.calls: list[Call] = []

    def add_reasoning(self, text: str) -> None:
        """Append to the reasoning."""
        self._reasoning.append(text)

    def add_content(self, text: str) -> None:
        """Append to the content."""
        self._content.append(text)

    def take(self) -> ResponseParts:
        """Return the parts, and begin with empty ones."""
        parts = ResponseParts("".join(self._reasoning), "".join(self._content), self.calls)
        self._reasoning = []
        self._content = []
        self.calls = []
        return parts


class ResponseReader(Protocol):
    """Reader of one response, piece by piece.

    The parts do not depend on how the text is cut into pieces. Text that cannot be read as reasoning or calls
    stays in the content as it was written. Text is held back only while it may be the beginning of a marker,
    or is within a call.
    """

    def feed(self, text: str) -> ResponseParts:
        """Read a further piece of text."""

    def finish(self, end: str = "") -> ResponseParts:
        """Release text that is held back, after the last piece.

        Args:
            end: text of the token that ended the response; empty if the response was cut.
        """


def blocks(text: str) -> Iterator[str]:
    """Cut a text into pieces of at most ``BLOCK`` characters."""
    for start in range(0, len(text), BLOCK):
        yield text[start : start + BLOCK]


def read_response(reader: ResponseReader, text: str, end: str = "") -> ResponseParts:
    """Read a whole response with a new reader; ``end`` as in :meth:`ResponseReader.finish`."""
    parts = reader.feed(text)
    parts.add(reader.finish(end))
    return parts


def len_of_beginning(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of ``text`` that is the beginning, but not the whole, of one of
    ``markers``."""
    markers = tuple(markers)
    most = max(map(len, markers), default=1) - 1
    for length in range(min(most, len(text)), 0, -1):
        end = text[-length:]
        if any(marker.startswith(end) for marker in markers if len(marker) > length):
            return length
    return 0
