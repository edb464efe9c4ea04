"""Conversations out of the records of published sets, whose form is recognised by their keys.

| keys | form |
|---|---|
| ``conversations`` of ``from`` and ``value`` | ShareGPT, with ``function_call`` and ``observation`` or not |
| the same with ``tools``, and ``<tool_call>`` in the text | Hermes function calling |
| ``messages`` | OpenAI's chats, with ``tool_calls``, ``tool`` turns and ``reasoning_content`` or without |
| ``conversation`` | the same (LMSYS-Chat-1M, WildChat) |
| ``data`` | a list of texts, of the user and the assistant by turns (UltraChat) |
| ``query``, ``tools``, ``answers`` | xLAM's function calls |
| one of :data:`PROMPT_KEYS`, one of :data:`REPLY_KEYS` | a text each, or a list of messages each |
| ``input_ids``, and ``loss_mask`` or ``labels`` | tokens (:class:`TokenRow`) |
| ``text`` | a text (:class:`RawText`) |

Tokens with a mask are read before turns, and a text where there is nothing else; of several lists of turns
the first that is not empty is read. Beside any of them: ``id``, ``category``, ``system`` (text), ``tools`` (a
list or its JSON text), ``chat_template_kwargs`` (an object or its JSON text), ``finish_reasons`` of
regenerated replies. Replies whose ``weight`` is 0, or ``train`` or ``loss`` false, are given and not learned.
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
    ROLES,
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
TURN_KEYS = ("conversations", "messages", "conversation")
PROMPT_KEYS = ("prompt", "instruction", "question", "query", "problem")
REPLY_KEYS = ("completion", "response", "output", "answer", "solution")
"""Instruction sets: Alpaca's ``input`` is read behind the instruction, and ``history`` (pairs) before it."""
SYSTEM_KEYS = ("system", "system_prompt")
MASK_KEYS = ("loss_mask", "assistant_masks", "labels")
IGNORED = -100
"""Label of a token that is not learned."""
LOSS_KEYS = ("weight", "train", "loss")
"""Keys of a message by which it is learned or not: OpenAI's and those of other trainers."""
NOT_LEARNED = "not learned"
"""Key of a message while its record is read."""
FORMS = "messages, prompt and reply, text, or input_ids and loss_mask"
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
        not_learned: indices of the assistant's messages that are given and not learned.
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
    not_learned: frozenset[int] = frozenset()

    def prompt(self, num_messages: int) -> ChatPrompt:
        """The first ``num_messages`` messages, with what else the template is given."""
        return ChatPrompt(self.messages[:num_messages], self.tools, self.chat_template_kwargs)

    @property
    def first_prompt(self) -> ChatPrompt:
        """The prompt up to the first user turn."""
        return self.prompt([message["role"] for message in self.messages].index("user") + 1)


@dataclass(frozen=True)
class RawText:
    """A text without turns, every token of which is learned behind the first one."""

    id: str
    text: str
    where: str
    category: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenRow:
    """Tokens, and which of them are learned.

    Attributes:
        ids: of the target's tokenizer, special tokens included.
        is_learned: for each token, whether it is to be produced.
    """

    id: str
    ids: tuple[int, ...]
    is_learned: tuple[bool, ...]
    where: str
    category: str = ""
    remarks: tuple[str, ...] = ()


Record = Conversation | RawText | TokenRow


def to_record(record: Any, where: str) -> Record:
    """Read one record of any form. Raises :class:`Unusable` with the reason."""
    if not isinstance(record, dict):
        raise Unusable("not an object")
    record = {key: value for key, value in record.items() if value is not None}
    remarks: dict[str, None] = {}
    name = str(record.get("id", where))
    if "input_ids" in record:
        mask = next((key for key in MASK_KEYS if key in record), None)
        if mask is not None:
            ids, is_learned = _tokens(record["input_ids"], record[mask], mask)
            category = _category(record, remarks)
            return TokenRow(name, ids, is_learned, where, category, tuple(remarks))
    if not _has_turns(record):
        if "text" in record:
            if not isinstance(record["text"], str) or not record["text"].strip():
                raise Unusable("a text that is empty or no text")
            if not is_unicode(record["text"]):
                raise Unusable("half a character (a lone surrogate)")
            return RawText(name, record["text"], where, _category(record, remarks), tuple(remarks))
        if "input_ids" in record:
            raise Unusable(f"input_ids without {', '.join(MASK_KEYS[:-1])} or {MASK_KEYS[-1]}")
    return to_conversation(record, where)


def _tokens(ids: Any, mask: Any, name: str) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Ids of the tokens, and which of them are learned. Raises :class:`Unusable`."""
    if not isinstance(ids, list) or not all(type(number) is int and number >= 0 for number in ids):
        raise Unusable("input_ids that are not a list of token ids")
    if not isinstance(mask, list) or len(mask) != len(ids):
        raise Unusable(f"{name} that is not a list of as many numbers as input_ids")
    if name == "labels":
        if not all(label in (IGNORED, number) for label, number in zip(mask, ids, strict=True)):
            raise Unusable(f"labels that are neither {IGNORED} nor the token itself")
        return tuple(ids), tuple(label != IGNORED for label in mask)
    if not all(one in (0, 1) for one in mask):
        raise Unusable(f"{name} of other numbers than 0 and 1")
    return tuple(ids), tuple(bool(one) for one in mask)


def _category(record: dict[str, Any], remarks: dict[str, None]) -> str:
    category = record.get("category", "")
    if isinstance(category, str):
        return category
    remarks["a category that is not text is not read"] = None
    return ""


def to_conversation(record: Any, where: str) -> Conversation:
    """Read one record of turns. Raises :class:`Unusable` with the reason."""
    if not isinstance(record, dict):
        raise Unusable("not an object")
    record = {key: value for key, value in record.items() if value is not None}

    # Read the turns.
    tools = read_tools(record.get("tools") or record.get("functions"))
    remarks: dict[str, None] = {}
    turns = _with_known_roles(_turns(record, remarks), remarks)
    messages = [_read(turn, remarks) for turn in turns]
    for turn in turns:
        for key in sorted({str(k) for k, v in turn.items() if v is not None} - KNOWN_KEYS - {*LOSS_KEYS}):
            remarks[f"the key {shown(key)} of a message is not read"] = None
        if len({json.dumps(turn[name]) for name in REASONING if turn.get(name)}) > 1:
            remarks["of several thoughts of a message one is read"] = None

    # Put a system message of the record itself first.
    system = next((record[key] for key in SYSTEM_KEYS if record.get(key)), "")
    if not isinstance(system, str):
        raise Unusable("a system that is not text")
    said = {"role": "system", "content": system}
    if system.strip() and messages[:1] != [said]:
        messages.insert(0, said)

    # Read calls and results that stand in the text; calls that the target wrote stay as it wrote them.
    regenerated = "finish_reasons" in record
    if tools and not regenerated:
        messages = _structured(messages, remarks)
    if not any(message["role"] == "user" for message in messages):
        raise Unusable("no user turn")

    # Leave out replies that nobody asked for.
    asked = _from_first_user(messages)
    if len(asked) < len(messages):
        remarks["it begins with a reply, which is left out"] = None

    # Note which replies are not learned.
    not_learned = frozenset(i for i, message in enumerate(asked) if NOT_LEARNED in message)
    if not_learned:
        remarks["replies whose weight is 0 are given and not learned"] = None
    asked = tuple({k: v for k, v in message.items() if k != NOT_LEARNED} for message in asked)

    category = _category(record, remarks)
    conversation = Conversation(
        str(record.get("id", where)),
        asked,
        where,
        tools,
        template_kwargs(record.get("chat_template_kwargs", {})),
        complete=_is_complete(record.get("finish_reasons")),
        regenerated=regenerated,
        from_start=len(asked) == len(messages),
        category=category,
        remarks=tuple(remarks),
        not_learned=not_learned,
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


def _has_turns(record: dict[str, Any]) -> bool:
    """True for a record with a key of turns, or of a prompt and a reply."""
    if any(key in record for key in (*TURN_KEYS, "data")):
        return True
    has_prompt = any(key in record for key in PROMPT_KEYS)
    return has_prompt and any(key in record for key in (*REPLY_KEYS, "answers"))


def _turns(record: dict[str, Any], remarks: dict[str, None]) -> list[dict[str, Any]]:
    """Turns of a record with the keys of OpenAI's messages."""
    # A list of turns: the first one that is not empty.
    lists = {key: _list(record[key]) for key in TURN_KEYS if key in record}
    lists = {key: found for key, found in lists.items() if isinstance(found, list)}
    filled = [key for key, found in lists.items() if found]
    if filled or (lists and not _has_pair(record)):
        return [_named_turn(turn) for turn in _dicts(lists[filled[0]] if filled else [])]
    texts = _list(record.get("data"))
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]

    # A prompt, and calls or a reply.
    if "query" in record and "answers" in record:
        calls = record["answers"]
        if isinstance(calls, str):
            calls = parse_json_text(calls, "answers that are not JSON")
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        return [{"role": "user", "content": record["query"]}, said]
    if not _has_pair(record):
        raise Unusable(f"no {FORMS}")
    prompts = [key for key in PROMPT_KEYS if key in record]
    replies = [key for key in REPLY_KEYS if key in record]
    if len(prompts) > 1 or len(replies) > 1:
        remarks[f"of {', '.join((*prompts, *replies))} only {prompts[0]} and {replies[0]} are read"] = None
    asked = _side(_with_input(record[prompts[0]], record.get("input")), "user")
    return [*_history(record.get("history")), *asked, *_side(record[replies[0]], "assistant")]


def _has_pair(record: dict[str, Any]) -> bool:
    return any(key in record for key in PROMPT_KEYS) and any(key in record for key in REPLY_KEYS)


def _named_turn(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn of ShareGPT with OpenAI's names of its keys; any other one as it is."""
    if "from" not in turn and "value" not in turn:
        return turn
    named = {"role": turn.get("from", turn.get("role")), "content": turn.get("value", turn.get("content"))}
    return {key: value for key, value in turn.items() if key not in ("from", "value")} | named


def _side(value: Any, role: str) -> list[dict[str, Any]]:
    """Turns of a prompt or of a reply: a list of messages, or a text."""
    if isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value):
        return _dicts(value)
    return [{"role": role, "content": value}]


def _with_input(prompt: Any, given: Any) -> Any:
    """An instruction with the text that it is about behind it."""
    if isinstance(prompt, str) and isinstance(given, str) and given.strip():
        return f"{prompt}\n\n{given}"
    return prompt


def _history(value: Any) -> list[dict[str, Any]]:
    """Turns before the prompt, as pairs of texts."""
    if value in (None, []):
        return []
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise Unusable("a history that is not a list of pairs")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in value for role, text in zip(roles, pair, strict=True)]


def _with_known_roles(turns: list[dict[str, Any]], remarks: dict[str, None]) -> list[dict[str, Any]]:
    """Turns whose only unknown role is the assistant's where no other is, or the user's where no other is,
    such as the name of a model."""
    roles = [str(turn.get("role")) for turn in turns]
    unknown = {role for role in roles if role.lower() not in ROLES}
    known = {ROLES[role.lower()] for role in roles if role.lower() in ROLES}
    missing = {"user", "assistant"} - known
    if len(unknown) != 1 or len(missing) != 1:
        return turns
    name = unknown.pop()
    role = missing.pop()
    if not all(isinstance(turn.get("role"), str) for turn in turns):
        return turns
    remarks[f"the role {shown(name)} is read as the {role}'s"] = None
    return [{**turn, "role": role} if turn["role"] == name else turn for turn in turns]


def _read(turn: dict[str, Any], remarks: dict[str, None]) -> Message:
    """A message, with the mark :data:`NOT_LEARNED` where its keys say that it is not learned."""
    message = read_message(turn)
    values = [turn[key] for key in LOSS_KEYS if turn.get(key) is not None]
    if any(type(value) not in (bool, int, float) for value in values):
        raise Unusable(f"a {', '.join(LOSS_KEYS)} of a message that is no number")
    if message["role"] != "assistant":
        if any(value != 0 for value in values):
            remarks["a weight of a message that is no reply is not read"] = None
        return message
    if any(value == 0 for value in values):
        return {**message, NOT_LEARNED: True}
    if any(value != 1 for value in values):
        remarks["a weight of a message other than 0 and 1 counts as 1"] = None
    return message


def _list(value: Any) -> Any:
    """Turns, which some sets keep as JSON text."""
    return parse_json_text(value, "turns that are not JSON") if isinstance(value, str) else value


def _dicts(turns: list[Any]) -> list[dict[str, Any]]:
    if not all(isinstance(turn, dict) for turn in turns):
        raise Unusable("a turn that is not an object")
    return turns


def template_kwargs(value: Any) -> dict[str, Any]:
    """Arguments of a chat template, as an object or its JSON text. Raises :class:`Unusable`."""
    if isinstance(value, str):
        value = parse_json_text(value, "chat_template_kwargs that are not JSON")
    if not isinstance(value, dict):
        raise Unusable("chat_template_kwargs that are not an object")
    return value


def _structured(messages: list[Message], remarks: dict[str, None]) -> list[Message]:
    """Messages of a record with tools whose calls and results are text, as Hermes writes them, in OpenAI's
    form; a system message that lists the tools is left to the chat template."""
    found: list[Message] = []
    for message in messages:
        role = message["role"]
        text = message["content"]
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
