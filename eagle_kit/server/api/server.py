"""uvicorn server of the application: a bound socket, and a shutdown that lets responses finish."""

import asyncio
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from eagle_kit.core.errors import RankLost, UserError
from eagle_kit.core.process import INTERRUPTED
from eagle_kit.server.api.hosts import resolve

if TYPE_CHECKING:
    from fastapi import FastAPI

FORCED_S = 2
"""Seconds that a step gets to end when SIGINT has ended the grace period."""
SLACK_S = 5
"""Seconds that answers get to be sent after the engine has let go of the last response."""
SWITCH_INTERVAL_S = 0.0002
"""Longest time for which a thread that runs Python code keeps the interpreter from one that waits for it.

The engine's thread gives the interpreter up in each operation of torch, and gets it back from the thread
that reads requests only after this time. Beside a thread that runs Python code 60 % of the time, four
responses of 32 tokens (SmolLM2-135M, one thread of an AMD EPYC) took 2.18 s with Python's default of 5 ms,
1.22 s with
0.5 ms, 1.05 s with 0.1 ms, and 0.89 s alone."""


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket that does not listen yet, so that a port in use is found before a model is loaded.

    Raises:
        UserError: the address cannot be used.
    """
    if not 0 <= port <= 65535:  # the resolver would take it modulo 65536
        raise UserError(f"The port {port} cannot be used.", "Choose a --port from 0 to 65535.")
    try:
        family, kind, protocol, _, address = resolve(host, port)
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as error:  # the latter of a name with a part that is too long
        raise UserError(
            f"The address {host}:{port} cannot be used ({error}).", "Choose another --port or --host."
        ) from error
    return sock


def make_server(app: "FastAPI", on_ready: Callable[[], None] | None = None) -> Any:
    """Make a uvicorn server for ``app``; ``run(sockets=[bind(...)])`` it, in any thread.

    When it is told to exit it is not ready any more: new requests are refused (503), running responses have
    the grace period of the options, the rest is aborted and sent as it is. Then it stops accepting, and
    returns. SIGINT ends the grace period. Another SIGTERM does not: supervisors repeat it.
    """
    import uvicorn

    from eagle_kit.server.api.connection import connection_class, connection_limits

    service = app.state.service
    log_level = service.config.log_level
    if log_level == "warning":
        # uvicorn warns of each request that is no HTTP.
        log_level = "error"
    limits = connection_limits(service.engine.capacity)
    grace_s = service.config.grace_period_s

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            self.former_switch_interval_s = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            await super().startup(sockets)
            if on_ready is not None and self.started:
                on_ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # It goes on accepting: a router reads a refusal, and need not guess from a broken connection.
            last = time.monotonic() + grace_s
            await self._drain()
            left_s = max(last - time.monotonic(), 0.0) + SLACK_S
            self.config.timeout_graceful_shutdown = math.ceil(
                left_s
            )  # of responses that are still being read
            await super().shutdown(sockets)
            if self.force_exit and service.engine.health != "ok":
                # What uvicorn leaves out now: it would end as a cancelled task, with a traceback.
                if self.server_state.tasks:
                    await asyncio.wait(self.server_state.tasks, timeout=FORCED_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.lifespan.shutdown(), FORCED_S)
            sys.setswitchinterval(self.former_switch_interval_s)

        async def _drain(self) -> None:
            patient = asyncio.create_task(service.engine.shutdown(grace_s))
            while not (patient.done() or self.force_exit):
                await asyncio.wait({patient}, timeout=0.05)
            if not patient.done():
                patient.cancel()
                with suppress(TimeoutError):
                    await asyncio.wait_for(service.engine.shutdown(), FORCED_S)

    uvicorn_config = uvicorn.Config(
        app,
        http=connection_class(limits.connections),
        backlog=limits.backlog,
        ws="none",
        # uvicorn's default lets every program on this machine choose its address.
        proxy_headers=service.config.forwarded_allow_ips is not None,
        forwarded_allow_ips=service.config.forwarded_allow_ips,
        log_level=log_level,
        access_log=False,
        lifespan="on",
    )
    return Server(uvicorn_config)


def run_forever(app: "FastAPI", sock: socket.socket) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code: 0, or 130 after Ctrl-C.

    Raises:
        RankLost: another process of tensor parallelism has ended, or does not answer; all readers were told.
    """
    host, port = sock.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def ready() -> None:
        print(f"Serving {app.state.service.config.model_name} on {url}", file=sys.stderr, flush=True)

    server = make_server(app, ready)
    lost = list[RankLost]()

    def end(error: BaseException) -> None:
        if isinstance(error, RankLost):
            lost.append(error)
            server.should_exit = True

    app.state.service.engine.on_failure = end
    # When it has shut down, uvicorn raises the signal that stopped it once more, for the handlers before it.
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: None) if in_main else None
    try:
        server.run(sockets=[sock])
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
        sock.close()
    if lost:
        raise lost[0]
    return 0
