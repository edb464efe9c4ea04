"""Prompts out of the records of published prompt sets. The keys of a record name its set.

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
from typing import Any, NamedTuple

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
        turns: user messages. A later turn follows the target's own plain greedy response to the earlier ones.
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

    def messages(self, responses: Sequence[str]) -> list[Message]:
        """The conversation up to user turn ``len(responses)``, given the responses to the turns before it."""
        messages = list(self.context)
        for turn, response in zip(self.turns, responses, strict=False):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": response}]
        return [*messages, {"role": "user", "content": self.turns[len(responses)]}]

    def given(self, responses: Sequence[str] = ()) -> str | list[Message] | ChatPrompt:
        """:meth:`messages`, with tools and arguments where there are any, as an engine takes them.

        A single user turn is given as its text, which a target without a chat template continues.
        """
        messages = self.messages(responses)
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

    # Read the prompt, which every set keeps under keys of its own.
    found = _read_form(record)
    category = record.get("category", found.category or task)
    if not isinstance(category, str):
        raise Unusable("a category that is not a name")
    if not found.turns or not all(isinstance(turn, str) and turn.strip() for turn in found.turns):
        raise Unusable("an empty prompt or one that is not text")

    # Read the keys that records of all sets may have.
    names = [record[key] for key in ("question_id", "id", "task_id") if key in record]
    name = str(names[0]) if names else f"{task}-{number}"
    kwargs = template_kwargs(record.get("chat_template_kwargs", {}))
    return EvalPrompt(name, category, found.turns, found.context, found.tools, kwargs)


class _Form(NamedTuple):
    """What the keys of one set hold.

    Attributes:
        turns: user messages, not yet checked to be text.
        category: of the set, or empty.
        context: messages before the first turn.
        tools: definitions of tools.
    """

    turns: tuple[Any, ...]
    category: str = ""
    context: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()


def _read_form(record: dict[str, Any]) -> _Form:
    """Recognise the set of a record by its keys and read them. Raises :class:`Unusable`."""
    # Published sets.
    if "test_list" in record:
        return _Form((mbpp_turn(record),), "code")
    if "entry_point" in record and isinstance(record.get("prompt"), str):
        return _Form((human_eval_turn(record["prompt"]),), "code")
    if "function" in record and isinstance(record.get("question"), list):
        return _read_leaderboard(record)
    if "query" in record and "tools" in record:
        return _Form((record["query"],), "tools", tools=read_tools(record["tools"]))
    if isinstance(record.get("question"), str) and "answer" in record:
        return _Form((record["question"],), "math")

    # Turns, one prompt, or messages.
    present = [key for key in ("turns", "prompt", "messages") if key in record]
    if len(present) != 1:
        raise Unusable(f"{' and '.join(present) or 'none'} of turns, prompt and messages")
    key = present[0]
    value = record[key]
    tools = read_tools(record.get("tools", []))
    if key == "messages":
        context, turn = _split_last_turn(value)
        return _Form((turn,), context=context, tools=tools)
    if isinstance(value, list) != (key == "turns"):
        raise Unusable("turns that are not a list, or a prompt that is one")
    turns = tuple(value) if key == "turns" else (value,)
    return _Form(turns, tools=tools)


def human_eval_turn(prompt: str) -> str:
    """A user message that asks for one of HumanEval's functions."""
    return (
        "Complete the following Python function. Answer with the whole function in one code block.\n\n"
        f"```python\n{prompt.strip()}\n```"
    )


def mbpp_turn(record: dict[str, Any]) -> str:
    """A user message that asks for one of MBPP's functions and names its tests, as its paper does (arXiv
    2108.07732)."""
    text = record.get("text", record.get("prompt"))
    tests = record["test_list"]
    has_tests = isinstance(tests, list) and all(isinstance(test, str) for test in tests)
    if not isinstance(text, str) or not has_tests:
        raise Unusable("a text or tests that are not text")
    return f"{text.strip()} Your code should pass these tests:\n\n" + "\n".join(tests)


def _read_leaderboard(record: dict[str, Any]) -> _Form:
    """A prompt with functions; its category is in its id: ``live_simple_0-0-0``."""
    # Every round of the question is a list of messages.
    rounds = record["question"]
    if not all(isinstance(messages, list) and messages for messages in rounds) or not rounds:
        raise Unusable("a question that is not turns of messages")
    context, first = _split_last_turn(rounds[0])
    turns = [first]
    for messages in rounds[1:]:
        _, turn = _split_last_turn(messages)
        turns.append(turn)

    # Functions have other names of types than JSON Schema.
    functions = record["function"]
    if not isinstance(functions, list) or not all(isinstance(function, dict) for function in functions):
        raise Unusable("tools that are not a list of objects")
    tools = [{"type": "function", "function": _with_json_types(function)} for function in functions]
    category = re.sub(r"_\d[\d-]*$", "", str(record.get("id", "")))
    return _Form(tuple(turns), category or "tools", context, tuple(tools))


def _with_json_types(value: Any) -> Any:
    """A definition of a function with JSON Schema's names of types in all its objects."""
    if isinstance(value, list):
        return [_with_json_types(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    named = {key: _with_json_types(inner) for key, inner in value.items()}
    kind = value.get("type")
    if isinstance(kind, str) and kind in JSON_TYPES:
        named["type"] = JSON_TYPES[kind]
    return named


def _split_last_turn(value: Any) -> tuple[tuple[Message, ...], str]:
    """Context and text of the last user turn of messages: responses at their end, and results of tools, are
    left out."""
    messages = to_conversation({"messages": value}, "").messages
    while messages[-1]["role"] in ("assistant", "tool"):
        messages = messages[:-1]
    if messages[-1]["role"] != "user":
        raise Unusable("messages without a user turn at their end")
    return messages[:-1], messages[-1]["content"]
