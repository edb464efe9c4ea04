"""HTTP connections with limits where uvicorn has none: on their number, on the time for headers that never
end, and on that for clients that never read."""

import asyncio
import json
from typing import Any, NamedTuple

from eagle_kit.server.api.errors import ApiError

HEADERS_S = 60.0
"""Seconds in which the line and the headers of a request have to arrive, nginx's ``client_header_timeout``: a
client that opens a thousand connections at once takes ten to send on the last of them."""
UNREAD_S = 60.0
"""Seconds without reading anything after which a client with a full buffer is cut off."""
MOST_CONNECTIONS = 4096
"""Most open connections of a server that holds few requests."""
CONNECTIONS_PER_REQUEST = 2
"""Connections for each request that the server holds: of requests that wait, of the reserve for clients with
little (``room.py``), and of those that ask for /health meanwhile."""
MOST_BACKLOG = 512
"""Connections that the system keeps until they are accepted, all of which are accepted at once."""
OWN_FILES = 64
"""Files that the process has open beside connections, with some to spare."""


class ConnectionLimits(NamedTuple):
    """Most open ``connections``, and the length of the system's ``backlog`` of new ones."""

    connections: int
    backlog: int


def connection_limits(num_requests: int) -> ConnectionLimits:
    """Raise the process' limit of open files as far as connections need it and the system allows it -> the
    limits that fit. One that is never reached cannot fail in ``accept``, which asyncio logs for each try.

    Args:
        num_requests: most requests that the server holds.
    """
    import resource

    most = max(MOST_CONNECTIONS, CONNECTIONS_PER_REQUEST * num_requests)
    wanted = most + 2 * MOST_BACKLOG + OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    backlog = min(MOST_BACKLOG, allowed // 8)
    connections = max(allowed - 2 * backlog - OWN_FILES, 1)
    return ConnectionLimits(min(connections, most), backlog)


def connection_class(most: int) -> Any:
    """Return the class of connections, of which ``most`` are open; a function, since uvicorn is optional."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        """HTTP/1.1 connection of uvicorn. Bodies have their own limit of time
        (:data:`~eagle_kit.server.api.body.READ_S`), and idle connections have uvicorn's."""

        _headers_timer: asyncio.TimerHandle | None = None
        _unread_timer: asyncio.TimerHandle | None = None
        _waits_since = 0.0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Begin to wait for the first request. Where there are too many connections, the ones that have
            not sent a whole request, or not read a response, for the longest time are closed, or this one
            where there are none."""
            super().connection_made(transport)
            self._watch()
            connections: set[Any] = self.connections  # uvicorn's type has those of other protocols
            if len(connections) > most:
                waiting = [each for each in connections if each is not self and each.is_waiting]
                waiting.sort(key=lambda each: each._waits_since)
                for each in waiting[: 1 + most // 16] or [self]:
                    connections.discard(each)  # at once: many may be accepted before it has ended
                    each.transport.abort()  # to close waits for a client that does not read

        @property
        def is_waiting(self) -> bool:
            """True if the client has not sent the whole of its next request, or nothing of it, or does not
            read its response."""
            cycle = self.cycle
            if cycle is None or cycle.response_complete or self.flow.write_paused:
                return True
            return cycle.more_body and not cycle.response_started

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

        def on_response_complete(self) -> None:
            """Wait for the client to read the rest of the response, also where it is too little to pause."""
            super().on_response_complete()
            if self.cycle.response_complete and not self.flow.write_paused:
                self._stop_watching_reading()
                self._watch_reading(None)

        def pause_writing(self) -> None:
            """Stop the response until the client has read, and wait for that."""
            super().pause_writing()
            self._waits_since = self.loop.time()
            self._stop_watching_reading()
            self._watch_reading(None)

        def resume_writing(self) -> None:
            """Go on with the response."""
            super().resume_writing()
            self._stop_watching_reading()

        def _stop_watching_reading(self) -> None:
            if self._unread_timer is not None:
                self._unread_timer.cancel()
                self._unread_timer = None

        def _watch_reading(self, unread: int | None) -> None:
            """Cut the client off if its ``unread`` bytes have not become fewer, or look again later while
            there are any."""
            now = self.transport.get_write_buffer_size()
            if unread is not None and now >= unread:
                self.transport.abort()
            elif now:
                self._unread_timer = self.loop.call_later(UNREAD_S, self._watch_reading, now)

        def _watch(self) -> None:
            is_answering = self.cycle is not None and not self.cycle.response_complete
            if is_answering and not self.flow.write_paused:
                self._stop_watching_reading()  # what is unread grows with the next response
            if is_answering and self._headers_timer is not None:
                self._headers_timer.cancel()
                self._headers_timer = None
            elif not is_answering and self._headers_timer is None:
                self._waits_since = self.loop.time()
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
