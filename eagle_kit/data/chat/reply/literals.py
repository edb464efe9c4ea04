"""Values written as text: where one ends, and which types a schema lets it have."""

import json
import re
from collections.abc import Mapping
from typing import Any

from eagle_kit.data.chat.reply.tape import Reading, Tape

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
BEHIND = ENDS | {","}
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
    """Whatever follows, there is neither an object nor a list."""


def read_value(tape: Tape) -> Reading[bool]:
    """Read the object or list that comes next, in JSON or as Python writes it, up to its end.

    Returns:
        True at its end; False where the reply ends before.

    Raises:
        NoValue: whatever follows, there is no such value. The tape is at the character that shows it.
    """
    closers: list[str] = []
    wanted = OPENERS
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

        # What may come behind it.
        if sign in CLOSERS:
            closers.append(CLOSERS[sign])
        elif sign in ENDS:
            if closers.pop() != sign:
                raise NoValue
            if not closers:
                return True
        if sign == ":":
            wanted = VALUE
        elif sign in CLOSERS or sign == ",":
            wanted = KEY if closers[-1] == "}" else ITEM
        elif sign in IN_STRING and wanted is KEY:
            wanted = COLON
        else:
            wanted = BEHIND


def _read_string(tape: Tape, quote: str) -> Reading[bool]:
    """Read the rest of a string -> False where the reply ends before."""
    while True:
        found = IN_STRING[quote].match(tape.text, tape.at)
        assert found is not None
        tape.at = found.end()
        behind = tape.text[tape.at : tape.at + 1]
        if behind == quote:
            tape.at += 1
            return True
        if behind in ("\n", "\r"):
            raise NoValue
        # Only a backslash may be left, whose character has not come.
        if not (yield from tape.more()):
            tape.at = len(tape.text)
            return False


def _read_word(tape: Tape) -> Reading[str | None]:
    """Read a word -> None where the reply ends before a character that is none of it."""
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
    """Read up to the bracket that closes the JSON object or list that comes next, of which ``depth`` brackets
    were read -> False where the reply ends before. Whether it is JSON is not checked."""
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
    """Read the rest of a JSON string, line ends included -> False where the reply ends before."""
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
        the end; None while more text could bring it.

    Raises:
        ValueError: whatever follows, there is no such value.
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

    It is the text where the schema allows strings alone. Otherwise it is what JSON (or Python's ``True``,
    ``False`` and ``None``) reads, and text where that fails, or where the schema allows strings and not what
    was read: of ``int | str`` ``3`` is a number and ``x`` or ``[3]`` a text.

    Args:
        text: as the model wrote it.
        schema: JSON schema of the parameter; None where there is none, so that it stays text.
        root: schema in which ``$ref`` points.
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
    kind = KINDS[type(value)]
    return text if "string" in kinds and (kind not in kinds or kind == "string") else value


def allowed_kinds(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Types of a parameter: text alone where it has no schema, all of them where its schema is too deep."""
    if schema is None:
        return frozenset({"string"})
    try:
        return kinds_of(schema, root, {})
    except RecursionError:
        return ALL_KINDS


def kinds_of(schema: Any, root: Mapping[str, Any], known: dict[str, frozenset[str]]) -> frozenset[str]:
    """Types that values of a JSON schema may have, as far as ``type``, ``enum``, ``const``, ``anyOf``,
    ``oneOf``, ``allOf`` and ``$ref`` tell.

    Args:
        schema: a schema; all types where it is none.
        root: schema in which ``$ref`` points.
        known: types by ``$ref``, to which those that are met are added.
    """
    if not isinstance(schema, dict):
        return ALL_KINDS
    kinds = ALL_KINDS
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        names = frozenset(name for name in named if isinstance(name, str))
        kinds &= names | ({"integer"} if "number" in names else frozenset())
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        kinds &= {KINDS[type(value)] for value in values}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            kinds &= frozenset().union(*(kinds_of(each, root, known) for each in schema[name]))
    joined = schema.get("allOf")
    for each in joined if isinstance(joined, list) else ():
        kinds &= kinds_of(each, root, known)
    if isinstance(ref := schema.get("$ref"), str):
        if ref not in known:
            known[ref] = frozenset()  # a reference to itself adds nothing
            known[ref] = kinds_of(_target(ref, root), root, known)
        kinds &= known[ref]
    return kinds


def _target(ref: str, root: Any) -> Any:
    """Schema that a ``$ref`` within ``root`` points to; None where there is none."""
    for key in ref.removeprefix("#").split("/")[1:]:
        root = root.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root if ref.startswith("#") else None
