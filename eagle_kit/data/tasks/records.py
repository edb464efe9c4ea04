"""Prompts out of the records of published prompt sets, each told by its own keys.

| keys | set |
|---|---|
| ``turns`` | EAGLE's and Spec-Bench's ``question.jsonl``, MT-Bench |
| ``question`` (text), ``answer`` | GSM8K |
| ``prompt``, ``entry_point`` | HumanEval |
| ``text`` or ``prompt``, ``test_list`` | MBPP |
| ``question`` (turns of messages), ``function`` | the Berkeley function-calling leaderboard |
| ``query``, ``tools`` | xLAM's function-calling prompts |
| ``messages``, with or without ``tools`` | OpenAI's chats |
| ``prompt`` | anything else |

Beside any of them: ``id``, ``category``, ``chat_template_kwargs``.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_kit.core.files import is_unicode
from eagle_kit.data.chat.forms import template_kwargs, to_conversation
from eagle_kit.data.chat.messages import ChatPrompt, Message, Unusable, read_tools

FORMS = (
    'Write {"question_id", "category", "turns": [...]}, {"prompt": "..."} or {"messages": [...]} a line, or '
    "give a published set as it is."
)
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""Types of parameters in the leaderboard's functions that JSON Schema names otherwise."""


@dataclass(frozen=True)
class EvalPrompt:
    """One prompt of a task.

    Attributes:
        id: its name within the task, unique.
        category: group that it is counted in besides the task.
        turns: user messages. A later turn follows the target's own plain greedy reply to the earlier ones.
        context: messages that stand before the first turn as they are.
        tools: definitions that the chat template shows the target, as OpenAI's API has them.
        chat_template_kwargs: further arguments of the template, such as ``enable_thinking``.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    context: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def messages(self, replies: Sequence[str]) -> list[Message]:
        """The conversation up to user turn ``len(replies)``, given the replies to the turns before it."""
        messages = list(self.context)
        for turn, reply in zip(self.turns, replies, strict=False):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": reply}]
        return [*messages, {"role": "user", "content": self.turns[len(replies)]}]

    def given(self, replies: Sequence[str] = ()) -> str | list[Message] | ChatPrompt:
        """:meth:`messages`, with tools and arguments where there are any, as an engine takes them.

        A single user turn is given as its text, which a target without a chat template continues.
        """
        messages = self.messages(replies)
        kwargs = self.chat_template_kwargs
        if self.tools or kwargs:
            return ChatPrompt(messages, self.tools, kwargs)
        return self.turns[0] if len(messages) == 1 else messages


def read_record(record: Any, task: str, number: int) -> EvalPrompt:
    """The prompt of a record.

    Args:
        task: category of records that name none and are of no set that has one.
        number: of the line, for records without an id.

    Raises:
        Unusable: it is no record of any form; the message is the reason.
    """
    if not isinstance(record, dict):
        raise Unusable("no JSON object")
    if not is_unicode(json.dumps(record, ensure_ascii=False)):
        raise Unusable("half a character (a lone surrogate)")
    record = {key: value for key, value in record.items() if value not in (None, "") or key == "prompt"}
    category, turns, context, tools = _read(record)
    category = record.get("category", category or task)
    if not isinstance(category, str):
        raise Unusable("a category that is not a name")
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise Unusable("an empty prompt or one that is not text")
    names = (record[key] for key in ("question_id", "id", "task_id") if key in record)
    kwargs = template_kwargs(record.get("chat_template_kwargs", {}))
    return EvalPrompt(str(next(names, f"{task}-{number}")), category, turns, context, tools, kwargs)


Read = tuple[str, tuple[Any, ...], tuple[Message, ...], tuple[Message, ...]]
"""Category of the set or "", turns, context, tools."""


def _read(record: dict[str, Any]) -> Read:
    if "test_list" in record:
        return "code", (mbpp_turn(record),), (), ()
    if "entry_point" in record and isinstance(record.get("prompt"), str):
        return "code", (human_eval_turn(record["prompt"]),), (), ()
    if "function" in record and isinstance(record.get("question"), list):
        return _leaderboard(record)
    if "query" in record and "tools" in record:
        return "tools", (record["query"],), (), read_tools(record["tools"])
    if isinstance(record.get("question"), str) and "answer" in record:
        return "math", (record["question"],), (), ()
    present = [key for key in ("turns", "prompt", "messages") if key in record]
    if len(present) != 1:
        raise Unusable(f"{' and '.join(present) or 'none'} of turns, prompt and messages")
    value, tools = record[present[0]], read_tools(record.get("tools", []))
    if present[0] == "messages":
        context, turns = _read_messages(value)
        return "", turns, context, tools
    if isinstance(value, list) != (present[0] == "turns"):
        raise Unusable("turns that are not a list, or a prompt that is one")
    return "", tuple(value) if isinstance(value, list) else (value,), (), tools


def human_eval_turn(prompt: str) -> str:
    """A user message that asks for one of HumanEval's functions."""
    return (
        "Complete the following Python function. Answer with the whole function in one code block.\n\n"
        f"```python\n{prompt.strip()}\n```"
    )


def mbpp_turn(record: dict[str, Any]) -> str:
    """A user message that asks for one of MBPP's functions and names its tests, as its paper does (arXiv
    2108.07732)."""
    text, tests = record.get("text", record.get("prompt")), record["test_list"]
    if not isinstance(text, str) or not isinstance(tests, list) or not all(isinstance(t, str) for t in tests):
        raise Unusable("a text or tests that are not text")
    return f"{text.strip()} Your code should pass these tests:\n\n" + "\n".join(tests)


def _leaderboard(record: dict[str, Any]) -> Read:
    """A prompt with functions; its category is in its id: ``live_simple_0-0-0``."""
    rounds = record["question"]
    if not all(isinstance(turn, list) and turn for turn in rounds) or not rounds:
        raise Unusable("a question that is not turns of messages")
    context, first = _read_messages(rounds[0])
    later = [_read_messages(turn)[1][0] for turn in rounds[1:]]
    tools = [{"type": "function", "function": _json_schema(one)} for one in _objects(record["function"])]
    category = re.sub(r"_\d[\d-]*$", "", str(record.get("id", "")))
    return category or "tools", (*first, *later), context, tuple(tools)


def _json_schema(value: Any) -> Any:
    """A definition whose types are JSON Schema's."""
    if isinstance(value, dict):
        kind = value.get("type")
        named = {"type": JSON_TYPES[kind]} if isinstance(kind, str) and kind in JSON_TYPES else {}
        return {key: _json_schema(inner) for key, inner in value.items()} | named
    return [_json_schema(inner) for inner in value] if isinstance(value, list) else value


def _objects(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise Unusable("tools that are not a list of objects")
    return value


def _read_messages(value: Any) -> tuple[tuple[Message, ...], tuple[Any, ...]]:
    """Context and turn of a list of messages: replies at its end, and results of tools, are left out."""
    messages = to_conversation({"messages": value}, "").messages
    while messages[-1]["role"] in ("assistant", "tool"):
        messages = messages[:-1]
    if messages[-1]["role"] != "user":
        raise Unusable("messages without a user turn at their end")
    return messages[:-1], (messages[-1]["content"],)
