"""OpenAPI description of routes that read their bodies themselves."""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from eagle_kit.server.api.responses import ErrorResponse

if TYPE_CHECKING:
    from fastapi import FastAPI

MEANINGS = {
    400: "A parameter is unknown, unsupported or wrong; the prompt does not fit.",
    401: "The API key is missing or wrong.",
    404: "Another model than the one served.",
    408: "The body does not arrive.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The client asks for too much at a time.",
    500: "The engine has failed.",
    503: "The queue is full, or the server shuts down; see Retry-After.",
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Document error responses; without arguments all known ones."""
    return {
        status: {"model": ErrorResponse, "description": MEANINGS[status]} for status in statuses or MEANINGS
    }


def body_schema(app: "FastAPI", model: type[BaseModel]) -> dict[str, Any]:
    """Make ``openapi_extra`` of a route with a body of ``model``, and add its definitions to the app's
    components."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = {**schema.pop("$defs", {}), model.__name__: schema}
    _components(app).update(definitions)
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


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
        return description

    app.openapi = openapi  # type: ignore[method-assign]
    return schemas
