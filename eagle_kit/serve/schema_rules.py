"""JSON schemas that a grammar may have. xgrammar ignores some of their keywords without a word, alone or
beside others; what it does not follow is refused here, before anything is compiled. What is ill-formed is
left to it.
"""

import re
from collections.abc import Iterable
from itertools import combinations
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.serve.regex_rules import check_regex

MAX_SUBSCHEMAS = 1000
MAX_ENUM_VALUES = 4096
MAX_BRANCHES = 64
"""Of oneOf, which are compared pair by pair."""
MAX_COUNT = 100_000
"""Largest sum of all lengths and counts (``maxLength``, ``minItems``, ...) that a schema names."""

ANNOTATIONS = {
    *("title", "description", "default", "examples", "discriminator", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$defs", "definitions"),
}
CHOICES = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords that xgrammar reads alone, the first it finds."""
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
FORMATS = {
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
    *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
}


def check_schema(schema: Any) -> None:
    """Raises UserError for a JSON schema with something in it that would be ignored, or that is too large."""
    _Schema(schema).check(schema, "")


class _Schema:
    """Walks a schema and counts what is in it."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_schemas = self._num_values = self._sum_counts = 0

    def check(self, schema: Any, path: str) -> None:
        if not isinstance(schema, dict):
            return  # true, false, or ill-formed, which xgrammar says
        given = {name: value for name, value in schema.items() if name not in ANNOTATIONS}
        for name in given:
            if name not in KEYWORDS:
                raise _refusal(f"{path}/{name}"[:200], "is not supported")
        self._count(given)
        choice = next((name for name in CHOICES if name in given), None)
        if choice is not None:
            _check_choice(choice, given, path)
            self._check_branches(given.get("oneOf"), path)
        else:
            _check_type(given, path)
            _check_text(given, path)
            _check_object(given, path)
        for name in ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"):
            self.check(given.get(name), f"{path}/{name}")
        self.check(given.get("propertyNames"), f"{path}/propertyNames")
        for name in ("prefixItems", "anyOf", "oneOf", "allOf"):
            each = given.get(name)
            for i, one in enumerate(each if isinstance(each, list) else ()):
                self.check(one, f"{path}/{name}/{i}")
        for name in ("properties", "patternProperties", "$defs", "definitions"):
            named = schema.get(name)
            for key, one in named.items() if isinstance(named, dict) else ():
                self.check(one, f"{path}/{name}/{key}")

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


def _check_type(given: dict[str, Any], path: str) -> None:
    """Without a type xgrammar takes anything, unless properties or items show what is meant."""
    shown = ("properties", "additionalProperties", "items", "prefixItems")
    if given and "type" not in given and not any(name in given for name in shown):
        raise UserError(
            f"The json schema's {path.lstrip('/') or 'root'} has {next(iter(given))} without a type.",
            "Add the type.",
        )
    if "number" in _as_list(given.get("type")) and "multipleOf" in given:
        raise _refusal(f"{path}/multipleOf", "belongs to a number; it is supported for integers")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_text(given: dict[str, Any], path: str) -> None:
    """Of a string's pattern, format and lengths xgrammar reads one."""
    kinds: list[str] = [name for name in ("pattern", "format") if name in given]
    kinds += ["minLength or maxLength"] if "minLength" in given or "maxLength" in given else []
    if len(kinds) > 1:
        raise _refusal(f"{path}/{kinds[0]}", f"stands beside {kinds[1]}, of which one is supported")
    if "format" in given and str(given["format"]) not in FORMATS:
        raise _refusal(f"{path}/format", f"is {str(given['format'])[:100]!r}, which is not supported")
    if isinstance(given.get("pattern"), str):
        check_regex(given["pattern"])


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
    for pattern in patterns if isinstance(patterns, dict) else ():
        check_regex(pattern)


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
