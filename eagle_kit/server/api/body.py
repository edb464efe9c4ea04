"""Request bodies: bounded in size, JSON, validated strictly."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from eagle_kit.core.errors import cut
from eagle_kit.server.api.errors import ApiError, from_validation
from eagle_kit.server.api.limits import HeldBody, network_of
from eagle_kit.server.api.sse import ClientGone
from eagle_kit.server.response_stream import Overloaded

if TYPE_CHECKING:
    from eagle_kit.server.api.service import Service

ModelT = TypeVar("ModelT", bound=BaseModel)
DRAIN_FACTOR = 8
"""A body that is too large is read and thrown away, up to this many times the limit, because clients read the
response only after they have sent the body."""
NUM_BODIES = 32
"""Room for the bodies of all requests in progress, in bodies of the largest size."""
READ_S = 60.0
"""Seconds that a body has to arrive."""
MAX_PARTS = {b"[": 2**17, b"{": 2**17, b":": 2**17, b",": 2**20}
"""Most characters of a kind in a body, its texts included. They bound the time of validation, which blocks
the event loop: a megabyte of empty lists would block it for seconds and take a gigabyte."""


def body_of(model: type[ModelT], service: "Service") -> Callable[..., Awaitable[ModelT]]:
    """Make a FastAPI dependency that reads the body of a request and validates it as ``model``.

    When the server begins to drain, bodies that have not arrived are refused.
    """
    from fastapi import Request

    max_bytes = service.config.max_body_bytes
    draining = service.engine.draining

    async def read(request: Request) -> ModelT:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"The content type is {cut(kind) or 'missing'}; send application/json.")

        # The room is held until the request is over, because its texts live until then.
        address = request.client.host if request.client else ""
        body = HeldBody(network_of(address), service.body_room)
        request.state.cleanup.append(body.close)
        await _in_time(_read(request, body, max_bytes), draining)
        return parse(model, body.pop())

    return read


def optional_body_of(model: type[ModelT], service: "Service") -> Callable[..., Awaitable[ModelT]]:
    """Make a FastAPI dependency as :func:`body_of` does. Without a body it is ``model`` with its defaults."""
    from fastapi import Request

    read_body = body_of(model, service)

    async def read(request: Request) -> ModelT:
        headers = request.headers
        if "transfer-encoding" not in headers and headers.get("content-length", "0") == "0":
            return model()
        return await read_body(request)

    return read


def parse(model: type[ModelT], body: bytes | bytearray) -> ModelT:
    """Parse JSON in strict mode: no conversions, lone surrogates or numbers out of range. Raises ApiError
    400."""
    for sign, most in MAX_PARTS.items():
        if (count := body.count(sign)) > most:
            cause = f"The body has {count} times the sign {sign.decode()}, {most} are allowed."
            raise ApiError(400, f"{cause} Send less at a time.", code="body_too_complex")
    try:
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise from_validation(error) from None


async def _in_time(body: Coroutine[Any, Any, None], draining: asyncio.Event) -> None:
    """Wait for a body; raise Overloaded when draining begins, and ApiError 408 when it takes too long."""
    reading = asyncio.ensure_future(body)
    stop = asyncio.ensure_future(draining.wait())
    try:
        await asyncio.wait({reading, stop}, timeout=READ_S, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            reading.result()
            return
        if stop.done():
            raise Overloaded("The server is shutting down.")
        raise ApiError(
            408,
            f"The body has not arrived in {READ_S:.0f} seconds; send it faster.",
            code="body_timeout",
            headers={"Connection": "close"},
        )
    finally:
        reading.cancel()
        stop.cancel()


async def _read(request: Any, body: HeldBody, max_bytes: int) -> None:
    from starlette.requests import ClientDisconnect

    try:
        await _read_stream(request.stream(), body, max_bytes)
    except ClientDisconnect:
        raise ClientGone from None


async def _read_stream(stream: AsyncIterator[bytes], body: HeldBody, max_bytes: int) -> None:
    """Read a body of at most ``max_bytes``. A body that is refused is read further and thrown away."""
    size = 0
    refusal: Exception | None = None
    async for chunk in stream:
        size += len(chunk)
        if size > max_bytes:
            refusal = ApiError(
                413,
                f"The body is larger than {max_bytes} bytes.",
                code="body_too_large",
                headers={"Connection": "close"},
            )
        if refusal is None:
            try:
                body.add(chunk)
            except Overloaded as error:
                refusal = error
        if refusal is not None:
            body.close()
        if size > DRAIN_FACTOR * max_bytes:
            break
    if refusal is not None:
        raise refusal
