"""``http.md``: endpoints, bodies and errors of the server, from its OpenAPI description."""

import asyncio
from collections.abc import Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI

from eagle_kit.config.server import ServerConfig
from eagle_kit.server.api.documented import MEANINGS
from eagle_kit.server.api.errors import TYPES, ApiError
from eagle_kit.server.api.middleware import OPEN_PATHS
from eagle_kit.server.api.routes_generate import add_generation_routes
from eagle_kit.server.api.routes_operate import add_operation_routes
from eagle_kit.server.api.routes_tokens import add_token_routes
from generate.markdown import code, table, wrapped

COMPONENTS = "#/components/schemas/"
NAMES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "object": "object",
}
"""Type of JSON -> its name on the page."""
UNUSED_STATUS = "422"
"""FastAPI describes this status; the server answers such requests with 400 or 404."""
PLAIN_TEXTS = {"Successful Response": "The request succeeded."}
"""Descriptions that FastAPI writes -> ours."""
LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}
SIZES = {"string": ("minLength", "maxLength", "characters"), "array": ("minItems", "maxItems", "items")}
"""Type of JSON -> keywords of its least and greatest size, and the unit."""


def http_page() -> str:
    """Endpoints, request bodies, responses and errors."""
    description = server_description()
    schemas = description["components"]["schemas"]
    requests = _reachable(schemas, _request_bodies(description))
    responses = _reachable(schemas, _response_bodies(description) - {"ErrorResponse"}) - requests
    written = (
        "Written by `make reference` from the server's OpenAPI description, which a running server has at "
        "`/openapi.json`."
    )
    lines = ["# HTTP", "", *wrapped(written)]
    lines += ["", "## Endpoints", "", *_endpoint_table(description)]
    for path, method, operation in _operations(description):
        lines += ["", f"### `{method.upper()} {path}`", "", *_operation_lines(operation)]

    rule = (
        "An absent parameter and `null` mean the default. Unknown parameters and values of another type are "
        "errors: `true` is not 1, and `1.0` is not a whole number."
    )
    lines += ["", "## Request bodies", "", *wrapped(rule)]
    for name in sorted(requests):
        lines += _schema_lines(name, schemas[name], nullable=False)
    lines += ["", "## Response bodies"]
    for name in sorted(responses):
        lines += _schema_lines(name, schemas[name], nullable=True)
    lines += ["", "## Errors", "", *_error_lines(schemas)]
    return "\n".join(lines) + "\n"


def server_description() -> dict[str, Any]:
    """OpenAPI description of the routes; no model is loaded, because a description needs none."""
    app = FastAPI(title="eagle_kit")
    service: Any = SimpleNamespace(
        config=ServerConfig(model_name="MODEL"),
        engine=SimpleNamespace(draining=asyncio.Event()),
        llm=SimpleNamespace(max_context=0),
        started_at=0,
        max_chars=0,
    )
    add_generation_routes(app, service)
    add_token_routes(app, service)
    add_operation_routes(app, service)
    return app.openapi()


def _operations(description: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Paths, methods and operations, in the order in which the server declares them."""
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _endpoint_table(description: dict[str, Any]) -> list[str]:
    rows = []
    for path, method, operation in _operations(description):
        name = f"{method.upper()} {path}"
        needs_key = "no" if path in OPEN_PATHS else "yes"
        rows.append((f"[`{name}`](#{_anchor(name)})", _about(operation), needs_key))
    return table(("endpoint", "purpose", "API key"), rows)


def _operation_lines(operation: dict[str, Any]) -> list[str]:
    """Text, body, responses and errors of an operation."""
    lines = wrapped(_about(operation))
    body = operation.get("requestBody")
    if body is not None:
        lines += ["", f"Body: {_type(_content_schema(body))}."]
    rows = []
    errors = []
    for status, response in sorted(operation["responses"].items()):
        schema = _content_schema(response)
        if status == UNUSED_STATUS:
            continue
        if schema == {"$ref": f"{COMPONENTS}ErrorResponse"}:
            errors.append(status)
            continue
        shown = "text" if schema is None else _type(schema)
        if "text/event-stream" in response.get("content", {}):
            shown += ", or server-sent events"
        rows.append((status, PLAIN_TEXTS.get(response["description"], response["description"]), shown))
    lines += ["", *table(("status", "when", "body"), rows)]
    if errors:
        lines += ["", f"[Errors](#errors): {', '.join(errors)}."]
    return lines


def _about(operation: dict[str, Any]) -> str:
    return code(" ".join(operation.get("description", "").split()))


def _content_schema(part: dict[str, Any]) -> dict[str, Any] | None:
    """Schema of the JSON of a body or response; None if it is no JSON or has none."""
    return part.get("content", {}).get("application/json", {}).get("schema")


def _request_bodies(description: dict[str, Any]) -> set[str]:
    """Names of the schemas of request bodies."""
    found = [
        _content_schema(operation.get("requestBody", {})) for _, _, operation in _operations(description)
    ]
    return {_name(schema) for schema in found if schema is not None}


def _response_bodies(description: dict[str, Any]) -> set[str]:
    """Names of the schemas of responses."""
    names = set()
    for _, _, operation in _operations(description):
        for status, response in operation["responses"].items():
            schema = _content_schema(response)
            if status != UNUSED_STATUS and schema is not None and "$ref" in schema:
                names.add(_name(schema))
    return names


def _name(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).removeprefix(COMPONENTS)


def _reachable(schemas: dict[str, Any], names: set[str]) -> set[str]:
    """The named schemas and all that they refer to."""
    found: set[str] = set()
    left = sorted(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += _references(schemas[name])
    return found


def _references(value: Any) -> list[str]:
    """Names of the schemas that a schema refers to."""
    if isinstance(value, list):
        return [name for each in value for name in _references(each)]
    if not isinstance(value, dict):
        return []
    names = [_name(value)] if "$ref" in value else []
    for each in value.values():
        names += _references(each)
    return names


def _schema_lines(name: str, schema: dict[str, Any], *, nullable: bool) -> list[str]:
    """Heading, text and fields of a schema.

    Args:
        nullable: whether `null` is named among the values of a field.
    """
    text = code(" ".join(str(schema.get("description", "")).partition("\n\n")[0].split()))
    lines = ["", f"### `{name}`", "", *wrapped(text), ""]
    required = schema.get("required", ())
    for field, value in schema.get("properties", {}).items():
        facts = _type(value, nullable=nullable)
        if field in required and not nullable:
            facts += "; required"
        elif field not in required and value.get("default") is not None:
            facts += f"; `{_shown(value['default'])}`"
        about = code(" ".join(value.get("description", "").split()))
        separator = ": " if about else ""
        lines += wrapped(f"* **`{field}`** ({facts}){separator}{about}", indent="  ")
    return lines


def _type(schema: dict[str, Any] | None, *, nullable: bool = False) -> str:
    """Values of a schema in words, with their limits."""
    if not schema:
        return "any"
    if "$ref" in schema:
        name = _name(schema)
        return f"[`{name}`](#{_anchor(name)})"
    if "enum" in schema:
        return ", ".join(f"`{_shown(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{_shown(schema['const'])}`"
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches:
        kinds = [each for each in branches if nullable or each.get("type") != "null"]
        return " or ".join(dict.fromkeys(_type(each, nullable=nullable) for each in kinds))
    kind = schema.get("type")
    if kind == "null":
        return "`null`"
    if kind == "array":
        words = [f"list of {_type(schema.get('items'), nullable=nullable)}"]
    elif kind is None:
        return "any"
    else:
        words = [NAMES[kind]]
    return ", ".join([*words, *_limits(schema)])


def _limits(schema: dict[str, Any]) -> Iterator[str]:
    for keyword, words in LIMITS.items():
        if keyword in schema:
            yield f"{words} {_number(schema[keyword])}"
    if schema["type"] in SIZES:
        least, most, unit = SIZES[schema["type"]]
        low = schema.get(least)
        high = schema.get(most)
        if low is not None and high is not None:
            yield f"{low} to {high:,} {unit}" if low != high else f"{low} {unit}"
        elif low is not None:
            yield f"at least {low} {unit}"
        elif high is not None:
            yield f"at most {high:,} {unit}"


def _number(value: float) -> str:
    """A limit; powers of two above a million as such."""
    size = abs(int(value))
    if size > 10**6 and size & (size - 1) == 0:
        sign = "-" if value < 0 else ""
        return f"{sign}2^{size.bit_length() - 1}"
    return f"{value:g}"


def _shown(value: Any) -> str:
    """A constant of JSON."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _anchor(heading: str) -> str:
    """Anchor of a heading, as GitHub and the site make it."""
    kept = [letter for letter in heading.lower() if letter.isalnum() or letter in "-_ "]
    return "".join(kept).replace(" ", "-")


def _error_lines(schemas: dict[str, Any]) -> list[str]:
    """Body of errors, and the meaning of each status."""
    about = "Every response of 400 and above has this body. A stream that fails ends with it as an event."
    lines = [*wrapped(about), *_schema_lines("ErrorResponse", schemas["ErrorResponse"], nullable=True)]
    lines += _schema_lines("ErrorDetail", schemas["ErrorDetail"], nullable=True)
    lines += ["", "### Statuses", ""]
    for status in sorted(TYPES.keys() | MEANINGS.keys()):
        kind = ApiError(status, "").body()["error"]["type"]
        meaning = MEANINGS.get(status, f"{HTTPStatus(status).phrase}.")
        lines += wrapped(f"* **{status}** (`{kind}`): {meaning}", indent="  ")
    return lines
