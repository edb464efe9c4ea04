"""Responses read by a checkpoint's own ``response_template``, with the parser of transformers.

That parser raises for a call that cannot be read, and does not name the text of its markers. So it is fed
character by character: the text of a call is then known, and becomes content if the parser raises.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from eagle_kit.data.chat.messages import REASONING, Tool, Unusable
from eagle_kit.data.chat.response.calls import calls_of
from eagle_kit.data.chat.response.parts import Collected, ResponseParts

CALLS = "tool_calls"
UNREADABLE = (ValueError, KeyError, TypeError, RecursionError, Unusable)


class CheckpointReader:
    """:class:`~eagle_kit.data.chat.response.parts.ResponseReader` of a response template.

    Args:
        tokenizer: has the template.
        prompt: text of the prompt, its special tokens included.
        tools: definitions of the request's tools, which have the types of arguments.
        has_thoughts: whether reasoning is read.
        has_calls: whether calls are read.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: str,
        *,
        tools: Sequence[Tool] = (),
        has_thoughts: bool,
        has_calls: bool,
    ) -> None:
        self._parser = tokenizer.get_response_parser(prefix=prompt, tools=list(tools) or None)
        self._fields = tokenizer.response_template["fields"]
        self._texts: set[str] = set()
        for name, about in self._fields.items():
            if about.get("content", "text") == "text" and (has_thoughts or name not in REASONING):
                self._texts.add(name)
        self._has_calls = has_calls
        self._raw: deque[str] = deque()  # characters of the response that are in no part yet
        self._is_broken = False
        self._parts = Collected()

    def feed(self, text: str) -> ResponseParts:
        """Read a further piece of text."""
        for character in text:
            self._raw.append(character)
            if not self._is_broken:
                try:
                    self._take(self._parser.feed(character), num_ahead=1)
                except UNREADABLE:
                    self._is_broken = True
            if self._is_broken:
                self._give_up()
        return self._parts.take()

    def finish(self, end: str = "") -> ResponseParts:
        """Release what is held back, after the last piece."""
        if not self._is_broken:
            try:
                self._take(self._parser.finalize()[1], num_ahead=0)
            except UNREADABLE:
                self._give_up()
        return self._parts.take()

    def _give_up(self) -> None:
        """Add all characters that are in no part to the content."""
        self._parts.add_content("".join(self._raw))
        self._raw.clear()

    def _pop(self, count: int) -> str:
        """Remove the first ``count`` characters that are in no part, or all if there are fewer."""
        return "".join(self._raw.popleft() for _ in range(min(count, len(self._raw))))

    def _take(self, events: Sequence[dict[str, Any]], num_ahead: int) -> None:
        """Apply events of the parser.

        Args:
            num_ahead: characters that the parser reads beyond a marker that is a pattern.
        """
        for i, event in enumerate(events):
            # Characters through the marker of the event.
            name = event["field"]
            kind = event["type"].removeprefix("region_")
            num_read = len(self._raw)
            if f"{kind}_pattern" in self._fields[name]:
                num_read -= num_ahead

            # Text of a part, or the beginning of one.
            if kind == "chunk":
                if name in self._texts:
                    self._add(name, event["text"])
            elif kind == "open":
                if name in self._texts:
                    self._pop(num_read)

            # The end of a part: a call, a part that is not read and becomes content, or a text.
            elif name == CALLS and self._has_calls:
                self._parts.calls += calls_of(event["value"])
                self._pop(num_read)
            elif name not in self._texts:
                self._parts.add_content(self._pop(num_read))
            elif not any(later["type"] == "region_open" for later in events[i + 1 :]):
                self._pop(num_read)

    def _add(self, name: str, text: str) -> None:
        """Add text to the reasoning or the content."""
        self._pop(len(text))
        if name in REASONING:
            self._parts.add_reasoning(text)
        else:
            self._parts.add_content(text)
