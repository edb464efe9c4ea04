"""JSON schemas that a grammar may have. xgrammar ignores some of their keywords without a word, alone or
beside others; what it does not follow is refused here, before anything is compiled. What is ill-formed is
left to it.

What is left is written as xgrammar can follow it: patterns match whole strings, annotations go. Compiling
is estimated in milliseconds of one core with 49,152 tokens, and rather too high.
"""

import json
import re
from collections.abc import Iterable
from itertools import combinations
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.serve.grammar.regex_rules import Checked, check_pattern

MAX_SUBSCHEMAS = 1000
MAX_ENUM_VALUES = 4096
MAX_BRANCHES = 64
"""Of oneOf, which are compared pair by pair."""
MAX_SCHEMA_MS = 3000.0
"""Estimated time to compile one schema."""
SCHEMA_MS, COUNT_MS, BOUND_MS, MULTIPLE_MS, BYTE_MS = 0.2, 2.0, 2.0, 0.2, 0.008
"""Of a subschema, a count of items or properties, an end of a range, a one of ``multipleOf``, and a byte of
names and constants."""
MAX_MULTIPLE = 1024
"""xgrammar ignores larger ones."""
MAX_COUNT = 100_000
"""Largest sum of all lengths and counts (``maxLength``, ``minItems``, ...) that a schema names."""

ANNOTATIONS = {
    *("title", "description", "default", "example", "examples", "discriminator"),
    *("deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment"),
}
DEFINITIONS = ("$defs", "definitions")
CHOICES = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords that xgrammar reads alone, the first it finds."""
TEXT = ("pattern", "format", "minLength", "maxLength")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
KEYWORDS = {
    *CHOICES,
    *COUNTS,
    *("type", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("items", "prefixItems", "unevaluatedItems"),
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    "unevaluatedProperties",
}
FORMAT_MS = {
    **{"date": 2, "time": 2, "date-time": 2, "duration": 3, "email": 20, "hostname": 8, "ipv4": 2, "ipv6": 4},
    **{"uuid": 2, "uri": 20, "uri-reference": 20, "uri-template": 60},
}
"""Formats, and what each takes to compile."""
FREE_FORMATS = {"path", "binary", "password"}
"""Say what a text is for, and nothing about its characters."""
NEVER_EMPTY = FORMAT_MS.keys() - {"uri-reference", "uri-template"}
_PATH = r"[A-Za-z0-9._~!$&'()*+,;=:@/\-]{0,120}"
URL = (
    r"^[a-z][a-z0-9+.\-]{0,15}://[A-Za-z0-9]([A-Za-z0-9.\-]{0,60}[A-Za-z0-9])?" + rf"(/{_PATH})?(\?{_PATH})?$"
)
"""A uri with ``maxLength``, of at most ``MIN_URL_LENGTH`` characters."""
MIN_URL_LENGTH = 330
URL_MS = 700.0
LENGTH_MS, MAX_LENGTH_MS = 9.0, 600.0
"""Of a string's length, per character and at most. Those beyond 128 take up to 2 s, which is more: otherwise
few schemas with lengths would be left, and the server has a deadline too."""


def check_schema(schema: Any) -> Any:
    """A JSON schema as xgrammar is to read it. Raises UserError for one with something in it that would be
    ignored, or that is too large."""
    return _Schema(schema).checked()


class _Schema:
    """Walks a schema, counts what is in it, and writes it again."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_schemas = self._num_values = self._sum_counts = 0
        self._ms = 0.0
        self._seen: set[int] = set()
        self._references: list[tuple[str, str]] = []
        self._lengths: set[str] = set()

    def checked(self) -> Any:
        schema = self.check(self._root, "")
        for reference, path in self._references:
            if id(self._target(reference)) not in self._seen:
                raise _refusal(f"{path}/$ref", "points to no schema in it")
        return schema

    def _target(self, reference: str) -> Any:
        at = self._root
        for part in reference.split("/")[1:]:
            at = at.get(part) if isinstance(at, dict) else None
        return at

    def check(self, schema: Any, path: str) -> Any:
        if not isinstance(schema, dict):
            return schema  # true, false, or ill-formed, which xgrammar says
        self._seen.add(id(schema))
        given = {
            name: value
            for name, value in schema.items()
            if name not in ANNOTATIONS and name not in DEFINITIONS
        }
        for name in given:
            if name not in KEYWORDS:
                raise _refusal(_at(path, name), "is not supported")
        self._count(given)
        choice = next((name for name in CHOICES if name in given), None)
        if choice is not None:
            _check_choice(choice, given, path)
            if choice == "$ref":
                self._references.append((str(given["$ref"]), path))
            self._check_branches(given.get("oneOf"), path)
        else:
            given = _plain(given)
            _check_type(given, path)
            _check_text(given, path)
            _check_object(given, path)
            given = self._written(given)
        return self._children(schema, given, path)

    def _children(self, schema: dict[str, Any], given: dict[str, Any], path: str) -> dict[str, Any]:
        nested = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties")
        for name in (*nested, "propertyNames"):
            if name in given:
                given[name] = self.check(given[name], _at(path, name))
        for name in ("prefixItems", "anyOf", "oneOf", "allOf"):
            each = given.get(name)
            if isinstance(each, list):
                given[name] = [self.check(one, _at(path, f"{name}/{i}")) for i, one in enumerate(each)]
        for name in ("properties", "patternProperties", *DEFINITIONS):
            named = schema.get(name)
            if isinstance(named, dict):
                self._charge(BYTE_MS * _num_bytes(list(named)))
                given[name] = {
                    self._key(key, name): self.check(one, _at(path, f"{name}/{key}"))
                    for key, one in named.items()
                }
        return given

    def _key(self, key: str, name: str) -> str:
        if name == "patternProperties":
            pattern = check_pattern(key)
            self._charge(pattern.ms + COUNT_MS)
            return pattern.text
        return key

    def _written(self, given: dict[str, Any]) -> dict[str, Any]:
        """``given`` with what it says of texts as a pattern, if that can be."""
        self._charge(FORMAT_MS.get(str(given.get("format")), 0) + self._length_ms(given))
        if not (pattern := _text_pattern(given)):
            return given
        self._charge(pattern.ms + COUNT_MS)
        return {**{name: value for name, value in given.items() if name not in TEXT}, "pattern": pattern.text}

    def _length_ms(self, given: dict[str, Any]) -> float:
        """Equal lengths are compiled once."""
        lengths = given.get("minLength"), given.get("maxLength")
        longest = max((one for one in lengths if isinstance(one, int)), default=0)
        if longest < 2 or "format" in given or str(lengths) in self._lengths:
            return COUNT_MS if longest else 0.0
        self._lengths.add(str(lengths))
        return min(LENGTH_MS * longest, MAX_LENGTH_MS)

    def _check_branches(self, branches: Any, path: str) -> None:
        """xgrammar takes oneOf as anyOf, so no value may match two branches."""
        each = [self._resolved(one) for one in branches] if isinstance(branches, list) else []
        if len(each) > MAX_BRANCHES or not all(_are_disjoint(*pair) for pair in combinations(each, 2)):
            raise UserError(
                f"The json schema's {path.lstrip('/') or 'root'} has branches in oneOf that both may match.",
                "Use anyOf, or tell them apart by type, or by a required property with different const.",
            )

    def _resolved(self, schema: Any) -> Any:
        """What ``{"$ref": "#/$defs/name"}`` stands for."""
        parts = str(schema.get("$ref", "")).split("/") if isinstance(schema, dict) else []
        if len(parts) != 3 or parts[0] != "#" or not isinstance(self._root, dict):
            return schema
        definitions = self._root.get(parts[1])
        return definitions.get(parts[2]) if isinstance(definitions, dict) else schema

    def _count(self, given: dict[str, Any]) -> None:
        self._num_schemas += 1
        values = given.get("enum")
        self._num_values += len(values) if isinstance(values, list) else 0
        self._sum_counts += sum(max(0, value) for name in COUNTS if isinstance(value := given.get(name), int))
        for what, count, most in (
            ("subschemas", self._num_schemas, MAX_SUBSCHEMAS),
            ("values in enum", self._num_values, MAX_ENUM_VALUES),
            ("as the sum of its lengths and counts", self._sum_counts, MAX_COUNT),
        ):
            if count > most:
                raise UserError(
                    f"The json schema has more than {most} {what}.", "Ask for less, or for a json_object."
                )
        constants = [given[name] for name in ("const", "enum", "required") if name in given]
        ms = SCHEMA_MS + BYTE_MS * (_num_bytes(constants) if constants else 0)
        ms += COUNT_MS * sum(name in given for name in COUNTS if not name.endswith("Length"))
        ms += BOUND_MS * sum(name in given for name in BOUNDS)
        multiple = given.get("multipleOf")
        self._charge(ms + MULTIPLE_MS * (min(multiple, MAX_MULTIPLE) if isinstance(multiple, int) else 0))

    def _charge(self, ms: float) -> None:
        self._ms += ms
        if self._ms > MAX_SCHEMA_MS:
            raise UserError(
                f"The json schema would take more than {MAX_SCHEMA_MS / 1000:.0f} seconds to compile.",
                "Use fewer and shorter patterns, lengths, names and constants, or ask for a json_object.",
            )


def _at(path: str, name: str) -> str:
    return f"{path}/{name}"[:200]


def _num_bytes(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def _refusal(where: str, why: str) -> UserError:
    return UserError(
        f"The json schema's {where.lstrip('/') or 'root'} {why}.",
        "Leave it out, and check the reply instead.",
    )


def _check_choice(choice: str, given: dict[str, Any], path: str) -> None:
    """Beside a keyword that xgrammar reads alone there may be a type that says nothing new."""
    value = given[choice]
    where = f"{path}/{choice}"
    values = [value] if choice == "const" else value if choice == "enum" else None
    beside = [name for name in given if name != choice]
    if beside == ["type"] and isinstance(values, list):
        if not all(_has_type(one, given["type"]) for one in values):
            raise _refusal(where, f"has values that are not of the type beside {choice}")
    elif beside:
        raise _refusal(f"{path}/{beside[0]}", f"stands beside {choice}, which is supported only alone")
    if choice == "$ref" and not re.match(r"#(/|$)", str(value)):
        raise _refusal(where, "points out of the schema")
    if choice == "allOf" and isinstance(value, list) and len(value) > 1:
        raise _refusal(where, "joins several schemas")


def _has_type(value: Any, kind: Any) -> bool:
    return any(one in _types_of(value) for one in _as_list(kind) if isinstance(one, str))


def _types_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        whole = isinstance(value, int) or value.is_integer()
        return {"number", "integer"} if whole else {"number"}
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return {names.get(type(value), "null")}


def _plain(given: dict[str, Any]) -> dict[str, Any]:
    """Without what says nothing."""
    form, low = given.get("format"), given.get("minLength")
    result = dict(given)
    if isinstance(form, str) and form in FREE_FORMATS:
        del result["format"]
    elif type(low) is int and low == 1 and isinstance(form, str) and form in NEVER_EMPTY:
        del result["minLength"]
    if type(low) is int and low <= 0:
        del result["minLength"]
    return result


def _text_pattern(given: dict[str, Any]) -> Checked | None:
    """What the whole text matches, for xgrammar; None when no pattern says it."""
    if isinstance(given.get("pattern"), str):
        return check_pattern(given["pattern"])
    if "format" in given:
        return Checked(URL, URL_MS) if "maxLength" in given else None
    return None


def _check_type(given: dict[str, Any], path: str) -> None:
    """Without a type xgrammar takes anything, unless properties or items show what is meant."""
    shown = ("properties", "additionalProperties", "items", "prefixItems")
    if given and "type" not in given and not any(name in given for name in shown):
        raise UserError(
            f"The json schema's {path.lstrip('/') or 'root'} has {next(iter(given))} without a type.",
            "Add the type.",
        )
    if "multipleOf" in given:
        if given.get("type") != "integer":
            raise _refusal(f"{path}/multipleOf", "is supported for the type integer alone")
        if type(given["multipleOf"]) is not int or not 1 <= given["multipleOf"] <= MAX_MULTIPLE:
            raise _refusal(f"{path}/multipleOf", f"is not an integer from 1 to {MAX_MULTIPLE}")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_text(given: dict[str, Any], path: str) -> None:
    """Of a string's pattern, format and lengths xgrammar reads one."""
    kinds: list[str] = [name for name in ("pattern", "format") if name in given]
    kinds += ["minLength or maxLength"] if "minLength" in given or "maxLength" in given else []
    is_long_uri = given.get("format") == "uri" and set(given) & set(TEXT) == {"format", "maxLength"}
    if is_long_uri and type(given["maxLength"]) is int and given["maxLength"] >= MIN_URL_LENGTH:
        return
    if len(kinds) > 1:
        raise _refusal(f"{path}/{kinds[0]}", f"stands beside {kinds[1]}, of which one is supported")
    if "format" in given and str(given["format"]) not in FORMAT_MS:
        raise _refusal(f"{path}/format", f"is {str(given['format'])[:100]!r}, which is not supported")


def _check_object(given: dict[str, Any], path: str) -> None:
    """Names are read in one way: listed, by a pattern, or any."""
    properties, required = given.get("properties", {}), given.get("required", [])
    if isinstance(properties, dict) and isinstance(required, list):
        for name in required:
            if str(name) not in properties:
                raise UserError(
                    f"The json schema's {path.lstrip('/') or 'root'} requires {str(name)[:100]!r}, which is "
                    "not among its properties.",
                    "Add it there.",
                )
    patterns, names = given.get("patternProperties"), given.get("propertyNames")
    if isinstance(patterns, dict) and (len(patterns) > 1 or properties or names is not None):
        raise _refusal(f"{path}/patternProperties", "stands beside other names, or has several patterns")
    if patterns is not None and given.get("additionalProperties", False) is not False:
        raise _refusal(f"{path}/patternProperties", "stands beside additionalProperties")
    if names is not None and properties:
        raise _refusal(f"{path}/propertyNames", "stands beside properties")
    others = patterns is not None or names is not None or not properties
    others |= any(
        given.get(name, False) is not False for name in ("additionalProperties", "unevaluatedProperties")
    )
    least, num_sure = (
        given.get("minProperties"),
        len(set(map(str, required))) if isinstance(required, list) else 0,
    )
    if others and isinstance(least, int) and least > max(1, num_sure):
        raise _refusal(
            f"{path}/minProperties", "is above 1 beside names that are not listed, which may come twice"
        )


def _are_disjoint(one: Any, other: Any) -> bool:
    """Whether no value can match both, as far as types and constants show."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return False
    values = _values(one), _values(other)
    if values[0] is not None and values[1] is not None:
        return not any(a == b for a in values[0] for b in values[1])
    kinds = [_kinds(each) for each in (one, other)]
    if all(kinds) and not kinds[0] & kinds[1]:
        return True
    both = _required(one).keys() & _required(other).keys()
    return any(_are_disjoint(_required(one)[name], _required(other)[name]) for name in both)


def _values(schema: dict[str, Any]) -> list[Any] | None:
    values: Iterable[Any] | None = [schema["const"]] if "const" in schema else schema.get("enum")
    return list(values)[:MAX_ENUM_VALUES] if isinstance(values, list) else None


def _kinds(schema: dict[str, Any]) -> set[str]:
    """Types of its values; an integer is a number too. Empty when they are not known."""
    values = _values(schema)
    if values is not None:
        return set().union(*map(_types_of, values))
    kinds = {kind for kind in _as_list(schema.get("type")) if isinstance(kind, str)}
    return kinds | {"integer"} if "number" in kinds else kinds


def _required(schema: dict[str, Any]) -> dict[str, Any]:
    properties, required = schema.get("properties"), schema.get("required")
    if not (isinstance(properties, dict) and isinstance(required, list)):
        return {}
    return {name: properties[name] for name in required if isinstance(name, str) and name in properties}
