"""Messages as chat templates take them: OpenAI's form, with text as one string and arguments as objects.

Data preparation, regeneration, evaluation sets and the server read their messages here, so templates get the
same turns from all of them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_kit.core.errors import shown
from eagle_kit.core.files import is_unicode

Message = dict[str, Any]
"""``role`` (system, developer, user, assistant or tool) and ``content`` (text; empty beside calls). Optional
keys are ``reasoning_content``, ``tool_calls``, ``tool_call_id`` and ``name``. A regenerated response that was
read into parts has ``generated``, its text as it was generated, special tokens included."""
Tool = dict[str, Any]
"""``{"type": "function", "function": {"name", "description", "parameters"}}``."""

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}
CALLERS = ("function_call", "tool_call")
"""Roles whose content is a call as JSON, or a list of calls."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of the thought before a response: DeepSeek's and SGLang's, vLLM's, and gpt-oss's."""
KNOWN_KEYS = {
    "role",
    "content",
    "tool_calls",
    "function_call",
    "tool_call_id",
    "name",
    "generated",
    *REASONING,
    "id",
    "refusal",
    "audio",
    "annotations",
}
"""Keys of a message that are read, or do not change its text."""
JSON_TYPES = {
    "str": "string",
    "string": "string",
    "int": "integer",
    "integer": "integer",
    "float": "number",
    "number": "number",
    "bool": "boolean",
    "boolean": "boolean",
    "list": "array",
    "tuple": "array",
    "set": "array",
    "array": "array",
    "dict": "object",
    "object": "object",
}
"""JSON Schema's names for the types of Python that function-calling sets name."""
SCHEMA_KEYWORDS = {
    "$defs",
    "definitions",
    "properties",
    "patternProperties",
    "additionalProperties",
    "propertyNames",
    "unevaluatedProperties",
    "dependentSchemas",
    "dependentRequired",
    "dependencies",
    "not",
    "if",
    "then",
    "else",
}
"""Keywords of JSON Schema for objects whose values are objects."""


class Unusable(Exception):
    """A record that is skipped; the message is the reason."""


@dataclass(frozen=True)
class ChatPrompt:
    """Input of a chat template.

    Attributes:
        tools: definitions of tools.
        chat_template_kwargs: further arguments, such as ``enable_thinking``.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def key(self) -> str:
        """Text that is equal for equal prompts."""
        return json.dumps([list(self.messages), list(self.tools), dict(self.chat_template_kwargs)])


def read_message(turn: Any) -> Message:
    """Read a message of OpenAI's form; keys that are null count as missing. Raises :class:`Unusable`."""
    # The role.
    if not isinstance(turn, dict):
        raise Unusable("a turn that is not an object")
    turn = {key: value for key, value in turn.items() if value is not None}
    role = turn.get("role")
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise Unusable(f"unknown role {shown(role)}")

    # Calls, and the text, which may be null beside them.
    calls = turn.get("tool_calls")
    if not calls and turn.get("function_call"):
        calls = [turn["function_call"]]
    content = turn.get("content")
    if role.lower() in CALLERS:
        calls = parse_json_text(content, "a call that is not JSON")
        content = ""
    if calls and not content:
        content = ""
    message: Message = {"role": ROLES[role.lower()], "content": _text(content)}

    # The other keys.
    thought = next((turn[name] for name in REASONING if turn.get(name)), None)
    if thought:
        message["reasoning_content"] = _text(thought, "reasoning")
    if calls:
        message["tool_calls"] = read_calls(calls)
    if (calls or "reasoning_content" in message) and message["role"] != "assistant":
        raise Unusable(f"a turn of the {message['role']} with tool calls or reasoning")
    for name in ("tool_call_id", "name", "generated"):
        if name in turn:
            message[name] = _text(turn[name], name)
    return message


def read_calls(value: Any) -> list[dict[str, Any]]:
    """Read calls of tools, of OpenAI's form or bare ``{"name", "arguments"}``. Raises :class:`Unusable`."""
    found = []
    given = value if isinstance(value, list) else [value]
    for call in given:
        if not isinstance(call, dict):
            raise Unusable("a tool call that is not an object")
        function = call.get("function", call)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise Unusable("a tool call without a name")
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(arguments, str) and not arguments.strip():
            arguments = {}
        if isinstance(arguments, str):
            arguments = parse_json_text(arguments, "the arguments of a tool call are no JSON object")
        if not isinstance(arguments, dict | None):
            raise Unusable("the arguments of a tool call are no JSON object")
        read: dict[str, Any] = {}
        if isinstance(call.get("id"), str):
            read["id"] = call["id"]
        read["type"] = "function"
        read["function"] = {"name": name, "arguments": arguments or {}}
        found.append(read)
    return found


def read_tools(value: Any) -> tuple[Tool, ...]:
    """Read definitions of tools, as a list or its JSON text. Raises :class:`Unusable`.

    Bare functions become tools of OpenAI's form, and parameters by name (xLAM) a JSON schema.
    """
    if isinstance(value, str):
        value = parse_json_text(value, "tools that are not JSON")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise Unusable("tools that are not a list of objects")
    found = []
    for tool in value:
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unusable("a tool without a name")
        parameters = function.get("parameters")
        if parameters is not None:
            if isinstance(parameters, str):  # a column of Parquet, which has no place for schemas that differ
                parameters = parse_json_text(parameters, "parameters of a tool that are not JSON")
            if not isinstance(parameters, dict):
                raise Unusable("parameters of a tool that are not an object")
            function = {**function, "parameters": _json_schema(parameters)}
        found.append({"type": "function", "function": {k: v for k, v in function.items() if k != "type"}})
    return tuple(found)


def _json_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters by name, with Python's types, as a JSON schema.

    Parameters that are a schema are returned as they are: those with ``properties``, with a value that is no
    object, or whose keys are all keywords of JSON Schema.
    """
    is_schema = "properties" in parameters or parameters.keys() <= SCHEMA_KEYWORDS
    if is_schema or not all(isinstance(value, dict) for value in parameters.values()):
        return parameters

    # Describe every parameter.
    properties = {}
    required = []
    for name, about in parameters.items():
        kind = str(about.get("type", ""))
        plain = re.split(r"[\[,(\s]", kind.strip().lower(), maxsplit=1)[0]
        properties[name] = dict(about)
        if plain in JSON_TYPES:
            properties[name]["type"] = JSON_TYPES[plain]
        if "default" not in about and "optional" not in kind.lower():
            required.append(name)
    return {"type": "object", "properties": properties, "required": required}


def parse_json_text(text: Any, problem: str) -> Any:
    """Parse JSON out of a record's field. Raises :class:`Unusable` with ``problem``."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise Unusable(problem) from None


def _text(content: Any, what: str = "content") -> str:
    """Text, or the texts of parts joined by line ends. Raises :class:`Unusable`.

    Args:
        what: name of the text in the reason.
    """
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Unusable(f"a turn whose {what} is not text")
    if not is_unicode(content):
        raise Unusable("a turn with half a character (a lone surrogate)")
    return content


def _is_text_part(part: Any) -> bool:
    """True for a part of OpenAI's content that is text."""
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def is_empty(message: Message) -> bool:
    """True for a turn without text, calls, and generated text."""
    return not (message["content"].strip() or message.get("tool_calls") or message.get("generated"))


def on_the_wire(messages: Sequence[Message]) -> list[Message]:
    """The messages as OpenAI's protocol has them: arguments are JSON text, calls and results have ids."""
    found: list[Message] = []
    waiting: list[str] = []  # ids of calls without a result
    for message in messages:
        if message["role"] == "tool":
            if waiting:
                call_id = waiting.pop(0)
            else:
                call_id = message.get("tool_call_id", f"call_{len(found)}")
            message = {**message, "tool_call_id": call_id}
        elif message.get("tool_calls"):
            calls = []
            for i, call in enumerate(message["tool_calls"]):
                calls.append({"id": f"call_{len(found)}_{i}", **call})
            waiting = [call["id"] for call in calls]
            message = {**message, "tool_calls": [_with_text_arguments(call) for call in calls]}
        found.append(message)
    return found


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as JSON text."""
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return call | {"function": call["function"] | {"arguments": arguments}}


def with_text_arguments(message: Message) -> Message:
    """The message with the arguments of its calls as JSON text."""
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
