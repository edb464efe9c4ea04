"""Middleware of every request: request id, limit per minute, API key, uncaught errors, cleanup."""

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from eagle_kit.server.api.errors import ApiError, as_api_error
from eagle_kit.server.api.hosts import check_host
from eagle_kit.server.api.sse import ClientGone
from eagle_kit.server.response_stream import EngineFailed, Overloaded

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")
OPEN_PATHS = ("/health", "/health/ready", "/health/live", "/metrics")
"""Paths that need no key and count against no limit."""
SINGLE_HEADERS = (b"authorization", b"content-type", b"origin", b"x-request-id")
"""Headers of which a second one would be read by some programs on the way and not by others."""


class RequestContext:
    """Outermost ASGI layer. Sets ``request.state.request_id`` (the client's ``X-Request-Id``, or a new one,
    sent back as a header), ``request.state.has_own_id`` (whether the client chose it),
    ``request.state.arrived_at`` (``time.perf_counter()``) and ``request.state.cleanup``, a list of functions
    that are called when the request is over: answered, failed, or left by its client before a response even
    began.

    Args:
        app: the rest.
        draining: once it is set, connections end with their responses: the next request is another server's.
        count: counts a request of the client with this address against its limit per minute, whatever comes
            of it; raises ApiError. It is called everywhere but at :data:`OPEN_PATHS`.
        api_key: demanded as a bearer token everywhere but at :data:`OPEN_PATHS`; None demands nothing.
        allowed_hosts: see :func:`~eagle_kit.server.api.hosts.allowed_hosts`.
    """

    def __init__(
        self,
        app: App,
        draining: asyncio.Event,
        count: Callable[[str], None],
        api_key: str | None = None,
        allowed_hosts: frozenset[str] | None = None,
    ) -> None:
        self.app = app
        self._draining = draining
        self._key = api_key
        self._count = count
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        has_own_id = REQUEST_ID.fullmatch(given) is not None
        request_id = given if has_own_id else uuid.uuid4().hex.encode()
        cleanup: list[Callable[[], None]] = []
        state = scope.setdefault("state", {})
        state["request_id"], state["cleanup"] = request_id.decode(), cleanup
        state["has_own_id"] = has_own_id
        state["arrived_at"] = time.perf_counter()
        started = False

        async def send_with_id(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                added = [(b"x-request-id", request_id)]
                if self._draining.is_set():
                    added.append((b"connection", b"close"))
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS:
                self._count(scope["client"][0] if scope["client"] else "")
            _check_length(scope["http_version"], headers)
            self._check_single(scope["headers"])
            if self._allowed_hosts is not None:
                check_host(headers, self._allowed_hosts)
            self._authorise(scope["path"], headers.get(b"authorization", b""))
            await self.app(scope, receive, send_with_id)
        except ClientGone:
            pass  # in the middle of its body; nobody is there to answer
        except Exception as error:
            answer = as_api_error(error)
            if answer.status == 500 and not isinstance(error, EngineFailed):  # which is in the log already
                logging.getLogger(__name__).error("Request %s failed.", request_id.decode(), exc_info=error)
            if not started:
                await send_error(answer, send_with_id)
        except asyncio.CancelledError:
            # The server has waited long enough at its shutdown. A traceback would tell nobody anything.
            if not started:
                await send_error(as_api_error(Overloaded("The server is shutting down.")), send_with_id)
        finally:
            for function in reversed(cleanup):
                function()

    def _check_single(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        counts = Counter(name for name, _ in headers)
        for name in SINGLE_HEADERS:
            if counts[name] > 1:
                raise ApiError(400, f"The header {name.decode().title()} was sent twice; send it once.")

    def _authorise(self, path: str, given: bytes) -> None:
        if self._key is None or path in OPEN_PATHS:
            return
        kind, _, token = given.partition(b" ")
        # Compared in a time that does not depend on how much of it is right.
        same = hmac.compare_digest(token.strip(), self._key.encode())
        if kind.lower() != b"bearer" or not same:
            raise ApiError(
                401,
                "The API key is missing or wrong; send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _check_length(http_version: str, headers: Mapping[bytes, bytes]) -> None:
    """Raise ApiError 400, which closes the connection, where programs may differ in the end of a body (RFC
    9112, 6.3): what follows may be a request that another client is taken to have sent."""
    if b"transfer-encoding" in headers and (b"content-length" in headers or http_version == "1.0"):
        raise ApiError(
            400,
            "The body has a Transfer-Encoding beside a Content-Length or HTTP/1.0; send one of them.",
            headers={"Connection": "close"},
        )


async def send_error(error: ApiError, send: Send) -> None:
    """Send a whole error response."""
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
