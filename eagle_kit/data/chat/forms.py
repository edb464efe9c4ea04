"""Conversations out of the records of published sets, each told by its own keys.

| keys | form |
|---|---|
| ``conversations`` of ``from`` and ``value`` | ShareGPT, with ``function_call`` and ``observation`` or not |
| the same with ``tools``, and ``<tool_call>`` in the text | Hermes function calling |
| ``messages`` | OpenAI's chats, with ``tool_calls``, ``tool`` turns and ``reasoning_content`` or without |
| ``query``, ``tools``, ``answers`` | xLAM's function calls |
| ``prompt``, ``completion`` | a text each, or a list of messages each |

Beside any of them: ``id``, ``category``, ``system`` (text), ``tools`` (a list or its JSON text),
``chat_template_kwargs`` (an object or its JSON text), ``finish_reasons`` of regenerated replies.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_kit.data.chat.messages import (
    KNOWN_KEYS,
    ChatPrompt,
    Message,
    Tool,
    Unusable,
    parse_json_text,
    read_calls,
    read_message,
    read_tools,
)
from eagle_kit.data.chat.reply.calls import HERMES, TOOL_CALL
from eagle_kit.data.chat.reply.parts import read_reply
from eagle_kit.data.chat.reply.tags import TagReader

WHOLE = ("stop", "tool_calls", "function_call", "eos_token")
"""Finish reasons of a reply that came to its own end: OpenAI's, and text-generation-inference's."""
RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)


@dataclass(frozen=True)
class Conversation:
    """Turns in order, a user turn before any reply.

    Attributes:
        where: names file and record for people.
        messages: as chat templates take them.
        tools: definitions that the template shows the model.
        chat_template_kwargs: further arguments of the template.
        complete: False when the last reply did not come to its own end, so that its end must not be learned.
        regenerated: its replies are the target's own; those without calls or reasoning of their own are text
            as it was generated.
        from_start: False when the record began with replies to something it does not hold, which were left
            out.
        category: the record's own, or empty.
        remarks: what of the record was left out or read otherwise than it stands.
    """

    id: str
    messages: tuple[Message, ...]
    where: str
    tools: tuple[Tool, ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = True
    regenerated: bool = False
    from_start: bool = True
    category: str = ""
    remarks: tuple[str, ...] = ()

    def prompt(self, num_messages: int) -> ChatPrompt:
        """The first ``num_messages`` messages, with what else the template is given."""
        return ChatPrompt(self.messages[:num_messages], self.tools, self.chat_template_kwargs)

    @property
    def first_prompt(self) -> ChatPrompt:
        """The prompt up to the first user turn."""
        return self.prompt([message["role"] for message in self.messages].index("user") + 1)


def to_conversation(record: Any, where: str) -> Conversation:
    """Read one record. Raises :class:`Unusable` with the reason."""
    if not isinstance(record, dict):
        raise Unusable("not an object")
    record = {key: value for key, value in record.items() if value is not None}
    tools = read_tools(record.get("tools") or record.get("functions"))
    remarks: dict[str, None] = {}
    turns = _turns(record)
    messages = [read_message(turn) for turn in turns]
    for turn in turns:
        for key in sorted({str(k) for k, v in turn.items() if v is not None} - KNOWN_KEYS):
            remarks[f"the key {key!r} of a message is not read"] = None
    if isinstance(system := record.get("system"), str) and system.strip():
        messages.insert(0, {"role": "system", "content": system})
    regenerated = "finish_reasons" in record
    if tools and not regenerated:  # calls that the target wrote stay as it wrote them
        messages = _structured(messages, remarks)
    if not any(message["role"] == "user" for message in messages):
        raise Unusable("no user turn")
    kept = _from_first_user(messages)
    if len(kept) < len(messages):
        remarks["it begins with a reply, which is left out"] = None
    reasons, category = record.get("finish_reasons") or ["stop"], record.get("category")
    return Conversation(
        str(record.get("id", where)),
        kept,
        where,
        tools,
        _template_kwargs(record.get("chat_template_kwargs", {})),
        complete=reasons[-1] in WHOLE,
        regenerated=regenerated,
        from_start=len(kept) == len(messages),
        category=category if isinstance(category, str) else "",
        remarks=tuple(remarks),
    )


def _turns(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Turns of a record with the keys of OpenAI's messages."""
    if isinstance(found := record.get("conversations"), list):
        turns = []
        for turn in _dicts(found):
            named = {
                "role": turn.get("from", turn.get("role")),
                "content": turn.get("value", turn.get("content")),
            }
            turns.append({k: v for k, v in turn.items() if k not in ("from", "value")} | named)
        return turns
    if isinstance(found := record.get("messages"), list):
        return _dicts(found)
    if "query" in record and "answers" in record:
        answers = record["answers"]
        calls = parse_json_text(answers, "answers that are not JSON") if isinstance(answers, str) else answers
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        return [{"role": "user", "content": record["query"]}, said]
    if "prompt" in record and "completion" in record:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            return _dicts([*prompt, *completion])
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    raise Unusable("no conversations, messages, query and answers, or prompt and completion")


def _dicts(turns: list[Any]) -> list[dict[str, Any]]:
    if not all(isinstance(turn, dict) for turn in turns):
        raise Unusable("a turn that is not an object")
    return turns


def _template_kwargs(value: Any) -> dict[str, Any]:
    value = (
        parse_json_text(value, "chat_template_kwargs that are not JSON") if isinstance(value, str) else value
    )
    if not isinstance(value, dict):
        raise Unusable("chat_template_kwargs that are not an object")
    return value


def _structured(messages: list[Message], remarks: dict[str, None]) -> list[Message]:
    """Messages of a record with tools whose calls and results are text, as Hermes writes them, in OpenAI's
    form; a system message that lists the tools is left to the chat template."""
    found: list[Message] = []
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "system" and "<tools>" in text:
            remarks[
                "a system message that lists the tools is left out, since the chat template writes it"
            ] = None
        elif role == "assistant" and "tool_calls" not in message and TOOL_CALL in text:
            parts = read_reply(TagReader(has_thoughts=False, form=HERMES), text)
            if TOOL_CALL in parts.content:
                raise Unusable("a <tool_call> that cannot be read")
            calls = read_calls([call._asdict() for call in parts.calls])
            found.append(message | {"content": parts.content.strip(), "tool_calls": calls})
        elif role == "tool" and (results := RESULT.findall(text)):
            found += [message | {"content": result} for result in results]
        else:
            found.append(message)
    return found


def _from_first_user(messages: list[Message]) -> tuple[Message, ...]:
    """Without replies before the first user turn: nobody can be asked for them. ShareGPT cuts long
    conversations into records, a third of which begin so."""
    first = [message["role"] for message in messages].index("user")
    system = [message for message in messages[:first] if message["role"] not in ("assistant", "tool")]
    return (*system, *messages[first:])
