"""Forms in which models write calls of tools.

A form finds its calls by the text of its markers, which are special tokens in some tokenizers and ordinary
ones in others. ``take`` gets the reply from a marker on, and reads one call, or several of a list.

| form | a call |
|---|---|
| ``hermes`` | ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``, or Qwen3-Coder's XML in the tags |
| ``deepseek`` | between DeepSeek-V3's tokens, the arguments in a code block, or as V3.1 writes them |
| ``mistral`` | ``[TOOL_CALLS]`` before a list of objects, or before a name and an object |
| ``llama3`` | the reply is ``{"name": ..., "parameters": ...}`` or a list, also behind ``<|python_tag|>`` |
"""

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eagle_kit.core.files import is_unicode
from eagle_kit.data.chat.messages import Tool, Unusable, read_calls
from eagle_kit.data.chat.reply.literals import end_of_value, typed
from eagle_kit.data.chat.reply.parts import Call

LONG_CALL = 1024
"""Characters of a call from which on it is not looked at again before there is a closer."""
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
FUNCTION_TAG, END_FUNCTION = "<function=", "</function>"
XML_HEAD = re.compile(r"\s*<function=[^>\n]+>")
NEXT_CALL = re.compile(r"<tool_call>\s*(?:<function=|\{)")
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
CODE_BLOCK = re.compile(r"([^\n]+)\n```(?:json)?\n(.*)```\s*", re.DOTALL)
TOOL_CALLS = "[TOOL_CALLS]"
MISTRAL_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
MISTRAL_BEGUN = re.compile(r"\s*[\w.-]*(?:\[[\w\]]*)*\s*")
LIST_BEGUN, LIST_OF_OBJECTS = re.compile(r"\[\s*"), re.compile(r"\[\s*\{")
PYTHON_TAG = "<|python_tag|>"
BARE_BEGINNINGS = ('{"name":', '{"type":', '[{"name":', '[{"type":')


class Taken(NamedTuple):
    """Beginning of a text that was read: its length, and its calls, None where it is no call after all."""

    length: int
    calls: list[Call] | None


@dataclass(frozen=True)
class CallForm:
    """A form of calls.

    Attributes:
        openers: markers, one of which begins a call.
        markers: all of its markers.
        take: of a text that begins with an opener, the tools of the request, and whether the text has ended
            -> what was read; None until there is more of it.
        closers: characters, one of which is in any piece that lets ``take`` read more.
        after: what may stand between calls, and behind them.
        is_bare: a reply that begins as in ``BARE_BEGINNINGS`` may be a call too.
    """

    openers: tuple[str, ...]
    markers: tuple[str, ...]
    take: Callable[[str, Sequence[Tool], bool], Taken | None]
    closers: str
    after: tuple[str, ...] = ()
    is_bare: bool = False


def make_call(name: Any, arguments: Any) -> Call:
    """Make a call. Raise :class:`Unusable` where the two are none."""
    (found,) = read_calls({"name": name.strip() if isinstance(name, str) else name, "arguments": arguments})
    call = Call(**found["function"])
    try:
        text = json.dumps(call, allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):
        raise Unusable("arguments that JSON does not have") from None
    if not is_unicode(text):
        raise Unusable("half a character (a lone surrogate)")
    return call


def calls_of(value: Any) -> list[Call]:
    """Make the calls of a JSON value, an object or a list of them. Raise :class:`Unusable` for others.

    The name is ``name``, or ``function`` where that is a text, as some of Llama's replies have it.
    """
    found = []
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, dict):
            raise Unusable("a call that is no object")
        function = one["function"] if isinstance(one.get("function"), dict) else one
        name = function.get("name", function.get("function"))
        found.append(make_call(name, function.get("arguments", function.get("parameters"))))
    if not found:
        raise Unusable("no call")
    return found


def _read(calls: Callable[[str], list[Call]], length: int, body: str) -> Taken:
    try:
        return Taken(length, calls(body))
    except (Unusable, ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return Taken(length, None)


def _take_hermes(text: str, tools: Sequence[Tool], is_end: bool) -> Taken | None:
    if len(text) > LONG_CALL and END_TOOL_CALL not in text and not is_end:
        return None
    start = len(TOOL_CALL)
    is_xml = text[start:].lstrip().startswith("<")
    try:
        end = _end_of_xml(text, start) if is_xml else end_of_value(text, start)
    except ValueError:
        return Taken(start, None)
    if end is None:
        return Taken(start, None) if is_end else None
    rest = text[end:].lstrip()
    if not rest.startswith(END_TOOL_CALL) and not (is_end and not rest):
        return None if END_TOOL_CALL.startswith(rest) and not is_end else Taken(start, None)
    body, length = text[start:end], len(text) - len(rest) + (len(END_TOOL_CALL) if rest else 0)
    taken = _read(lambda body: _xml_calls(body, tools) if is_xml else hermes_calls(body), length, body)
    return Taken(start, None) if taken.calls is None else taken


def _end_of_xml(text: str, start: int) -> int | None:
    """Find the end of a function in tags; see :func:`~eagle_kit.data.chat.reply.literals.end_of_value`."""
    head = XML_HEAD.match(text, start)
    inner = text[start if head is None else head.end() :].lstrip()
    expected = (FUNCTION_TAG,) if head is None else ("<parameter=", END_FUNCTION)
    if not any(inner.startswith(tag) or tag.startswith(inner) for tag in expected):
        raise ValueError("no function with parameters")
    if head is None:
        if ">" in inner or "\n" in inner:
            raise ValueError("no function's name")
        return None
    at = head.end()
    while (place := text.find(END_FUNCTION, at)) >= 0:
        at = place + len(END_FUNCTION)
        behind = at
        while text[behind : behind + 1].isspace():
            behind += 1
        if END_TOOL_CALL.startswith(text[behind : behind + len(END_TOOL_CALL)]):
            break
    following = NEXT_CALL.search(text, head.end())
    if following is not None and (place < 0 or following.start() < place):
        raise ValueError("another call before the end of this one")
    return at if place >= 0 else None


def hermes_calls(body: str) -> list[Call]:
    """Read what stands between the tags: JSON, or an object as Python writes it. Raise :class:`Unusable`,
    ValueError or SyntaxError for anything else."""
    try:
        return calls_of(json.loads(body))
    except ValueError:
        return calls_of(ast.literal_eval(body.strip()))


def _xml_calls(body: str, tools: Sequence[Tool]) -> list[Call]:
    function = FUNCTION.fullmatch(body)
    if function is None or PARAMETER.sub("", function[2]).strip():
        raise Unusable("no function with parameters")
    name = function[1].strip()
    functions = [tool["function"] for tool in tools]
    about: Tool = next((each for each in functions if each["name"] == name), {})
    root = about.get("parameters") or {}
    schemas = root.get("properties") or {}
    values = {key.strip(): text for key, text in PARAMETER.findall(function[2])}
    return [make_call(name, {key: typed(text, schemas.get(key), root) for key, text in values.items()})]


def _take_deepseek(text: str, tools: Sequence[Tool], is_end: bool) -> Taken | None:
    inner = text.removeprefix(CALLS_BEGIN).lstrip()
    if not inner.startswith(CALL_BEGIN):
        may_come = CALL_BEGIN.startswith(inner) and not is_end
        return None if may_come else Taken(len(text) - len(inner) if inner else len(text), None)
    start = len(text) - len(inner) + len(CALL_BEGIN)
    end = text.find(CALL_END, start)
    if end < 0:
        return _read(_deepseek_calls, len(text), text[start:]) if is_end else None
    return _read(_deepseek_calls, end + len(CALL_END), text[start:end])


def _deepseek_calls(body: str) -> list[Call]:
    head, separator, rest = body.partition(SEPARATOR)
    if not separator:
        raise Unusable("no separator")
    block = CODE_BLOCK.fullmatch(rest) if head.strip() == "function" else None
    name, arguments = (head, rest) if block is None else block.groups()
    return [make_call(name, json.loads(arguments))]


def _take_mistral(text: str, tools: Sequence[Tool], is_end: bool) -> Taken | None:
    start = len(TOOL_CALLS)
    body = text[start:]
    if body.lstrip().startswith("["):
        return _take_json(text, len(text) - len(body.lstrip()), is_end, calls_of)
    if (name := MISTRAL_NAME.match(body)) is not None:
        return _take_json(text, start + name.end(), is_end, lambda value: [make_call(name[1], value)])
    may_come = MISTRAL_BEGUN.fullmatch(body) is not None and not is_end
    return None if may_come else Taken(start, None)


def _take_llama3(text: str, tools: Sequence[Tool], is_end: bool) -> Taken | None:
    body = text.removeprefix(PYTHON_TAG).lstrip()
    if not body and not is_end:
        return None
    if not body.startswith("{") and LIST_BEGUN.fullmatch(body) is not None and not is_end:
        return None
    if not body.startswith("{") and LIST_OF_OBJECTS.match(body) is None:
        return Taken(len(PYTHON_TAG), None)
    known = {tool["function"]["name"] for tool in tools}

    def calls(value: Any) -> list[Call]:
        found = calls_of(value)
        if any(call.name not in known for call in found):
            raise Unusable("an object that names no tool")
        return found

    return _take_json(text, len(text) - len(body), is_end, calls)


def _take_json(text: str, start: int, is_end: bool, calls: Callable[[Any], list[Call]]) -> Taken | None:
    """Take a JSON value of ``text`` from ``start`` on, once there is all of it."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return Taken(len(text), None) if is_end else None
    except RecursionError:
        return Taken(len(text), None)
    return _read(lambda _: calls(value), end, "")


HERMES = CallForm((TOOL_CALL,), (TOOL_CALL, END_TOOL_CALL), _take_hermes, ">")
DEEPSEEK = CallForm(
    openers=(CALLS_BEGIN, CALL_BEGIN),
    markers=(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR),
    take=_take_deepseek,
    closers=">",
    after=(CALLS_END,),
)
MISTRAL = CallForm((TOOL_CALLS,), (TOOL_CALLS, "[ARGS]", "[CALL_ID]"), _take_mistral, "}]")
LLAMA3 = CallForm((PYTHON_TAG,), (PYTHON_TAG,), _take_llama3, "}]", after=(";",), is_bare=True)
