"""JSON schemas of requests: every keyword is followed or refused, and the work of compiling has a bound.

llguidance refuses most of what it cannot follow, but ignores keywords that it does not know, and some schemas
take it minutes (intersections of patterns, comparisons of the branches of ``oneOf``) or all of its stack
(chains of references). :func:`check_schema` looks at every value once.
"""

import re
from decimal import Decimal
from typing import Any

from eagle_kit.core.errors import UserError, cut, shown

MAX_SCHEMA_CHARS = 131_072
MAX_SCHEMA_SIZE = 4096
"""Sum over the schema of ``SUBSCHEMA_SIZE``, ``KEYWORD_SIZES``, one per value of ``enum``, and the digits of
``multipleOf`` read as one number; this size compiles in at most about half a second."""
SUBSCHEMA_SIZE = 4
KEYWORD_SIZES = {
    **{"format": 16, "pattern": 4},
    **{"minimum": 4, "maximum": 4, "exclusiveMinimum": 4, "exclusiveMaximum": 4},
}
MAX_DEPTH = 256
"""Subschemas inside one another when each definition is followed once; about 800 exhaust a stack of 8 MiB."""

ALONE = ("$ref", "anyOf", "oneOf", "allOf")
"""Keywords whose intersection with others takes exponential time."""
SCHEMA = ("items", "additionalProperties")
SCHEMAS = ("prefixItems", "anyOf", "oneOf", "allOf")
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
DEFINITIONS = ("$defs", "definitions")
ANNOTATIONS = frozenset(
    {"title", "description", "default", "example", "examples", "discriminator", "deprecated", "readOnly"}
    | {"writeOnly", "$comment"}
)
KEYWORDS = frozenset(
    {*ALONE, *SCHEMA, *SCHEMAS, *NAMED_SCHEMAS, "type", "const", "enum", "required", "pattern", "format"}
    | {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
FREE_FORMATS = frozenset({"path", "binary", "password"})
"""Formats that say what a string is for, and nothing about its characters."""


def check_schema(schema: Any) -> dict[str, Any]:
    """Return ``schema`` as llguidance is to read it; it is changed in place.

    Raises:
        UserError: it holds something that would be ignored, or that takes too long to compile.
    """
    if not isinstance(schema, dict):
        raise _refusal("", "is no object")
    for name in ("$schema", "$id"):  # a dialect of its own, or another base for references, inside is refused
        schema.pop(name, None)
    for name in DEFINITIONS:
        if schema.get(name) is None:  # null counts as missing
            schema.pop(name, None)
        elif not isinstance(schema[name], dict):
            raise _refusal(name, "is no object")
    walk = _Walk(schema)
    definitions = [one for name in DEFINITIONS for one in _named(schema.get(name)).values()]
    if walk.depth(schema) + sum(map(walk.depth, definitions)) > MAX_DEPTH:
        raise _too_deep()
    return schema


def check_pattern(text: str) -> None:
    """Raise UserError for a regex that ends in half an escape, which llguidance drops."""
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise UserError("The regex ends in a single backslash.", r"Write \\ for the sign itself.")


class _Walk:
    """One pass over a schema, with the budget of the request."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._size = 0

    def depth(self, schema: Any, path: str = "", above: int = 1) -> int:
        """Check a subschema that lies inside of ``above`` - 1 others -> levels of subschemas in it."""
        if not isinstance(schema, dict):
            return 1  # true, false, or ill-formed, which llguidance refuses
        if above > MAX_DEPTH:
            raise _too_deep()
        self._check_keywords(schema, path)
        inner = [(name, schema[name]) for name in SCHEMA if name in schema]
        for name in SCHEMAS:
            each = schema.get(name)
            inner += [(f"{name}/{i}", one) for i, one in enumerate(each)] if isinstance(each, list) else []
        for name in NAMED_SCHEMAS if schema is not self._root else NAMED_SCHEMAS[:2]:
            inner += [(f"{name}/{key}", one) for key, one in _named(schema.get(name)).items()]
        for pattern in _named(schema.get("patternProperties")):
            check_pattern(pattern)
        return 1 + max((self.depth(one, f"{path}/{at}"[:200], above + 1) for at, one in inner), default=0)

    def _check_keywords(self, schema: dict[str, Any], path: str) -> None:
        given = [name for name in schema if name not in ANNOTATIONS and name not in DEFINITIONS]
        self._charge(schema)
        for name in given:
            if name not in KEYWORDS:
                raise _refusal(f"{path}/{name}", "is not supported")
        for name in ALONE:
            if name in schema and len(given) > 1:
                raise _refusal(f"{path}/{name}", "has keywords beside it, and is supported only alone")
        if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
            raise _refusal(f"{path}/allOf", "joins several schemas")
        if "$ref" in schema and not re.fullmatch(r"#(/(\$defs|definitions)/[^/]+)?", str(schema["$ref"])):
            raise _refusal(f"{path}/$ref", "points neither to # nor to a definition of the whole schema")
        if "oneOf" in schema:
            self._check_one_of(schema["oneOf"], path)
        if isinstance(schema.get("pattern"), str):
            check_pattern(schema["pattern"])
        if "format" in schema:
            form = str(schema["format"])[:100]
            if form in FREE_FORMATS:
                del schema["format"]
            elif form not in FORMATS:
                raise _refusal(f"{path}/format", f"is {shown(form)}, which is not supported")
        least = schema.get("minProperties")
        required = schema.get("required")
        num_sure = len(required) if isinstance(required, list) else 0
        if isinstance(least, int) and least > max(1, num_sure):
            raise _refusal(
                f"{path}/minProperties",
                "is above 1 beside properties that are not required, which may come twice",
            )

    def _charge(self, schema: dict[str, Any]) -> None:
        values = schema.get("enum")
        multiple = schema.get("multipleOf", 0)
        self._size += SUBSCHEMA_SIZE + sum(size for name, size in KEYWORD_SIZES.items() if name in schema)
        self._size += len(values) if isinstance(values, list) else 0
        if type(multiple) in (int, float):
            self._size += int("".join(map(str, Decimal(str(multiple)).as_tuple().digits))[:9] or 0)
        if self._size > MAX_SCHEMA_SIZE:
            raise UserError(
                f"The json schema is larger than {MAX_SCHEMA_SIZE}, which takes too long to compile.",
                "Use fewer subschemas, formats and values of enum, and a smaller multipleOf, or ask for a "
                "json_object.",
            )

    def _check_one_of(self, branches: Any, path: str) -> None:
        """Refuse ``oneOf`` unless no value can match two branches, since it is compiled as ``anyOf``."""
        each = [_Branch(self._resolved(one)) for one in branches] if isinstance(branches, list) else []
        objects = [set(branch.tags) for branch in each if branch.tags]
        if not any(
            _are_distinct(each, tag) for tag in (None, *sorted(set.intersection(*objects or [set()])))
        ):
            where = cut(path.lstrip("/")) or "root"
            raise UserError(
                f"The json schema's {where} has branches in oneOf that both may match.",
                "Use anyOf, or tell them apart by type, or by a required property with different const.",
            )

    def _resolved(self, schema: Any) -> Any:
        parts = str(schema.get("$ref", "")).split("/") if isinstance(schema, dict) else []
        return _named(self._root.get(parts[1])).get(parts[2]) if len(parts) == 3 else schema


class _Branch:
    """The values of one branch of ``oneOf``, as far as they can be told from those of the others.

    Attributes:
        kinds: their types; an integer is a number. Empty when they are not known.
        values: all of them, each with its type, when they are listed and neither arrays nor objects.
        tags: of objects, the values of each required property that lists them.
    """

    def __init__(self, schema: Any) -> None:
        given = _named(schema)
        listed = given.get("enum", [given["const"]] if "const" in given else None)
        named = given.get("type")
        kinds = named if isinstance(named, list) else [named]
        self.kinds = {"number" if kind == "integer" else kind for kind in kinds if isinstance(kind, str)}
        self.values: list[tuple[str, Any]] | None = None
        if isinstance(listed, list):
            self.kinds = {_kind(value) for value in listed}
            if not self.kinds & {"array", "object"}:
                self.values = [(_kind(value), value) for value in listed]
        self.tags: dict[str, list[tuple[str, Any]]] = {}
        required = given.get("required")
        if self.kinds == {"object"} and isinstance(required, list):
            properties = _named(given.get("properties"))
            inner = {name: _Branch(properties.get(name)) for name in required if isinstance(name, str)}
            self.tags = {name: branch.values for name, branch in inner.items() if branch.values}


def _are_distinct(branches: list[_Branch], tag: str | None) -> bool:
    """Return True if no value matches two branches, of which objects may be told apart by their ``tag``."""
    claims: list[Any] = []
    whole = set[str]()
    partly = set[str]()
    for branch in branches:
        if not branch.kinds:
            return False
        if branch.values is not None:
            claims += branch.values
            partly |= branch.kinds
        elif tag in branch.tags:
            claims += [(tag, value) for value in branch.tags[str(tag)]]
            partly.add("object")
        else:
            claims += branch.kinds
            whole |= branch.kinds
    return len(set(claims)) == len(claims) and not whole & partly


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _named(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _refusal(where: str, why: str) -> UserError:
    return UserError(
        f"The json schema's {cut(where.lstrip('/')) or 'root'} {why}.",
        "Leave it out, and check the response instead.",
    )


def _too_deep() -> UserError:
    return UserError(
        f"The json schema has more than {MAX_DEPTH} subschemas inside one another, references followed.",
        "Use fewer or flatter definitions.",
    )
