"""HTTP as hostile clients need it: half a request, one that is never read, and whole ones, over a socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LIMIT = 1 << 26
"""Bytes of the longest line that is read: a response of one line."""


class Answer(NamedTuple):
    """Status and body of a response; 0 for a connection that was closed without one."""

    status: int
    body: bytes


@dataclass(frozen=True)
class Server:
    """Address of a server, and the key it demands."""

    host: str
    port: int
    key: str = ""

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Streams]:
        """Open a connection, closed without ceremony at the end."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=LIMIT)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    def head(self, method: str, path: str, num_bytes: int) -> bytes:
        """Line and headers of a request with a JSON body."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}", "Connection: close"]
        lines += [f"Authorization: Bearer {self.key}"] if self.key else []
        lines += ["Content-Type: application/json", f"Content-Length: {num_bytes}"] if num_bytes else []
        return "\r\n".join([*lines, "", ""]).encode()

    async def ask(self, path: str, body: Mapping[str, Any] | bytes | None = None) -> Answer:
        """Send a request, POST with a body, and read the response to its end."""
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        async with self.connect() as (reader, writer):
            writer.write(self.head("GET" if body is None else "POST", path, len(content)) + content)
            return Answer(await read_head(reader), await reader.read())

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Iterate over the events of a response. Raises ConnectionError for any status but 200."""
        content = json.dumps({**body, "stream": True}).encode()
        async with self.connect() as (reader, writer):
            writer.write(self.head("POST", path, len(content)) + content)
            if (status := await read_head(reader)) != 200:
                raise ConnectionError(f"status {status}")
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])


async def read_head(reader: asyncio.StreamReader) -> int:
    """Read line and headers of a response -> its status, 0 when there is none."""
    line = await reader.readline()
    while (await reader.readline()).strip():
        pass
    return int(line.split()[1]) if line.startswith(b"HTTP/") else 0
