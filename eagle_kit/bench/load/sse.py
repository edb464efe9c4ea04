"""Server-sent events out of the bytes of a response."""


class SseParser:
    """Collects bytes as they come and hands out the data of whole events.

    Bytes are split at line ends only: a text's own U+2028 or form feed, which `str.splitlines` takes for one,
    stays inside its event.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that ``chunk`` completed; comments and other fields are passed over."""
        events = []
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
