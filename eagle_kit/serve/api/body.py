"""Bodies of requests: bounded, JSON, and exactly what a model allows."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from eagle_kit.serve.api.errors import ApiError, from_validation

ModelT = TypeVar("ModelT", bound=BaseModel)
DRAIN_FACTOR = 8
"""A body that is too large is still read, and thrown away, up to this many times the limit, since clients
look for an answer only when they have sent it."""


def body_of(model: type[ModelT], max_bytes: int) -> Callable[..., Awaitable[ModelT]]:
    """A FastAPI dependency that reads a body and validates it as ``model``."""
    from fastapi import Request

    async def read(request: Request) -> ModelT:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"The content type is {kind or 'missing'}; send application/json.")
        return parse(model, await _read(request, max_bytes))

    return read


def parse(model: type[ModelT], body: bytes) -> ModelT:
    """JSON in strict mode: no conversions, lone surrogates or numbers out of range. Raises ApiError 400."""
    try:
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise from_validation(error) from None


async def _read(request: Any, max_bytes: int) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= max_bytes:
            chunks.append(chunk)
        else:
            chunks.clear()
            if size > DRAIN_FACTOR * max_bytes:
                break
    if size > max_bytes:
        raise ApiError(
            413,
            f"The body is larger than {max_bytes} bytes.",
            code="body_too_large",
            headers={"Connection": "close"},
        )
    return b"".join(chunks)
