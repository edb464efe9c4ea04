"""OpenAPI description of routes that read their bodies themselves."""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from eagle_kit.server.api.responses import ErrorResponse

if TYPE_CHECKING:
    from fastapi import FastAPI

MEANINGS = {
    400: (
        "The body is no JSON (`invalid_json`), has too many parts (`body_too_complex`) or mistakes "
        "(`many_mistakes`), or has an unknown parameter (`unsupported_parameter`). Without a code: a value "
        "is out of range, a constraint is not supported, or the prompt does not fit the context."
    ),
    401: "The API key is missing or wrong (`invalid_api_key`).",
    403: "The header Host or Origin names another host (`host_not_allowed`, `origin_not_allowed`).",
    404: (
        "The model is not the one that is served (`model_not_found`), or the server makes no profiles "
        "(`profiles_off`)."
    ),
    408: "The headers or the body did not arrive in time (`headers_timeout`, `body_timeout`).",
    409: "A profile is running already (`profile_running`), or none is (`no_profile`).",
    413: "The body is too large (`body_too_large`).",
    415: "The header Content-Type is not application/json.",
    429: (
        "The client has too many responses in progress (`too_many_parallel_requests`), or sent too many "
        "requests in a minute (`rate_limit_exceeded`). Retry-After is the number of seconds to wait."
    ),
    500: (
        "The engine has failed (`engine_failed`), the logits of this request were not finite "
        "(`logits_not_finite`), or the trace could not be written (`profile_not_written`)."
    ),
    503: (
        "The queue or the room for bodies is full, or the server shuts down (`overloaded`), or the GPU had "
        "too little memory for a step (`out_of_memory`). Retry-After is the number of seconds to wait."
    ),
}
"""Meaning of each status, with the codes of its errors."""


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Document error responses; without arguments all known ones."""
    return {
        status: {"model": ErrorResponse, "description": MEANINGS[status]} for status in statuses or MEANINGS
    }


def body_schema(app: "FastAPI", model: type[BaseModel], *, is_required: bool = True) -> dict[str, Any]:
    """Make ``openapi_extra`` of a route with a body of ``model``, and add its definitions to the app's
    components.

    Args:
        is_required: False if the body may be left out.
    """
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = {**schema.pop("$defs", {}), model.__name__: schema}
    _components(app).update(definitions)
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    content = {"application/json": {"schema": reference}}
    return {"requestBody": {"required": is_required, "content": content}}


def _components(app: "FastAPI") -> dict[str, Any]:
    """Schemas that are added to ``app.openapi()``; made on first use."""
    found = getattr(app.state, "request_schemas", None)
    if found is not None:
        return found
    schemas: dict[str, Any] = {}
    app.state.request_schemas = schemas
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        description = plain()
        own = description.setdefault("components", {}).setdefault("schemas", {})
        for name, schema in schemas.items():
            own.setdefault(name, schema)

        # FastAPI's own answer to a wrong parameter: a text in the path cannot be one.
        for path in description["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            own.pop(name, None)
        return description

    app.openapi = openapi  # type: ignore[method-assign]
    return schemas
