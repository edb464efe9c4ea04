"""Real uvicorn on a free port, in a thread."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import openai

from eagle_kit.config.server import ServerConfig
from eagle_kit.server.api.app import create_app
from eagle_kit.server.api.server import bind, make_server


@contextmanager
def serving(llm: Any, engine: Any, **settings: Any) -> Iterator[SimpleNamespace]:
    """A running server with its ``url``, ``service`` and ``stop()``."""
    usual = {"model_name": "tiny", "grace_period_s": 0.0, "allowed_host": "x"}
    app = create_app(llm, engine, ServerConfig(**{**usual, **settings}))
    sock = bind("127.0.0.1", 0)
    server = make_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    wait_until(lambda: server.started)

    def stop() -> None:
        server.should_exit = True

    port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    http = httpx.Client(base_url=url, timeout=30)
    try:
        yield SimpleNamespace(
            url=url,
            port=port,
            http=http,
            llm=llm,
            engine=engine,
            service=app.state.service,
            stop=stop,
            server=server,
            thread=thread,
            openai=openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0),
        )
    finally:
        http.close()
        stop()
        thread.join(20)
        assert not thread.is_alive(), "the server does not stop"


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll; fails when ``condition`` is not true in time."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.005)
