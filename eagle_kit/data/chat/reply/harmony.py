"""Replies of gpt-oss in OpenAI's harmony format: messages of several channels.

``<|channel|>analysis<|message|>thought<|end|>`` is reasoning, the channels final and commentary are content,
and a message ``to=functions.NAME`` is a call whose text is its arguments
(https://github.com/openai/harmony). The markers are special tokens, which the text must have.
"""

import json
import re

from eagle_kit.data.chat.messages import Unusable
from eagle_kit.data.chat.reply.calls import make_call
from eagle_kit.data.chat.reply.parts import Collected, ReplyParts, blocks, len_of_beginning

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
CONSTRAIN = "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
"""Ends of a message; ``<|call|>`` and ``<|return|>`` end a reply."""
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, "<|end|>")
BEHIND_ROLE = (CHANNEL, MESSAGE, CONSTRAIN, " to=")
MOST_HEADER = 256
"""Characters of the longest header; what is longer is text."""
RECIPIENT = re.compile(r"\bto=([^\s<]++)")
FUNCTIONS = "functions."


def begun_message(prompt: str) -> str:
    """Header, and perhaps text, that a prompt has begun the reply with."""
    return prompt[max(prompt.rfind(START), 0) :] if START in prompt else ""


def begun_part(prompt: str) -> str:
    """Part of the reply whose message a prompt has begun, ``reasoning`` or ``content``; empty without any."""
    head, mark, _ = begun_message(prompt).partition(MESSAGE)
    if not mark:
        return ""
    return "reasoning" if _channel(head) == "analysis" else "content"


def _channel(header: str) -> str:
    return (header.partition(CHANNEL)[2].replace(CONSTRAIN, " ").split() or [""])[0]


class HarmonyReader:
    """:class:`~eagle_kit.data.chat.reply.parts.ReplyReader` of harmony's messages.

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
        self._held = ""
        self._name = ""
        self._written = ""
        self._step = self._in_header
        self._found = Collected()
        self._arguments: list[str] = []
        self._target = "content"
        self._is_first = {"content": True, "reasoning": True}
        self._joins = False
        head, mark, text = begun.partition(MESSAGE)
        self._begun = "" if mark else head
        if mark:
            self._begin(head, text)

    def feed(self, text: str) -> ReplyParts:
        """Read a further piece of text."""
        for block in blocks(text):
            self._held += block
            self._read(False)
        return self._found.take()

    def finish(self, end: str = "") -> ReplyParts:
        """Release what is held back, after the last piece; with the ``end`` of a message the last one is
        whole."""
        self._held += end if end in ENDS else ""
        self._read(True)
        return self._found.take()

    def _read(self, is_end: bool) -> None:
        while self._step(is_end):
            pass

    def _in_header(self, is_end: bool) -> bool:
        """Read a message's header, as far as the reply has it; one that the end cuts off says nothing."""
        text = self._held
        end = text.find(MESSAGE, 0, MOST_HEADER)

        # What is no header is text.
        if not self._is_header(text) or (end < 0 and len(text) >= MOST_HEADER):
            # A marker behind blanks is text too, where all of it lies in the longest header.
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
            self._say(text[:length])
            self._held = text[length:]
            return True

        # A header that is whole begins a message.
        if end < 0:
            self._held = "" if is_end else text
            return False
        self._begin(self._begun + text[:end], "")
        self._begun = ""
        self._held = text[end + len(MESSAGE) :]
        return True

    def _is_header(self, text: str) -> bool:
        """True for the beginning of a header, as far as it goes."""
        if CHANNEL in self._begun:
            return True
        text = self._begun + (text if self._begun else text.lstrip())
        role = f"{START}assistant"
        behind = text.removeprefix(role)
        known = BEHIND_ROLE if behind != text else (role, *BEHIND_ROLE)
        return any(behind.startswith(mark) or mark.startswith(behind) for mark in known)

    def _begin(self, header: str, text: str) -> None:
        """Begin a message; ``text`` of it was in the prompt."""
        header = header.lstrip()
        self._written = header.removeprefix(f"{START}assistant") + MESSAGE
        channel = _channel(header)
        recipient = RECIPIENT.search(header)
        self._name = recipient[1] if recipient is not None else ""
        if self._name.startswith(FUNCTIONS) and self._has_calls:
            self._step = self._in_call
            return
        self._step = self._in_text
        is_thought = channel == "analysis" and not self._name and self._has_thoughts
        self._target = "reasoning" if is_thought else "content"
        self._joins = not self._is_first[self._target] and not text
        if not is_thought and (self._name or channel not in ("final", "commentary", "")) and not text:
            self._say(self._written)

    def _in_text(self, is_end: bool) -> bool:
        text = self._held
        place, end = self._end(text)
        if place >= 0:
            self._say(text[:place])
            self._held = text[place + len(end) :]
            self._step = self._in_header
            return True
        kept = 0 if is_end else len_of_beginning(text, (*ENDS, START, CHANNEL))
        self._say(text[: len(text) - kept])
        self._held = text[len(text) - kept :]
        return False

    def _in_call(self, is_end: bool) -> bool:
        # Read the arguments, up to the end of the message.
        place, end = self._end(self._held)
        kept = 0 if is_end else len_of_beginning(self._held, (*ENDS, START, CHANNEL))
        until = place if place >= 0 else len(self._held) - kept
        self._arguments.append(self._held[:until])
        self._held = self._held[until + len(end) :]
        if place < 0 and not is_end:
            return False

        # Make the call; what is none is text.
        body = "".join(self._arguments)
        self._arguments = []
        self._step = self._in_header
        try:
            # Without an end the arguments were cut off.
            arguments = {} if end and not body.strip() else json.loads(body)
            self._found.calls.append(make_call(self._name.removeprefix(FUNCTIONS), arguments))
        except (Unusable, ValueError, RecursionError):
            self._target = "content"
            self._joins = not self._is_first["content"]
            self._say(self._written + body + end)
        return place >= 0

    @staticmethod
    def _end(text: str) -> tuple[int, str]:
        """Place of the first end of a message, and its marker, where that is no part of the next one."""
        found = [(text.index(end), end) for end in ENDS if end in text]
        found += [(text.index(mark), "") for mark in (START, CHANNEL) if mark in text]
        return min(found, default=(-1, ""))

    def _say(self, text: str) -> None:
        """Add to the part of this message; messages of a part are apart by a line end."""
        if not text:
            return
        text = f"\n{text}" if self._joins else text
        self._joins = False
        self._is_first[self._target] = False
        if self._target == "reasoning":
            self._found.think(text)
        else:
            self._found.say(text)
