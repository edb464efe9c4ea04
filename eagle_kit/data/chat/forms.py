"""Conversations out of the records of published sets, whose form is recognised by their keys.

| keys | form |
|---|---|
| ``conversations`` of ``from`` and ``value`` | ShareGPT, with ``function_call`` and ``observation`` or not |
| the same with ``tools``, and ``<tool_call>`` in the text | Hermes function calling |
| ``messages`` | OpenAI's chats, with ``tool_calls``, ``tool`` turns and ``reasoning_content`` or without |
| ``conversation`` | the same (LMSYS-Chat-1M, WildChat) |
| ``data`` | a list of texts, of the user and the assistant by turns (UltraChat) |
| ``query``, ``tools``, ``answers`` | xLAM's function calls |
| one of :data:`PROMPT_KEYS`, one of :data:`RESPONSE_KEYS` | a text each, or a list of messages each |
| ``input_ids``, and ``loss_mask`` or ``labels`` | tokens (:class:`TokenRow`) |
| ``text`` | a text (:class:`RawText`) |

Tokens with a mask are read before turns, and a text where there is nothing else; of several lists of turns
the first that is not empty is read. Beside any of them: ``id``, ``category``, ``system`` (text), ``tools`` (a
list or its JSON text), ``chat_template_kwargs`` (an object or its JSON text), ``finish_reasons`` of
regenerated responses. Responses whose ``weight`` is 0, or ``train`` or ``loss`` false, are given and not
learned.
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
from eagle_kit.data.chat.response.calls import HERMES, TOOL_CALL
from eagle_kit.data.chat.response.parts import read_response
from eagle_kit.data.chat.response.tags import TagReader

WHOLE = ("stop", "tool_calls", "function_call", "eos_token")
"""Finish reasons of a response that the model ended itself: OpenAI's, and text-generation-inference's."""
TURN_KEYS = ("conversations", "messages", "conversation")
PROMPT_KEYS = ("prompt", "instruction", "question", "query", "problem")
RESPONSE_KEYS = ("completion", "response", "output", "answer", "solution")
"""Instruction sets: Alpaca's ``input`` is read after the instruction, and ``history`` (pairs) before it."""
SYSTEM_KEYS = ("system", "system_prompt")
MASK_KEYS = ("loss_mask", "assistant_masks", "labels")
IGNORED = -100
"""Label of a token that is not learned."""
LOSS_KEYS = ("weight", "train", "loss")
"""Keys of a message by which it is learned or not: OpenAI's and those of other trainers."""
NOT_LEARNED = "not learned"
"""Key that marks a message while its record is read."""
FORMS = "messages, prompt and response, text, or input_ids and loss_mask"
RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)


@dataclass(frozen=True)
class Conversation:
    """Turns in order, a user turn before any response.

    Attributes:
        where: names file and record for people.
        messages: as chat templates take them.
        tools: definitions that the template shows the model.
        chat_template_kwargs: further arguments of the template.
        complete: False if the last response was cut, so that its end must not be learned.
        regenerated: the responses are the target's own. Responses without calls and without a field of
            reasoning are text as it was generated.
        from_start: False if the record began with responses to turns that it does not hold. These responses
            were left out.
        category: the record's own, or empty.
        remarks: parts of the record that were left out or changed, a clause each.
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
        """The first ``num_messages`` messages, with tools and arguments of the template."""
        return ChatPrompt(self.messages[:num_messages], self.tools, self.chat_template_kwargs)

    @property
    def first_prompt(self) -> ChatPrompt:
        """The prompt up to the first user turn."""
        return self.prompt([message["role"] for message in self.messages].index("user") + 1)


@dataclass(frozen=True)
class RawText:
    """A text without turns, every token of which but the first one is learned."""

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
    remarks: dict[str, None] = {}  # an ordered set
    name = str(record.get("id", where))

    # Tokens with a mask.
    if "input_ids" in record:
        mask = next((key for key in MASK_KEYS if key in record), None)
        if mask is not None:
            ids, is_learned = _tokens(record["input_ids"], record[mask], mask)
            category = _category(record, remarks)
            return TokenRow(name, ids, is_learned, where, category, tuple(remarks))

    # Turns.
    if _has_turns(record):
        return to_conversation(record, where)

    # A text.
    if "text" in record:
        text = record["text"]
        if not isinstance(text, str) or not text.strip():
            raise Unusable("a text that is empty or no text")
        if not is_unicode(text):
            raise Unusable("half a character (a lone surrogate)")
        category = _category(record, remarks)
        return RawText(name, text, where, category, tuple(remarks))

    # None of these: name the reason.
    if "input_ids" in record:
        raise Unusable(f"input_ids without {', '.join(MASK_KEYS[:-1])} or {MASK_KEYS[-1]}")
    return to_conversation(record, where)


def _tokens(ids: Any, mask: Any, name: str) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Ids of the tokens, and which of them are learned. Raises :class:`Unusable`.

    Args:
        name: key of the mask.
    """
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
    """The category of a record; empty, with a remark if it is no text."""
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
        _note_unread(turn, remarks)

    # Put a system message of the record itself first.
    system = next((record[key] for key in SYSTEM_KEYS if record.get(key)), "")
    if not isinstance(system, str):
        raise Unusable("a system that is not text")
    system_message = {"role": "system", "content": system}
    if system.strip() and messages[:1] != [system_message]:
        messages.insert(0, system_message)

    # Read calls and results that are in the text. Calls that the target generated stay as they are.
    regenerated = "finish_reasons" in record
    if tools and not regenerated:
        messages = _structured(messages, remarks)
    if not any(message["role"] == "user" for message in messages):
        raise Unusable("no user turn")

    # Leave out responses before the first user turn.
    kept = _from_first_user(messages)
    if len(kept) < len(messages):
        remarks["it begins with a response, which is left out"] = None

    # Find the responses that are not learned, and remove their marks.
    not_learned = frozenset(i for i, message in enumerate(kept) if NOT_LEARNED in message)
    if not_learned:
        remarks["responses whose weight is 0 are given and not learned"] = None
    kept = tuple({k: v for k, v in message.items() if k != NOT_LEARNED} for message in kept)

    category = _category(record, remarks)
    conversation = Conversation(
        id=str(record.get("id", where)),
        messages=kept,
        where=where,
        tools=tools,
        chat_template_kwargs=template_kwargs(record.get("chat_template_kwargs", {})),
        complete=_is_complete(record.get("finish_reasons")),
        regenerated=regenerated,
        from_start=len(kept) == len(messages),
        category=category,
        remarks=tuple(remarks),
        not_learned=not_learned,
    )
    _check_json(conversation)
    return conversation


def _note_unread(turn: dict[str, Any], remarks: dict[str, None]) -> None:
    """Add remarks about keys of a turn that are not read."""
    keys = {str(key) for key, value in turn.items() if value is not None}
    for key in sorted(keys - KNOWN_KEYS - {*LOSS_KEYS}):
        remarks[f"the key {shown(key)} of a message is not read"] = None
    thoughts = {json.dumps(turn[name]) for name in REASONING if turn.get(name)}
    if len(thoughts) > 1:
        remarks["of several thoughts of a message one is read"] = None


def _is_complete(reasons: Any) -> bool:
    """True unless the last of ``finish_reasons`` is that of a response that was cut."""
    if reasons is None:
        return True
    if not isinstance(reasons, list) or not all(isinstance(reason, str) for reason in reasons):
        raise Unusable("finish_reasons that are not a list of texts")
    return not reasons or reasons[-1] in WHOLE


def _check_json(conversation: Conversation) -> None:
    """Raise :class:`Unusable` for values that JSON cannot hold: those of Arrow such as dates, and half
    characters."""
    values = [
        conversation.id,
        conversation.category,
        conversation.messages,
        conversation.tools,
        dict(conversation.chat_template_kwargs),
    ]
    try:
        text = json.dumps(values, ensure_ascii=False)
    except TypeError as error:
        raise Unusable(f"a value that JSON does not have ({error})") from None
    if not is_unicode(text):
        raise Unusable("half a character (a lone surrogate)")


def _has_turns(record: dict[str, Any]) -> bool:
    """True for a record with a key of turns, or of a prompt and a response."""
    if any(key in record for key in (*TURN_KEYS, "data")):
        return True
    has_prompt = any(key in record for key in PROMPT_KEYS)
    return has_prompt and any(key in record for key in (*RESPONSE_KEYS, "answers"))


def _turns(record: dict[str, Any], remarks: dict[str, None]) -> list[dict[str, Any]]:
    """Turns of a record with the keys of OpenAI's messages."""
    # A list of turns: the first one that is not empty.
    lists = []
    for key in TURN_KEYS:
        if key in record:
            found = _list(record[key])
            if isinstance(found, list):
                lists.append(found)
    for found in lists:
        if found:
            return [_named_turn(turn) for turn in _dicts(found)]
    if lists and not _has_pair(record):
        return []

    # Texts by turns.
    texts = _list(record.get("data"))
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]

    # A prompt, and calls or a response.
    if "query" in record and "answers" in record:
        calls = record["answers"]
        if isinstance(calls, str):
            calls = parse_json_text(calls, "answers that are not JSON")
        prompt = {"role": "user", "content": record["query"]}
        return [prompt, {"role": "assistant", "content": "", "tool_calls": calls}]
    if not _has_pair(record):
        raise Unusable(f"no {FORMS}")
    prompts = [key for key in PROMPT_KEYS if key in record]
    responses = [key for key in RESPONSE_KEYS if key in record]
    if len(prompts) > 1 or len(responses) > 1:
        names = ", ".join((*prompts, *responses))
        remarks[f"of {names} only {prompts[0]} and {responses[0]} are read"] = None
    prompt = _with_input(record[prompts[0]], record.get("input"))
    history = _history(record.get("history"))
    return [*history, *_side(prompt, "user"), *_side(record[responses[0]], "assistant")]


def _has_pair(record: dict[str, Any]) -> bool:
    """True for a record with a prompt and a response."""
    return any(key in record for key in PROMPT_KEYS) and any(key in record for key in RESPONSE_KEYS)


def _named_turn(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn of ShareGPT with OpenAI's names of its keys; any other one as it is."""
    if "from" not in turn and "value" not in turn:
        return turn
    named = {"role": turn.get("from", turn.get("role")), "content": turn.get("value", turn.get("content"))}
    return {key: value for key, value in turn.items() if key not in ("from", "value")} | named


def _side(value: Any, role: str) -> list[dict[str, Any]]:
    """Turns of a prompt or of a response: a list of messages, or a text."""
    if isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value):
        return _dicts(value)
    return [{"role": role, "content": value}]


def _with_input(prompt: Any, given: Any) -> Any:
    """An instruction followed by the text that it is about."""
    if isinstance(prompt, str) and isinstance(given, str) and given.strip():
        return f"{prompt}\n\n{given}"
    return prompt


def _history(value: Any) -> list[dict[str, Any]]:
    """Turns before the prompt, as pairs of texts."""
    if value in (None, []):
        return []
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise Unusable("a history that is not a list of pairs")
    turns = []
    for prompt, response in value:
        turns.append({"role": "user", "content": prompt})
        turns.append({"role": "assistant", "content": response})
    return turns


def _with_known_roles(turns: list[dict[str, Any]], remarks: dict[str, None]) -> list[dict[str, Any]]:
    """Turns with the roles of a conversation. If one role is unknown, such as the name of a model, and either
    the user's or the assistant's is missing, the unknown role is the missing one."""
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
    """A message, with the mark :data:`NOT_LEARNED` if one of ``LOSS_KEYS`` is 0 or false."""
    message = read_message(turn)
    values = [turn[key] for key in LOSS_KEYS if turn.get(key) is not None]
    if any(type(value) not in (bool, int, float) for value in values):
        raise Unusable(f"a {', '.join(LOSS_KEYS)} of a message that is no number")
    if message["role"] != "assistant":
        if any(value != 0 for value in values):
            remarks["a weight of a message that is no response is not read"] = None
        return message
    if any(value == 0 for value in values):
        return {**message, NOT_LEARNED: True}
    if any(value != 1 for value in values):
        remarks["a weight of a message other than 0 and 1 counts as 1"] = None
    return message


def _list(value: Any) -> Any:
    """Turns; some sets keep them as JSON text."""
    if isinstance(value, str):
        return parse_json_text(value, "turns that are not JSON")
    return value


def _dicts(turns: list[Any]) -> list[dict[str, Any]]:
    """Turns that are all objects. Raises :class:`Unusable` for any other."""
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
    """Messages of a record with tools, with calls and results that are text, in Hermes's form, as OpenAI's
    messages. A system message that lists the tools is left out: the chat template writes one."""
    found: list[Message] = []
    for message in messages:
        role = message["role"]
        text = message["content"]
        if role == "system" and "<tools>" in text:
            remark = "a system message that lists the tools is left out, since the chat template writes it"
            remarks[remark] = None
        elif role == "assistant" and "tool_calls" not in message and TOOL_CALL in text:
            parts = read_response(TagReader(has_thoughts=False, form=HERMES), text)
            if TOOL_CALL in parts.content:
                raise Unusable("a <tool_call> that cannot be read")
            calls = read_calls([call._asdict() for call in parts.calls])
            found.append(message | {"content": parts.content.strip(), "tool_calls": calls})
        elif role == "tool" and RESULT.search(text):
            if RESULT.sub("", text).strip():
                remarks["text beside a <tool_response> is left out"] = None
            found += [message | {"content": result} for result in RESULT.findall(text)]
        else:
            found.append(message)
    return found


def _from_first_user(messages: list[Message]) -> tuple[Message, ...]:
    """The messages without responses before the first user turn, which have no prompt. ShareGPT cuts long
    conversations into records, and a third of them begin so."""
    first = [message["role"] for message in messages].index("user")
    system = [message for message in messages[:first] if message["role"] not in ("assistant", "tool")]
    return (*system, *messages[first:])
