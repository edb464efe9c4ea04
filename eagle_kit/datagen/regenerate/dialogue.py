"""One conversation whose assistant turns are said anew."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import read_text
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.data.chat.forms import WHOLE, Conversation
from eagle_kit.data.chat.messages import ChatPrompt, Message, on_the_wire
from eagle_kit.data.chat.reply.tags import END_THINK
from eagle_kit.datagen.regenerate.responder import Reply

OPENING = r"(?:(?:i'm |i am )?(?:really |very |so )?sorry|i apologi[sz]e|unfortunately|as an ai)\b"
CANNOT = r"i(?:'m| am)? (?:can't|cannot|can not|won't|will not|unable to|not able to|not allowed to)"
DEEDS = r"help|assist|comply|provide|fulfil|create|generate|engage|answer|discuss|support|write|do that"
REFUSAL = re.compile(
    rf"\A\W*(?:{OPENING}.{{0,60}}?\b)?{CANNOT} (?:\w+ )?(?:{DEEDS})(?! but\b)", re.IGNORECASE | re.DOTALL
)
"""Beginning of a refusal, as English replies have it; a rule of thumb. Files of patterns add to it."""
CUT = ("length", "context")
"""Finish reasons of a reply cut at ``max_tokens``, and at the end of the engine's context."""
FAILED = ("error", "abort")
"""Finish reasons of a reply that is never kept: the target failed, or somebody ended it."""
TRUNCATED, REFUSED = "a reply was cut at max_tokens or the context's end", "a reply refuses"
EMPTY = "a reply is empty"


@dataclass
class Dialogue:
    """A conversation being answered.

    Attributes:
        prompt: what has been said, tools, and arguments of the chat template.
        waiting: messages to put before each reply that is still to be made, oldest first: a human turn, or
            the recorded results of tools.
        sample: which of several conversations from the same prompt.
        category: of the record, or empty.
        left_out: why its last reply is left out, or empty.
        first: the first human turn.
    """

    id: str
    prompt: ChatPrompt
    waiting: list[list[Message]]
    sample: int = 0
    category: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    left_out: str = ""

    def __post_init__(self) -> None:
        self.first = next(texts(self.waiting), "")

    def params(self, sampling: SamplingParams) -> SamplingParams:
        """Parameters of the next reply, whose seed is a hash of the run's seed and all that was said."""
        asked = self.ask()
        more = [list(asked.tools), dict(asked.chat_template_kwargs), self.sample]
        said = [sampling.seed, list(asked.messages), *(more if any(more) else ())]
        text = json.dumps(said, ensure_ascii=False)
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
        return replace(sampling, seed=seed)

    def ask(self) -> ChatPrompt:
        """The prompt of the next reply."""
        return replace(self.prompt, messages=[*self.prompt.messages, *self.waiting[0]])

    def take(self, reply: Reply, *, refusals: Sequence[re.Pattern[str]], skip_truncated: bool) -> None:
        """Put the next messages and their reply into the conversation; a cut, empty, failed or unwanted reply
        ends it, and all but the cut are left out; of a cut reply, a thought alone is no empty one.

        Args:
            refusals: beginnings of replies that are left out.
            skip_truncated: leave out cut replies.
        """
        if reply.finish_reason in FAILED:
            return self.end(f"a reply ended with {reply.finish_reason}")
        if skip_truncated and reply.finish_reason in CUT:
            return self.end(TRUNCATED)
        if is_refusal(reply.text, refusals):
            return self.end(REFUSED)
        is_whole = reply.finish_reason in WHOLE
        if not (reply.text.strip() or reply.tool_calls or (reply.reasoning and not is_whole)):
            return self.end(EMPTY)
        said: Message = {"role": "assistant", "content": reply.text}
        if reply.reasoning is not None:
            said["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            said["tool_calls"] = reply.tool_calls
        if reply.generated is not None:
            said["generated"] = reply.generated
        self.prompt = replace(self.prompt, messages=[*self.ask().messages, said])
        self.waiting = self.waiting[1:] if is_whole else []
        self.finish_reasons.append(reply.finish_reason)
        self.ids = reply.ids or []

    def end(self, reason: str = "") -> None:
        """Ask for no further reply, for a reason that is counted."""
        self.waiting, self.left_out = [], reason

    def line(self, with_ids: bool) -> str:
        """Line of the file."""
        record: dict[str, Any] = {"id": self.id} | ({"category": self.category} if self.category else {})
        record["messages"] = on_the_wire(self.prompt.messages)
        if self.prompt.tools:
            record["tools"] = list(self.prompt.tools)
        if self.prompt.chat_template_kwargs:
            record["chat_template_kwargs"] = dict(self.prompt.chat_template_kwargs)
        if self.sample:
            record["sample"] = self.sample
        record["finish_reasons"] = self.finish_reasons
        return json.dumps(record | ({"ids": self.ids} if with_ids else {}), ensure_ascii=False) + "\n"

    def left_out_line(self) -> str:
        """Line of the list of what was left out."""
        about = {"id": self.id, "first": self.first, "sample": self.sample, "reason": self.left_out}
        return json.dumps(about | {"replies_kept": len(self.finish_reasons)}, ensure_ascii=False) + "\n"


def is_refusal(text: str, patterns: Sequence[re.Pattern[str]] = (REFUSAL,)) -> bool:
    """True for a reply that begins as one of ``patterns``; what was thought before it does not count, and
    ``’`` is ``'``."""
    text = text.rpartition(END_THINK)[2].lstrip().replace("’", "'")
    return any(pattern.match(text) is not None for pattern in patterns)


def read_refusals(path: Path) -> tuple[str, ...]:
    """Patterns of refusals out of a file: a regular expression of Python a line; empty lines and those that
    begin with ``#`` are none. Raises UserError for one that is no regular expression."""
    remedy = "Write a regular expression of Python on each line."
    found = []
    for number, line in enumerate(read_text(path, remedy).splitlines(), 1):
        if (pattern := line.strip()) and not pattern.startswith("#"):
            try:
                refusal_pattern(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise UserError(
                    f"{path}, line {number}, is no regular expression ({error}).", remedy
                ) from None
            found.append(pattern)
    if not found:
        raise UserError(f"{path} has no pattern.", remedy)
    return tuple(found)


def refusal_pattern(text: str) -> re.Pattern[str]:
    """Compile a pattern of refusals, in which case does not matter and ``.`` is any character."""
    return re.compile(text, re.IGNORECASE | re.DOTALL)


def script(conversation: Conversation, max_turns: int) -> tuple[list[Message], list[list[Message]]]:
    """Messages before the first human turn, and those before each reply: a human turn each, up to an empty
    one or ``max_turns`` of them, or results of tools as they were recorded."""
    roles = [message["role"] for message in conversation.messages]
    first = roles.index("user")
    blocks: list[list[Message]] = []
    num_turns, is_open = 0, False
    for message in conversation.messages[first:]:
        if message["role"] == "assistant":
            is_open = False
            continue
        if message["role"] == "user":
            num_turns += 1
            if num_turns > max_turns or not message["content"].strip():
                break
        before = [each["role"] for each in blocks[-1] if each["role"] in ("user", "tool")] if is_open else []
        wants_reply = (
            message["role"] in ("user", "tool") and before and (message["role"], before[-1]) != ("tool",) * 2
        )
        if not is_open or wants_reply:
            blocks.append([])
        blocks[-1].append(message)
        is_open = True
    while blocks and not any(each["role"] in ("user", "tool") for each in blocks[-1]):
        blocks.pop()
    return list(conversation.messages[:first]), blocks


def texts(blocks: list[list[Message]]) -> Iterator[str]:
    """The human turns among messages."""
    return (message["content"] for block in blocks for message in block if message["role"] == "user")
