"""An asynchronous client of one OpenAI-compatible endpoint: one streamed request at a time, never retried."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from eagle_kit.bench.load.reply import BadEvent, Recorder, RequestResult, error_message
from eagle_kit.bench.load.sse import SseParser
from eagle_kit.bench.load.workload import Api, LoadRequest
from eagle_kit.core.errors import UserError

if TYPE_CHECKING:
    import httpx

Clock = Callable[[], float]
PATHS = {"chat": "/chat/completions", "completions": "/completions"}
CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ClientSettings:
    """What all requests share.

    Attributes:
        base_url: of the API, ``/v1`` at its end or not.
        model: name in every body.
        api: which endpoint.
        api_key: sent as bearer token.
        timeout_s: most seconds of one request, from sending to its end.
        temperature: 0 is greedy.
        ignore_eos: go on to max_tokens.
        extensions: fields that ``eagle_kit.bench.load.endpoint`` found this server to take.
        extra_body: further fields of every body; they replace ours of the same name, and null takes one out.
    """

    base_url: str
    model: str = ""
    api: Api = "chat"
    api_key: str | None = None
    timeout_s: float = 600.0
    temperature: float = 0.0
    ignore_eos: bool = False
    extensions: Mapping[str, Any] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"The base URL {self.base_url!r} is not a URL.", "Write it like http://127.0.0.1:8000."
            )

    @property
    def root(self) -> str:
        """The server without ``/v1``, where its metrics are."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")

    def body(self, request: LoadRequest) -> dict[str, Any]:
        """The JSON to send."""
        body = {
            "model": self.model,
            **request.content,
            "max_tokens": request.max_tokens,
            "temperature": self.temperature,
            "seed": request.seed,
            "ignore_eos": self.ignore_eos or None,
            "stream": True,
            **self.extensions,
            **self.extra_body,
        }
        return {name: value for name, value in body.items() if value is not None}


class HttpError(Exception):
    """A response of another status than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status, self.message = status, message


class Client:
    """An open client. Use it as an asynchronous context manager.

    Args:
        settings: see there.
        clock: seconds; read when a request is sent, for every event of its stream, and when it fails.
    """

    def __init__(self, settings: ClientSettings, clock: Clock = time.perf_counter) -> None:
        httpx = import_httpx()
        self.settings, self.clock = settings, clock
        local = urlsplit(settings.base_url).hostname in ("localhost", "127.0.0.1", "::1")
        self._http: Any = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=not local,  # a proxy has no business between two programs of one machine
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def get(self, path: str, timeout_s: float = CONNECT_TIMEOUT_S) -> "httpx.Response":
        """GET a path below the server's root. Raises httpx's errors."""
        return await self._http.get(self.settings.root + path, timeout=timeout_s)

    async def send(self, request: LoadRequest, recorder: Recorder) -> RequestResult:
        """Stream one reply into ``recorder``. Whatever goes wrong is a failed reply with its reason."""
        import httpx

        try:
            return await self.stream(self.settings.body(request), recorder)
        except (httpx.RequestError, HttpError, BadEvent, TimeoutError) as error:
            return recorder.fail(self.reason(error), self.clock())

    async def stream(self, body: Mapping[str, Any], recorder: Recorder) -> RequestResult:
        """Send ``body`` and stream its reply into ``recorder``.

        Raises:
            HttpError, BadEvent, TimeoutError, httpx.RequestError: what :meth:`reason` puts into words.
        """
        url = self.settings.root + "/v1" + PATHS[self.settings.api]
        # Escaped to ASCII, so that even half a character of a prompt set arrives, for the server to judge.
        content, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        parser, done = SseParser(), False
        async with (
            asyncio.timeout(self.settings.timeout_s),
            self._http.stream("POST", url, content=content, headers=headers) as response,
        ):
            if response.status_code != 200:
                raise HttpError(response.status_code, _message(await response.aread()))
            # Read to the very end, so that the connection can be used again.
            async for chunk in response.aiter_bytes():
                for data in parser.feed(chunk):
                    if data.strip() == b"[DONE]":
                        done = True
                    elif not done:
                        recorder.take(_parse(data), self.clock())
        return recorder.finish(done)

    def reason(self, error: Exception) -> str:
        """Why a request failed, in words that are the same for the same cause."""
        import httpx

        if isinstance(error, TimeoutError):
            return f"timeout: not finished after {self.settings.timeout_s:g} s"
        if isinstance(error, httpx.ConnectTimeout):
            return f"no connection within {CONNECT_TIMEOUT_S:g} s"
        if isinstance(error, httpx.ConnectError):
            return f"no connection ({str(error) or type(error).__name__})"
        if isinstance(error, httpx.RequestError):
            return f"the connection broke off ({type(error).__name__})"
        return str(error)


def import_httpx() -> Any:
    """The package httpx; UserError when it is missing."""
    try:
        import httpx
    except ImportError:
        raise UserError(
            "The package httpx is not installed.", "Install it with pip install 'eagle_kit[serve]'."
        ) from None
    return httpx


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise BadEvent("an event that is not JSON") from None


def _message(body: bytes) -> str:
    """An error response in one line of at most 300 characters."""
    try:
        text = error_message(json.loads(body))
    except ValueError:
        text = body.decode("utf-8", "replace")
    return " ".join(text.split())[:300] or "no message"
