"""Forms in which models write calls of tools.

A form finds its calls by the text of its markers, which are special tokens in some tokenizers and ordinary
tokens in others. ``take`` reads the response from a marker on: one call, or the calls of a list.

| form | a call |
|---|---|
| ``hermes`` | ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``, or Qwen3-Coder's XML in the tags |
| ``deepseek`` | between DeepSeek-V3's tokens, the arguments in a code block, or as V3.1 writes them |
| ``mistral`` | ``[TOOL_CALLS]`` before a list of objects, or before a name and an object |
| ``llama3`` | the response is ``{"name": ..., "parameters": ...}`` or a list, also after ``<|python_tag|>`` |
"""

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eagle_kit.core.files import is_unicode
from eagle_kit.data.chat.messages import Tool, Unusable, read_calls
from eagle_kit.data.chat.response.literals import (
    NoValue,
    allowed_kinds,
    read_json,
    read_value,
    with_kind,
)
from eagle_kit.data.chat.response.parts import Call
from eagle_kit.data.chat.response.tape import Reading, Tape

TOOL_CALL = "<tool_call>"
END_TOOL_CALL = "</tool_call>"
FUNCTION_TAG = "<function="
END_FUNCTION = "</function>"
PARAMETER_TAG = "<parameter="
END_PARAMETER = "</parameter>"
PARAMETER = re.compile(r"<parameter=([^>\n]++)>")
END_OF_NAME = re.compile(r"[>\n]")
IN_FUNCTION = re.compile(f"{END_FUNCTION}|{TOOL_CALL}")
CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
END_OF_CALL = re.compile(CALL_END)
FENCE = "```"
TOOL_CALLS = "[TOOL_CALLS]"
MOST_NAME = 256
"""Most characters from a function's name to its arguments in Mistral's form."""
MISTRAL_NAME = re.compile(r"([\w.-]++)(?:\[CALL_ID\]\w++)?(?:\[ARGS\])?\s*+(?=\{)")
MISTRAL_BEGUN = re.compile(r"[\w.-]*+(?:\[[\w\]]*+)*+\s*+")
PYTHON_TAG = "<|python_tag|>"
BARE_BEGINNINGS = ('{"name":', '{"type":', '[{"name":', '[{"type":')


class Taken(NamedTuple):
    """Result of reading from a marker on.

    Attributes:
        end: place in the response at which the call, or the text that is no call, ends.
        calls: the calls; None for text that is no call.
    """

    end: int
    calls: list[Call] | None = None


class KnownTools:
    """Tools of a request, by name, with the types of their parameters.

    Args:
        tools: definitions of the tools. If two have one name, the first is used.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        functions = [tool["function"] for tool in reversed(tools)]
        self._schemas = {each["name"]: each.get("parameters") for each in functions}
        self._kinds: dict[tuple[str, str], frozenset[str]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def typed(self, name: str, key: str, text: str) -> Any:
        """Value of the parameter ``key`` of the tool ``name`` that was written as text; see
        :func:`~eagle_kit.data.chat.response.literals.typed`."""
        if (name, key) not in self._kinds:
            schema = self._schemas.get(name)
            root = schema if isinstance(schema, dict) else {}
            properties = root.get("properties")
            about = properties.get(key) if isinstance(properties, dict) else None
            self._kinds[name, key] = allowed_kinds(about, root)
        return with_kind(text, self._kinds[name, key])


@dataclass(frozen=True)
class CallForm:
    """A form of calls.

    Attributes:
        openers: markers that begin a call.
        markers: all of its markers.
        take: reads a call, or a list of them, from a marked tape whose next characters are an opener.
        after: texts that may be between calls and after them; they are left out.
        is_bare: a response that begins as in ``BARE_BEGINNINGS`` may be a call too.
    """

    openers: tuple[str, ...]
    markers: tuple[str, ...]
    take: Callable[[Tape, KnownTools], Reading[Taken]]
    after: tuple[str, ...] = ()
    is_bare: bool = False


def make_call(name: Any, arguments: Any) -> Call:
    """Make a call. Raise :class:`Unusable` for a name or arguments that no call has."""
    if isinstance(name, str):
        name = name.strip()
    (found,) = read_calls({"name": name, "arguments": arguments})
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

    The name is ``name``, or ``function`` if that is a text, as in some of Llama's responses.
    """
    calls = []
    given = value if isinstance(value, list) else [value]
    for call in given:
        if not isinstance(call, dict):
            raise Unusable("a call that is no object")
        function = call["function"] if isinstance(call.get("function"), dict) else call
        name = function.get("name", function.get("function"))
        arguments = function.get("arguments", function.get("parameters"))
        calls.append(make_call(name, arguments))
    if not calls:
        raise Unusable("no call")
    return calls


def _made(end: int, calls: Callable[[str], list[Call]], body: str) -> Taken:
    """The result for a call that ends at ``end``: ``calls`` of its ``body``, or none if that raises."""
    try:
        return Taken(end, calls(body))
    except (Unusable, ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return Taken(end)


def _take_hermes(tape: Tape, tools: KnownTools) -> Reading[Taken]:
    """Take a call of Hermes's form."""
    yield from tape.take(TOOL_CALL)
    start = tape.place
    no_call = Taken(start)
    yield from tape.skip_space()

    # The call up to its last character: a function in tags, or a value.
    function: str | None = ""
    is_xml = bool((yield from tape.next_is("<")))
    try:
        if is_xml:
            function = yield from _read_function(tape)
            is_whole = function is not None
        else:
            is_whole = yield from read_value(tape)
    except NoValue:
        return no_call
    if function is None or not is_whole:
        return no_call
    end = tape.place

    # Its end tag, which the end of the response may cut off.
    yield from tape.skip_space()
    has_end = yield from tape.take(END_TOOL_CALL)
    if not has_end and tape.at < len(tape.text):
        return no_call
    body = tape.since(start, end)
    if is_xml:
        taken = _made(tape.place, lambda body: [_xml_call(function, body, tools)], body)
    else:
        taken = _made(tape.place, hermes_calls, body)
    return no_call if taken.calls is None else taken


def _read_function(tape: Tape) -> Reading[str | None]:
    """Read a function in tags, up to its end tag.

    Returns:
        Its name; None if the response ends before the end tag.

    Raises:
        NoValue: the text is no function with parameters, however it goes on.
    """
    # Its name.
    if not (yield from tape.take(FUNCTION_TAG)):
        raise NoValue
    begin = tape.place
    mark = yield from tape.find(END_OF_NAME, (">",))
    if not mark:
        return None
    if mark != ">" or tape.place == begin + 1:
        raise NoValue
    name = tape.since(begin, tape.place - 1)

    # A parameter, or the end tag.
    yield from tape.skip_space()
    if not (yield from tape.next_is(PARAMETER_TAG, END_FUNCTION)):
        raise NoValue

    # The end tag before the end of the call. The text of a parameter may hold other end tags.
    while True:
        mark = yield from tape.find(IN_FUNCTION, (END_FUNCTION, TOOL_CALL))
        if not mark:
            return None
        if mark == TOOL_CALL:
            yield from tape.skip_space()
            if (yield from tape.next_is("{", FUNCTION_TAG)):
                raise NoValue
            continue
        yield from tape.skip_space()
        if (yield from tape.next_is(END_TOOL_CALL)) or tape.at == len(tape.text):
            return name


def hermes_calls(body: str) -> list[Call]:
    """Calls of the text between the tags: JSON, or an object as Python writes it. Raise :class:`Unusable`,
    ValueError or SyntaxError for anything else."""
    try:
        return calls_of(json.loads(body))
    except ValueError:
        return calls_of(ast.literal_eval(body.strip()))


def _xml_call(name: str, body: str, tools: KnownTools) -> Call:
    """Make the call of a function from ``<function=`` to ``</function>``. Raise :class:`Unusable` for text
    beside the parameters."""
    name = name.strip()
    inner = body[body.index(">") + 1 : body.rindex(END_FUNCTION)].strip()
    values: dict[str, str] = {}
    at = 0
    while at < len(inner):
        head = PARAMETER.match(inner, at)
        end = -1 if head is None else inner.find(END_PARAMETER, head.end())
        if head is None or end < 0:
            raise Unusable("no function with parameters")
        text = inner[head.end() : end].removeprefix("\n").removesuffix("\n")
        values[head[1].strip()] = text
        at = end + len(END_PARAMETER)
        while inner[at : at + 1].isspace():
            at += 1
    return make_call(name, {key: tools.typed(name, key, text) for key, text in values.items()})


def _take_deepseek(tape: Tape, tools: KnownTools) -> Reading[Taken]:
    """Take a call of DeepSeek's forms."""
    yield from tape.take(CALLS_BEGIN)
    yield from tape.skip_space()
    if not (yield from tape.take(CALL_BEGIN)):
        return Taken(tape.place)
    start = tape.place
    mark = yield from tape.find(END_OF_CALL, (CALL_END,))
    body = tape.since(start, tape.place - len(mark))
    return _made(tape.place, _deepseek_calls, body)


def _deepseek_calls(body: str) -> list[Call]:
    """The call of the text between DeepSeek's markers."""
    head, separator, rest = body.partition(SEPARATOR)
    if not separator:
        raise Unusable("no separator")

    # V3.1: a name and arguments.
    name = head
    arguments = rest

    # V3: the word function, a name, and arguments in a code block.
    if head.strip() == "function":
        before, _, block = rest.partition("\n")
        block = block.rstrip()
        for fence in (f"{FENCE}json\n", f"{FENCE}\n"):
            if before and block.startswith(fence) and block[len(fence) :].endswith(FENCE):
                name = before
                arguments = block[len(fence) : -len(FENCE)]
    return [make_call(name, json.loads(arguments))]


def _take_mistral(tape: Tape, tools: KnownTools) -> Reading[Taken]:
    """Take a list of calls, or one call, of Mistral's forms."""
    yield from tape.take(TOOL_CALLS)
    no_call = Taken(tape.place)
    yield from tape.skip_space()
    if (yield from tape.next_is("[")):
        return (yield from _take_json(tape, tape.place, calls_of))

    # The name, before an object.
    while True:
        head = tape.text[tape.at : tape.at + MOST_NAME]
        name = MISTRAL_NAME.match(head)
        if name is not None:
            break
        may_come = MISTRAL_BEGUN.fullmatch(head) is not None and len(head) < MOST_NAME
        if not may_come or not (yield from tape.more()):
            return no_call
    tape.at += name.end()
    return (yield from _take_json(tape, tape.place, lambda value: [make_call(name[1], value)]))


def _take_llama3(tape: Tape, tools: KnownTools) -> Reading[Taken]:
    """Take calls of Llama's form. An object that names no tool is no call: it may be the answer."""
    yield from tape.take(PYTHON_TAG)
    no_call = Taken(tape.place)
    yield from tape.skip_space()
    start = tape.place
    is_list = yield from tape.take("[")
    if is_list:
        yield from tape.skip_space()
    if not (yield from tape.next_is("{")):
        return no_call

    def calls(value: Any) -> list[Call]:
        found = calls_of(value)
        if any(call.name not in tools for call in found):
            raise Unusable("an object that names no tool")
        return found

    return (yield from _take_json(tape, start, calls, depth=int(is_list)))


def _take_json(tape: Tape, start: int, calls: Callable[[Any], list[Call]], depth: int = 0) -> Reading[Taken]:
    """Take the JSON value that begins at ``start``, up to its end.

    Args:
        depth: number of its brackets that were read.
    """
    if not (yield from read_json(tape, depth)):
        return Taken(tape.place)
    body = tape.since(start, tape.place)
    return _made(tape.place, lambda body: calls(json.loads(body)), body)


HERMES = CallForm((TOOL_CALL,), (TOOL_CALL, END_TOOL_CALL), _take_hermes)
DEEPSEEK = CallForm(
    openers=(CALLS_BEGIN, CALL_BEGIN),
    markers=(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR),
    take=_take_deepseek,
    after=(CALLS_END,),
)
MISTRAL = CallForm((TOOL_CALLS,), (TOOL_CALLS, "[ARGS]", "[CALL_ID]"), _take_mistral)
LLAMA3 = CallForm((PYTHON_TAG,), (PYTHON_TAG,), _take_llama3, after=(";",), is_bare=True)
