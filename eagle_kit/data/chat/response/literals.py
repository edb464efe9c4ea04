"""Values written as text: the place where one ends, and the types that a schema allows."""

import json
import re
from collections.abc import Mapping
from typing import Any

from eagle_kit.data.chat.response.tape import Reading, Tape

IN_STRING = {
    quote: re.compile(rf"[^{quote}\\\n\r]*+(?:\\.[^{quote}\\\n\r]*+)*+", re.DOTALL) for quote in ('"', "'")
}
IN_WORD = re.compile(r"[\w.+-]*+")
WORD = re.compile(r"true|false|null|True|False|None|NaN|-?Infinity|[+-]?[\d.][\w.+-]*+")
CLOSERS = {"{": "}", "[": "]", "(": ")"}
OPENERS = frozenset(CLOSERS)
ENDS = frozenset(CLOSERS.values())
QUOTES = frozenset(IN_STRING)
VALUE = OPENERS | QUOTES | {"word"}
ITEM = VALUE | ENDS
KEY = QUOTES | ENDS
COLON = frozenset({":"})
AFTER_VALUE = ENDS | {","}
BRACKET = re.compile(r'["{}\[\]]')
JSON_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
ALL_KINDS = frozenset(KINDS.values())
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class NoValue(ValueError):
    """The text is neither an object nor a list, however it goes on."""


def read_value(tape: Tape) -> Reading[bool]:
    """Read the object or list that comes next, in JSON or as Python writes it, up to its end.

    Returns:
        True at its end; False if the response ends before.

    Raises:
        NoValue: the text is no such value, however it goes on. The tape is at the first wrong character.
    """
    closers: list[str] = []  # brackets that must be closed, the innermost last
    wanted = OPENERS  # signs that may come next
    while True:
        yield from tape.skip_space()
        if tape.at == len(tape.text):
            return False
        sign = tape.text[tape.at]

        # A string, or a word.
        if sign in IN_STRING:
            tape.at += 1
            if not (yield from _read_string(tape, sign)):
                return False
            if sign not in wanted:
                raise NoValue
        elif IN_WORD.match(sign)[0]:  # type: ignore[index]
            if "word" not in wanted:
                raise NoValue
            word = yield from _read_word(tape)
            if word is None:
                return False
            if WORD.fullmatch(word) is None:
                raise NoValue
            sign = "word"
        elif sign not in wanted:
            raise NoValue
        else:
            tape.at += 1

        # Open or close a bracket.
        if sign in CLOSERS:
            closers.append(CLOSERS[sign])
        elif sign in ENDS:
            if closers.pop() != sign:
                raise NoValue
            if not closers:
                return True

        # Choose the signs that may follow.
        if sign == ":":
            wanted = VALUE
        elif sign in CLOSERS or sign == ",":
            wanted = KEY if closers[-1] == "}" else ITEM
        elif sign in IN_STRING and wanted is KEY:
            wanted = COLON
        else:
            wanted = AFTER_VALUE


def _read_string(tape: Tape, quote: str) -> Reading[bool]:
    """Read the rest of a string. False if the response ends before its end. Raises NoValue for a line end."""
    while True:
        found = IN_STRING[quote].match(tape.text, tape.at)
        assert found is not None
        tape.at = found.end()
        following = tape.text[tape.at : tape.at + 1]
        if following == quote:
            tape.at += 1
            return True
        if following in ("\n", "\r"):
            raise NoValue
        # A backslash whose character has not come may be left.
        if not (yield from tape.more()):
            tape.at = len(tape.text)
            return False


def _read_word(tape: Tape) -> Reading[str | None]:
    """Read a word. None if the response ends before a character that is not of the word."""
    pieces: list[str] = []
    while True:
        found = IN_WORD.match(tape.text, tape.at)
        assert found is not None
        pieces.append(found[0])
        tape.at = found.end()
        if tape.at < len(tape.text):
            return "".join(pieces)
        if not (yield from tape.more()):
            return None


def read_json(tape: Tape, depth: int = 0) -> Reading[bool]:
    """Read up to the bracket that closes the JSON object or list that comes next. False if the response ends
    before. Whether it is JSON is not checked.

    Args:
        depth: number of its brackets that were read already.
    """
    while True:
        found = BRACKET.search(tape.text, tape.at)
        if found is None:
            tape.at = len(tape.text)
            if not (yield from tape.more()):
                return False
            continue
        tape.at = found.end()
        if found[0] == '"':
            if not (yield from _skip_string(tape)):
                return False
        elif found[0] in "{[":
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return True


def _skip_string(tape: Tape) -> Reading[bool]:
    """Read the rest of a JSON string, line ends included. False if the response ends before its end."""
    while True:
        found = JSON_STRING.match(tape.text, tape.at)
        assert found is not None
        tape.at = found.end()
        if tape.text[tape.at : tape.at + 1] == '"':
            tape.at += 1
            return True
        if not (yield from tape.more()):
            tape.at = len(tape.text)
            return False


def end_of_value(text: str, start: int) -> int | None:
    """Find the end of the value that begins at ``start``; see :func:`read_value`.

    Returns:
        The end; None if the value may end in text that is still to come.

    Raises:
        ValueError: the text is no such value, however it goes on.
    """
    tape = Tape()
    tape.feed(text[start:])
    reading = read_value(tape)
    try:
        next(reading)
    except StopIteration:
        return start + tape.place
    return None


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Value of a parameter that was written as plain text.

    It is the text itself if the schema allows strings alone. Otherwise it is read as JSON, or as Python's
    ``True``, ``False`` and ``None``. It stays text if that fails, or if the schema allows strings and not the
    type that was read: of ``int | str`` ``3`` is a number and ``x`` or ``[3]`` a text.

    Args:
        text: as the model wrote it.
        schema: JSON schema of the parameter; None for none, so that it stays text.
        root: schema that holds the definitions to which ``$ref`` points.
    """
    return with_kind(text, allowed_kinds(schema, root))


def with_kind(text: str, kinds: frozenset[str]) -> Any:
    """Value of a parameter of :func:`allowed_kinds`; see :func:`typed`."""
    if kinds == {"string"}:
        return text
    try:
        value = json.loads(PYTHON_WORDS.get(text, text))
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text

    # A quoted string stays as it was written.
    kind = KINDS[type(value)]
    if "string" in kinds and (kind not in kinds or kind == "string"):
        return text
    return value


def allowed_kinds(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Types of a parameter: text alone if it has no schema, all of them if its schema is too deep."""
    if schema is None:
        return frozenset({"string"})
    try:
        return kinds_of(schema, root, {})
    except RecursionError:
        return ALL_KINDS


def kinds_of(schema: Any, root: Mapping[str, Any], known: dict[str, frozenset[str]]) -> frozenset[str]:
    """Types that values of a JSON schema may have, by ``type``, ``enum``, ``const``, ``anyOf``, ``oneOf``,
    ``allOf`` and ``$ref``. Other keywords are ignored.

    Args:
        schema: a schema; anything else has all types.
        root: schema that holds the definitions to which ``$ref`` points.
        known: types by ``$ref``; those of further references are added.
    """
    if not isinstance(schema, dict):
        return ALL_KINDS
    kinds = ALL_KINDS

    # Types by name; an integer is a number.
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        names = {name for name in named if isinstance(name, str)}
        if "number" in names:
            names.add("integer")
        kinds &= names

    # Types of listed values.
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        kinds &= {KINDS[type(value)] for value in values}

    # Types of one of several schemas, or of all of several.
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            kinds &= frozenset().union(*(kinds_of(each, root, known) for each in schema[name]))
    if isinstance(schema.get("allOf"), list):
        for each in schema["allOf"]:
            kinds &= kinds_of(each, root, known)

    # Types of a definition. A reference within itself adds nothing.
    ref = schema.get("$ref")
    if isinstance(ref, str):
        if ref not in known:
            known[ref] = frozenset()
            known[ref] = kinds_of(_target(ref, root), root, known)
        kinds &= known[ref]
    return kinds


def _target(ref: str, root: Any) -> Any:
    """Schema to which a ``$ref`` within ``root`` points; None if there is none."""
    if not ref.startswith("#"):
        return None
    for key in ref.removeprefix("#").split("/")[1:]:
        if not isinstance(root, dict):
            return None
        root = root.get(key.replace("~1", "/").replace("~0", "~"))
    return root
