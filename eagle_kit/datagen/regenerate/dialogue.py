"""One conversation whose responses are generated again."""

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
from eagle_kit.data.chat.response.tags import END_THINK
from eagle_kit.datagen.regenerate.responder import GeneratedResponse

OPENING = r"(?:(?:i'm |i am )?(?:really |very |so )?sorry|i apologi[sz]e|unfortunately|as an ai)\b"
CANNOT = r"i(?:'m| am)? (?:can't|cannot|can not|won't|will not|unable to|not able to|not allowed to)"
DEEDS = r"help|assist|comply|provide|fulfil|create|generate|engage|answer|discuss|support|write|do that"
REFUSAL = re.compile(
    rf"\A\W*(?:{OPENING}.{{0,60}}?\b)?{CANNOT} (?:\w+ )?(?:{DEEDS})(?! but\b)", re.IGNORECASE | re.DOTALL
)
"""Beginning of a refusal in English, a heuristic. Files of patterns add to it."""
CUT = ("length", "context")
"""Finish reasons of a response that was cut at ``max_tokens`` or at the end of the engine's context."""
FAILED = ("error", "abort")
"""Finish reasons of a response that is always left out: the target failed, or the request was aborted."""
TRUNCATED = "a response was cut at max_tokens or the context's end"
REFUSED = "a response refuses"
EMPTY = "a response is empty"
ASKERS = ("user", "tool")
"""Roles of messages that are answered."""


@dataclass
class Dialogue:
    """A conversation in the course of regeneration.

    Attributes:
        id: id of the record.
        prompt: messages so far, tools, and arguments of the chat template.
        waiting: messages before each response that is not generated yet, oldest first: a human turn, or the
            recorded results of tools.
        sample: number of this conversation among several from the same record.
        category: category of the record, or empty.
        finish_reasons: finish reason of every response.
        ids: token ids of the last prompt and its response, if they are known.
        left_out: reason why the last response was left out, or empty.
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
        """Parameters of the next response. Its seed is a hash of the run's seed and the prompt."""
        prompt = self.next_prompt()
        hashed: list[Any] = [sampling.seed, list(prompt.messages)]
        more = [list(prompt.tools), dict(prompt.chat_template_kwargs), self.sample]
        if any(more):
            hashed += more
        text = json.dumps(hashed, ensure_ascii=False)
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
        return replace(sampling, seed=seed)

    def next_prompt(self) -> ChatPrompt:
        """The prompt of the next response."""
        return replace(self.prompt, messages=[*self.prompt.messages, *self.waiting[0]])

    def add_response(
        self, response: GeneratedResponse, *, refusals: Sequence[re.Pattern[str]], skip_truncated: bool
    ) -> None:
        """Append the next messages and their response, or leave the response out.

        A response that is left out ends the conversation, and so does one that was cut.

        Args:
            refusals: patterns of responses that are left out.
            skip_truncated: leave out responses that were cut.
        """
        # Responses that are left out.
        if response.finish_reason in FAILED:
            return self.end(f"a response ended with {response.finish_reason}")
        if skip_truncated and response.finish_reason in CUT:
            return self.end(TRUNCATED)
        if is_refusal(response.text, refusals):
            return self.end(REFUSED)

        # A response that was cut may have a thought alone.
        is_whole = response.finish_reason in WHOLE
        has_thought = bool(response.reasoning) and not is_whole
        if not (response.text.strip() or response.tool_calls or has_thought):
            return self.end(EMPTY)

        # The message.
        message: Message = {"role": "assistant", "content": response.text}
        if response.reasoning is not None:
            message["reasoning_content"] = response.reasoning
        if response.tool_calls:
            message["tool_calls"] = response.tool_calls
        if response.generated is not None:
            message["generated"] = response.generated
        self.prompt = replace(self.prompt, messages=[*self.next_prompt().messages, message])
        self.waiting = self.waiting[1:] if is_whole else []
        self.finish_reasons.append(response.finish_reason)
        self.ids = response.ids or []

    def end(self, reason: str = "") -> None:
        """End the conversation before its next response.

        Args:
            reason: reason in the list of what was left out; empty is not listed.
        """
        self.waiting = []
        self.left_out = reason

    def line(self, with_ids: bool) -> str:
        """Line of the file of responses."""
        record: dict[str, Any] = {"id": self.id}
        if self.category:
            record["category"] = self.category
        record["messages"] = on_the_wire(self.prompt.messages)
        if self.prompt.tools:
            record["tools"] = list(self.prompt.tools)
        if self.prompt.chat_template_kwargs:
            record["chat_template_kwargs"] = dict(self.prompt.chat_template_kwargs)
        if self.sample:
            record["sample"] = self.sample
        record["finish_reasons"] = self.finish_reasons
        if with_ids:
            record["ids"] = self.ids
        return json.dumps(record, ensure_ascii=False) + "\n"

    def left_out_line(self) -> str:
        """Line of the list of what was left out."""
        record = {
            "id": self.id,
            "first": self.first,
            "sample": self.sample,
            "reason": self.left_out,
            "replies_kept": len(self.finish_reasons),
        }
        return json.dumps(record, ensure_ascii=False) + "\n"


def is_refusal(text: str, patterns: Sequence[re.Pattern[str]] = (REFUSAL,)) -> bool:
    """True if one of ``patterns`` matches the beginning of a response, behind its thought.

    The pattern sees ``'`` in place of ``’``.
    """
    text = text.rpartition(END_THINK)[2].lstrip().replace("’", "'")
    return any(pattern.match(text) is not None for pattern in patterns)


def read_refusals(path: Path) -> tuple[str, ...]:
    """Read patterns of refusals from a file, a regular expression of Python on each line.

    Empty lines and lines that begin with ``#`` are skipped.

    Raises:
        UserError: a line is no regular expression, or the file has none.
    """
    remedy = "Write a regular expression of Python on each line."
    patterns = []
    for number, line in enumerate(read_text(path, remedy).splitlines(), 1):
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        try:
            refusal_pattern(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise UserError(f"{path}, line {number}, is no regular expression ({error}).", remedy) from None
        patterns.append(pattern)
    if not patterns:
        raise UserError(f"{path} has no pattern.", remedy)
    return tuple(patterns)


def refusal_pattern(text: str) -> re.Pattern[str]:
    """Compile a pattern of refusals, in which case does not matter and ``.`` is any character."""
    return re.compile(text, re.IGNORECASE | re.DOTALL)


def script(conversation: Conversation, max_turns: int) -> tuple[list[Message], list[list[Message]]]:
    """Cut a conversation at its responses.

    Args:
        max_turns: maximum number of human turns; the conversation ends before an empty one.

    Returns:
        Messages before the first human turn, and a block of messages before each response: a human turn, or
        the recorded results of tools.
    """
    roles = [message["role"] for message in conversation.messages]
    first = roles.index("user")
    blocks: list[list[Message]] = []
    num_turns = 0
    last_asker = ""  # role of the last human turn or result of a tool in an open block
    is_open = False
    for message in conversation.messages[first:]:
        # A response closes the block.
        role = message["role"]
        if role == "assistant":
            is_open = False
            continue
        if role == "user":
            num_turns += 1
            if num_turns > max_turns or not message["content"].strip():
                break

        # A block has one human turn, or the results of several tools.
        if not is_open:
            blocks.append([])
            last_asker = ""
        elif role in ASKERS and last_asker and not (role == last_asker == "tool"):
            blocks.append([])
        blocks[-1].append(message)
        is_open = True
        if role in ASKERS:
            last_asker = role

    # Messages behind the last of them get no response.
    while blocks and not any(each["role"] in ASKERS for each in blocks[-1]):
        blocks.pop()
    return list(conversation.messages[:first]), blocks


def texts(blocks: list[list[Message]]) -> Iterator[str]:
    """The human turns among messages."""
    return (message["content"] for block in blocks for message in block if message["role"] == "user")
