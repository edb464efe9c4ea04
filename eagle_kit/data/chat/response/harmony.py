"""Responses of gpt-oss in OpenAI's harmony format: messages of several channels.

``<|channel|>analysis<|message|>thought<|end|>`` is reasoning, the channels final and commentary are content,
and a message ``to=functions.NAME`` is a call whose text is its arguments
(https://github.com/openai/harmony). The markers are special tokens, which the text must have.
"""

import json
import re

from eagle_kit.data.chat.messages import Unusable
from eagle_kit.data.chat.response.calls import make_call
from eagle_kit.data.chat.response.parts import Collected, ResponseParts, blocks, len_of_beginning

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
CONSTRAIN = "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
"""Ends of a message; ``<|call|>`` and ``<|return|>`` end a response."""
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, "<|end|>")
AFTER_ROLE = (CHANNEL, MESSAGE, CONSTRAIN, " to=")
MOST_HEADER = 256
"""Most characters of a header; a longer one is text."""
RECIPIENT = re.compile(r"\bto=([^\s<]++)")
FUNCTIONS = "functions."


def begun_message(prompt: str) -> str:
    """Header, and perhaps text, of the message that a prompt has begun; empty if it has begun none."""
    start = prompt.rfind(START)
    if start < 0:
        return ""
    return prompt[start:]


def begun_part(prompt: str) -> str:
    """Part of the response that a prompt has begun, ``reasoning`` or ``content``; empty if it has begun
    none."""
    head, mark, _ = begun_message(prompt).partition(MESSAGE)
    if not mark:
        return ""
    return "reasoning" if _channel(head) == "analysis" else "content"


def _channel(header: str) -> str:
    """Channel of a header; empty if it has none."""
    words = header.partition(CHANNEL)[2].replace(CONSTRAIN, " ").split()
    return words[0] if words else ""


class HarmonyReader:
    """:class:`~eagle_kit.data.chat.response.parts.ResponseReader` of harmony's messages.

    Args:
        has_thoughts: whether the channel analysis is reasoning.
        has_calls: whether calls of functions are read.
        begun: :func:`begun_message` of the prompt.
    """

    def __init__(
        self,
        *,
        has_thoughts: bool,
        has_calls: bool,
        begun: str = f"{START}assistant",
    ) -> None:
        self._has_thoughts = has_thoughts
        self._has_calls = has_calls
        self._held = ""  # text that is not read yet
        self._step = self._in_header
        self._found = Collected()

        # The message that is read.
        self._name = ""  # its recipient
        self._written = ""  # its header as it was written
        self._arguments: list[str] = []
        self._target = "content"
        self._is_first = {"content": True, "reasoning": True}  # no message of the part was read
        self._joins = False  # a line end comes before the next text

        # The message that the prompt has begun: its header is whole, or part of it.
        head, mark, text = begun.partition(MESSAGE)
        self._begun = "" if mark else head
        if mark:
            self._begin(head, text)

    def feed(self, text: str) -> ResponseParts:
        """Read a further piece of text."""
        for block in blocks(text):
            self._held += block
            self._read(False)
        return self._found.take()

    def finish(self, end: str = "") -> ResponseParts:
        """Release what is held back, after the last piece. With the ``end`` of a message the last message is
        whole."""
        if end in ENDS:
            self._held += end
        self._read(True)
        return self._found.take()

    def _read(self, is_end: bool) -> None:
        """Read as far as the text goes. A step returns False if it needs more text."""
        while self._step(is_end):
            pass

    def _in_header(self, is_end: bool) -> bool:
        """Read a message's header. A header that the end of the response cuts off is left out."""
        text = self._held
        end = text.find(MESSAGE, 0, MOST_HEADER)

        # Anything but a header is text.
        if not self._is_header(text) or (end < 0 and len(text) >= MOST_HEADER):
            # A marker after blanks is text too, if it ends within the longest header.
            head = text[:MOST_HEADER]
            begun = head.lstrip()
            may_be_mark = any(mark.startswith(begun) and mark != begun for mark in (START, CHANNEL))
            if may_be_mark and not is_end and len(text) < MOST_HEADER:
                return False
            self._begun = ""
            self._target = "content"
            self._step = self._in_text
            self._joins = False
            mark = next((mark for mark in (START, CHANNEL) if begun.startswith(mark)), "")
            length = len(head) - len(begun) + len(mark)  # so that no marker is looked at again
            self._add_text(text[:length])
            self._held = text[length:]
            return True

        # A whole header begins a message.
        if end < 0:
            self._held = "" if is_end else text
            return False
        self._begin(self._begun + text[:end], "")
        self._begun = ""
        self._held = text[end + len(MESSAGE) :]
        return True

    def _is_header(self, text: str) -> bool:
        """True if ``text`` may be the beginning of a header, or goes on with the header that is begun."""
        if CHANNEL in self._begun:
            return True
        if self._begun:
            text = self._begun + text
        else:
            text = text.lstrip()
        role = f"{START}assistant"
        rest = text.removeprefix(role)
        marks = AFTER_ROLE if rest != text else (role, *AFTER_ROLE)
        return any(rest.startswith(mark) or mark.startswith(rest) for mark in marks)

    def _begin(self, header: str, text: str) -> None:
        """Begin a message.

        Args:
            text: its text in the prompt; empty for a message that begins in the response.
        """
        header = header.lstrip()
        self._written = header.removeprefix(f"{START}assistant") + MESSAGE
        channel = _channel(header)
        recipient = RECIPIENT.search(header)
        self._name = recipient[1] if recipient is not None else ""

        # A call.
        if self._name.startswith(FUNCTIONS) and self._has_calls:
            self._step = self._in_call
            return

        # A text. In the content, the header of a channel that is not read is text.
        self._step = self._in_text
        is_thought = channel == "analysis" and not self._name and self._has_thoughts
        self._target = "reasoning" if is_thought else "content"
        self._joins = not self._is_first[self._target] and not text
        is_plain = not self._name and channel in ("final", "commentary", "")
        if not (is_thought or is_plain or text):
            self._add_text(self._written)

    def _in_text(self, is_end: bool) -> bool:
        """Read the text of a message, up to its end."""
        text = self._held
        place, end = self._end(text)
        if place >= 0:
            self._add_text(text[:place])
            self._held = text[place + len(end) :]
            self._step = self._in_header
            return True
        until = len(text) - self._len_held_back(text, is_end)
        self._add_text(text[:until])
        self._held = text[until:]
        return False

    def _in_call(self, is_end: bool) -> bool:
        """Read the arguments of a call, and make it at the end of the message."""
        # Read the arguments.
        place, end = self._end(self._held)
        until = place
        if place < 0:
            until = len(self._held) - self._len_held_back(self._held, is_end)
        self._arguments.append(self._held[:until])
        self._held = self._held[until + len(end) :]
        if place < 0 and not is_end:
            return False

        # Make the call. If it cannot be read it is text. Without an end its arguments were cut off; with one
        # they may be empty.
        body = "".join(self._arguments)
        self._arguments = []
        self._step = self._in_header
        try:
            arguments = {} if end and not body.strip() else json.loads(body)
            self._found.calls.append(make_call(self._name.removeprefix(FUNCTIONS), arguments))
        except (Unusable, ValueError, RecursionError):
            self._target = "content"
            self._joins = not self._is_first["content"]
            self._add_text(self._written + body + end)
        return place >= 0

    @staticmethod
    def _len_held_back(text: str, is_end: bool) -> int:
        """Length of the end of ``text`` that may be the beginning of a marker."""
        if is_end:
            return 0
        return len_of_beginning(text, (*ENDS, START, CHANNEL))

    @staticmethod
    def _end(text: str) -> tuple[int, str]:
        """Place of the first end of a message, -1 without one, and its marker, which is empty if the next
        message begins there."""
        found = [(text.index(end), end) for end in ENDS if end in text]
        found += [(text.index(mark), "") for mark in (START, CHANNEL) if mark in text]
        return min(found, default=(-1, ""))

    def _add_text(self, text: str) -> None:
        """Add text to the part of this message. Messages of a part are separated by a line end."""
        if not text:
            return
        if self._joins:
            text = f"\n{text}"
        self._joins = False
        self._is_first[self._target] = False
        if self._target == "reasoning":
            self._found.add_reasoning(text)
        else:
            self._found.add_content(text)
