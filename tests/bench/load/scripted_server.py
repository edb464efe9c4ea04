"""A real HTTP server that speaks OpenAI's API and does exactly what its script says."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route


@dataclass
class Script:
    """One response: (seconds to wait, event or raw bytes) pairs, and how it ends."""

    events: list[tuple[float, Any]] = field(default_factory=list)
    status: int = 200
    body: Any = None
    done: bool = True
    cut_off: bool = False


def text(content: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    """A chat event."""
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": reason}], **more}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    """The object of that name."""
    details = {"cached_tokens": 2}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}


def three_token_chunks(body: dict[str, Any], delay: float = 0.0) -> Script:
    """Six tokens: one, three, two; then the end, usage and acceptance as far as they were asked for."""
    asked = body.get("stream_options", {})
    last: dict[str, Any] = {"choices": []}
    if asked.get("include_usage"):
        last["usage"] = usage(7, 6)
    if body.get("return_speculation"):
        last["speculation"] = {"accept_length": 2.5, "num_verifies": 2, "histogram": [0, 0, 1, 1]}
    counted = [{"usage": usage(7, n)} if asked.get("continuous_usage_stats") else {} for n in (0, 1, 4, 6, 6)]
    return Script(
        [
            (delay, text("", **counted[0])),
            (delay, text("a", **counted[1])),
            (delay, text("bbb", **counted[2])),
            (delay, text("cc", **counted[3])),
            (0.0, text("", "length", **counted[4])),
            (0.0, last),
        ]
    )


@dataclass
class Server:
    """What a test sees of the server.

    Attributes:
        url: where tests send to; they may change it.
        origin: where the server really is.
        respond: body -> script; tests replace it.
        bodies: of all completion requests so far.
        refused: body fields that get a 400, dotted.
        models: of the list; None makes it a 404.
        key: demanded when not None.
        counters: of /metrics, changed by ``respond``; None makes it a 404.
        most_at_once: peak of requests under way.
    """

    url: str = ""
    origin: str = ""
    respond: Callable[[dict[str, Any]], Script] = three_token_chunks
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    refused: tuple[str, ...] = ()
    models: list[str] | None = field(default_factory=lambda: ["tiny"])
    key: str | None = None
    counters: dict[str, float] | None = None
    at_once: int = 0
    most_at_once: int = 0


def make_app(server: Server) -> Starlette:
    """Routes of the server."""

    async def models(request: Any) -> Any:
        if server.models is None:
            return PlainTextResponse("no such page", 404)
        if server.key and request.headers.get("authorization") != f"Bearer {server.key}":
            return JSONResponse({"error": {"message": "wrong key"}}, 401)
        return JSONResponse({"data": [{"id": name, "owned_by": "script"} for name in server.models]})

    async def metrics(request: Any) -> Any:
        if server.counters is None:
            return PlainTextResponse("", 404)
        lines = [f'{name}{{model_name="tiny"}} {value}' for name, value in server.counters.items()]
        return PlainTextResponse("# HELP something\n" + "\n".join(lines) + "\n")

    async def complete(request: Any) -> Any:
        body = await request.json()
        server.bodies.append(body)
        server.paths.append(request.url.path)
        for path in server.refused:
            value: Any = body
            for part in path.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                return JSONResponse({"error": {"message": f"{path} is not supported"}}, 400)
        if server.models is not None and body["model"] not in server.models:
            return JSONResponse({"error": {"message": "no such model"}}, 404)
        script = server.respond(body)
        if script.status != 200:
            return JSONResponse(script.body, script.status)
        return StreamingResponse(stream(script), media_type="text/event-stream")

    async def stream(script: Script) -> AsyncIterator[bytes]:
        server.at_once += 1
        server.most_at_once = max(server.most_at_once, server.at_once)
        try:
            for delay, event in script.events:
                await asyncio.sleep(delay)
                yield event if isinstance(event, bytes) else b"data: %s\n\n" % json.dumps(event).encode()
            if script.cut_off:
                raise ConnectionResetError("the script says so")
            if script.done:
                yield b"data: [DONE]\n\n"
        finally:
            server.at_once -= 1

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/metrics", metrics),
            Route("/v1/chat/completions", complete, methods=["POST"]),
            Route("/v1/completions", complete, methods=["POST"]),
        ]
    )


@contextmanager
def scripted_server(**settings: Any) -> Iterator[Server]:
    """A running server on a free port."""
    server = Server(**settings)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server.url = server.origin = f"http://127.0.0.1:{listening.getsockname()[1]}"
    config = uvicorn.Config(make_app(server), log_level="critical", lifespan="off")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    until = time.monotonic() + 10
    while not running.started:
        assert time.monotonic() < until, "the server does not start"
        time.sleep(0.005)
    try:
        yield server
    finally:
        running.should_exit = running.force_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server does not stop"
