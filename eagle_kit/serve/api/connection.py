"""HTTP connections with time limits where uvicorn has none: for headers that never end, and for clients that
never read."""

import asyncio
import json
from typing import Any

from eagle_kit.serve.api.errors import ApiError

HEADERS_S = 10.0
"""Seconds in which the line and the headers of a request have to arrive."""
UNREAD_S = 60.0
"""Seconds without reading anything after which a client with a full buffer is cut off."""


def connection_class() -> Any:
    """Return the class of connections; a function, since uvicorn is optional."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        """HTTP/1.1 connection of uvicorn. Bodies have their own limit
        (:data:`~eagle_kit.serve.api.body.READ_S`), and idle connections have uvicorn's."""

        _headers_timer: asyncio.TimerHandle | None = None
        _unread_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Begin to wait for the first request."""
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            """Take in bytes, and wait for the rest of the headers they may have begun."""
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            """End all waiting."""
            super().connection_lost(exc)
            for timer in (self._headers_timer, self._unread_timer):
                if timer is not None:
                    timer.cancel()

        def pause_writing(self) -> None:
            """Stop the response until the client has read, and wait for that."""
            super().pause_writing()
            self._watch_reading(None)

        def resume_writing(self) -> None:
            """Go on with the response."""
            super().resume_writing()
            if self._unread_timer is not None:
                self._unread_timer.cancel()

        def _watch_reading(self, unread: int | None) -> None:
            """Cut the client off if its ``unread`` bytes have not become fewer, or look again later."""
            now = self.transport.get_write_buffer_size()
            if unread is not None and now >= unread:
                self.transport.abort()
            else:
                self._unread_timer = self.loop.call_later(UNREAD_S, self._watch_reading, now)

        def _watch(self) -> None:
            is_answering = self.cycle is not None and not self.cycle.response_complete
            if is_answering and self._headers_timer is not None:
                self._headers_timer.cancel()
                self._headers_timer = None
            elif not is_answering and self._headers_timer is None:
                self._headers_timer = self.loop.call_later(HEADERS_S, self._refuse)

        def _refuse(self) -> None:
            """Answer 408 where a request has begun, and close."""
            message = f"The headers have not arrived in {HEADERS_S:.0f} seconds; send them faster."
            body = json.dumps(ApiError(408, message, code="headers_timeout").body()).encode()
            headers = [("content-type", "application/json"), ("connection", "close")]
            parts: list[Any] = [
                h11.Response(status_code=408, headers=[*headers, ("content-length", str(len(body)))]),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ]
            has_begun = self.conn.trailing_data[0] != b""
            if has_begun and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
            self.transport.close()

    return Connection
