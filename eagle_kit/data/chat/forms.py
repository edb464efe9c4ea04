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

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_kit.core.errors import shown
from eagle_kit.core.files import is_unicode
from eagle_kit.data.chat.messages import (
    KNOWN_KEYS,
    REASONING,
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
            remarks[f"the key {shown(key)} of a message is not read"] = None
        if len({json.dumps(turn[name]) for name in REASONING if turn.get(name)}) > 1:
            remarks["of several thoughts of a message one is read"] = None
    if not isinstance(system := record.get("system") or "", str):
        raise Unusable("a system that is not text")
    if system.strip() and messages[:1] != [said := {"role": "system", "content": system}]:
        messages.insert(0, said)
    regenerated = "finish_reasons" in record
    if tools and not regenerated:  # calls that the target wrote stay as it wrote them
        messages = _structured(messages, remarks)
    if not any(message["role"] == "user" for message in messages):
        raise Unusable("no user turn")
    kept = _from_first_user(messages)
    if len(kept) < len(messages):
        remarks["it begins with a reply, which is left out"] = None
    category = record.get("category", "")
    if not isinstance(category, str):
        remarks["a category that is not text is not read"], category = None, ""
    conversation = Conversation(
        str(record.get("id", where)),
        kept,
        where,
        tools,
        template_kwargs(record.get("chat_template_kwargs", {})),
        complete=_is_complete(record.get("finish_reasons")),
        regenerated=regenerated,
        from_start=len(kept) == len(messages),
        category=category,
        remarks=tuple(remarks),
    )
    _check_json(conversation)
    return conversation


def _is_complete(reasons: Any) -> bool:
    """True unless the last of ``finish_reasons`` says that a reply was cut."""
    if not (isinstance(reasons, list | None) and all(isinstance(each, str) for each in reasons or ())):
        raise Unusable("finish_reasons that are not a list of texts")
    return not reasons or reasons[-1] in WHOLE


def _check_json(conversation: Conversation) -> None:
    """Raise :class:`Unusable` for what cannot be written: values of Arrow that JSON does not have, such as
    dates, and half characters."""
    about = [conversation.id, conversation.category, conversation.messages, conversation.tools]
    try:
        text = json.dumps([*about, dict(conversation.chat_template_kwargs)], ensure_ascii=False)
    except TypeError as error:
        raise Unusable(f"a value that JSON does not have ({error})") from None
    if not is_unicode(text):
        raise Unusable("half a character (a lone surrogate)")


def _turns(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Turns of a record with the keys of OpenAI's messages."""
    record = {
        key: _list(value) if key in ("conversations", "messages") else value for key, value in record.items()
    }
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


def _list(value: Any) -> Any:
    """Turns, which some sets keep as JSON text."""
    return parse_json_text(value, "turns that are not JSON") if isinstance(value, str) else value


def _dicts(turns: list[Any]) -> list[dict[str, Any]]:
    if not all(isinstance(turn, dict) for turn in turns):
        raise Unusable("a turn that is not an object")
    return turns


def template_kwargs(value: Any) -> dict[str, Any]:
    """Arguments of a chat template, as an object or its JSON text. Raises :class:`Unusable`."""
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
            if RESULT.sub("", text).strip():
                remarks["text beside a <tool_response> is left out"] = None
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
