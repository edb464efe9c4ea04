"""Values written as text: where one ends, and which types a schema lets it have."""

import json
import re
from collections.abc import Mapping
from typing import Any

# Atomic, so that a string that is not closed yet is looked at once.
DOUBLE, SINGLE = r'"(?>[^"\\\n\r]*(?:\\.[^"\\\n\r]*)*)', r"'(?>[^'\\\n\r]*(?:\\.[^'\\\n\r]*)*)"
TOKEN = re.compile(
    rf"\s*(?:(?P<open>[{{\[(])|(?P<close>[}}\])])|(?P<mark>[,:])"
    rf"|(?P<string>{DOUBLE}\"|{SINGLE}')|(?P<word>[\w.+-]+))",
    re.DOTALL,
)
CUT = re.compile(rf"\s*(?:(?:{DOUBLE}|{SINGLE})\\?)?", re.DOTALL)
WORD = re.compile(r"true|false|null|True|False|None|NaN|-?Infinity|[+-]?[\d.][\w.+-]*")
CLOSERS = {"{": "}", "[": "]", "(": ")"}
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


def end_of_value(text: str, start: int) -> int | None:
    """Find the end of the object or list that begins at ``start``, in JSON or as Python writes it.

    Returns:
        the end; None while more text could bring it.

    Raises:
        ValueError: whatever follows, there is no such value.
    """
    closers: list[str] = []
    wanted, at = {"open"}, start
    while (token := TOKEN.match(text, at)) is not None:
        kind, found, at = token.lastgroup or "", token[token.lastgroup or 0], token.end()
        if (found if kind == "mark" else kind) not in wanted:
            break
        if kind == "open":
            closers.append(CLOSERS[found])
        elif kind == "close":
            if closers.pop() != found:
                break
            if not closers:
                return at
        elif kind == "word":
            if at == len(text):
                return None
            if WORD.fullmatch(found) is None:
                break
        if found == ":" and kind == "mark":
            wanted = {"open", "string", "word"}
        elif kind == "open" or (kind == "mark" and found == ","):
            wanted = {"string", "close"} if closers[-1] == "}" else {"open", "string", "word", "close"}
        elif kind == "string" and wanted == {"string", "close"}:
            wanted = {":"}
        else:
            wanted = {",", "close"}
    if token is None and CUT.fullmatch(text, at) is not None:
        return None
    raise ValueError("neither an object nor a list")


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
    kinds = frozenset({"string"}) if schema is None else kinds_of(schema, root, {})
    if kinds == {"string"}:
        return text
    try:
        value = json.loads(PYTHON_WORDS.get(text, text))
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    kind = KINDS[type(value)]
    return text if "string" in kinds and (kind not in kinds or kind == "string") else value


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
        kinds &= frozenset(named) | ({"integer"} if "number" in named else frozenset())
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        kinds &= {KINDS[type(value)] for value in values}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            kinds &= frozenset().union(*(kinds_of(each, root, known) for each in schema[name]))
    for each in schema.get("allOf", ()):
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
