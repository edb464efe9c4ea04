"""A load balancer of HTTP servers: asks the ones that are ready in turn, and tries the next one only where no
byte of a response has come."""

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

POLL_S = 0.05
PATIENCE_S = 60.0


class Balancer:
    """What it knows of its servers, by address.

    Attributes:
        ready: those whose readiness was 200 when it was last asked.
        served: responses passed on by each.
        refused: tries that another one had to take over.
        broken: responses that ended amid their bytes.
    """

    def __init__(self, servers: list[str]) -> None:
        self.servers = list(servers)
        self.ready: set[str] = set()
        self.served = dict.fromkeys(servers, 0)
        self.refused = dict.fromkeys(servers, 0)
        self.broken = 0
        self._turn, self._lock, self._is_over = 0, threading.Lock(), threading.Event()

    def watch(self) -> None:
        """Ask for readiness until it is over."""
        while not self._is_over.wait(POLL_S):
            for server in self.servers:
                try:
                    is_ready = self._ask(server, "GET", "/health/ready", None)[1].status == 200
                except OSError:
                    is_ready = False
                (self.ready.add if is_ready else self.ready.discard)(server)

    def stop(self) -> None:
        """End :meth:`watch`."""
        self._is_over.set()

    def begin(
        self, method: str, path: str, body: bytes | None
    ) -> tuple[str, http.client.HTTPConnection, http.client.HTTPResponse]:
        """The first response that is no refusal, with its server. Raises TimeoutError where there is none."""
        last = time.monotonic() + PATIENCE_S
        while time.monotonic() < last:
            server = self._next()
            if server is None:
                time.sleep(POLL_S)
                continue
            try:
                connection, response = self._ask(server, method, path, body)
            except (OSError, http.client.HTTPException):
                self._refuse(server)
                continue
            if response.status != 503:
                return server, connection, response
            response.read()
            connection.close()
            self._refuse(server)
        raise TimeoutError

    def _next(self) -> str | None:
        with self._lock:
            ready = [server for server in self.servers if server in self.ready]
            self._turn += 1
            return ready[self._turn % len(ready)] if ready else None

    def _refuse(self, server: str) -> None:
        with self._lock:
            self.refused[server] += 1
            self.ready.discard(server)  # until it is asked again

    @staticmethod
    def _ask(
        server: str, method: str, path: str, body: bytes | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(urlsplit(server).netloc, timeout=PATIENCE_S)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        return connection, connection.getresponse()


@contextmanager
def balancing(servers: list[str]) -> Iterator[tuple[str, Balancer]]:
    """A balancer in front of ``servers``, and its address."""
    balancer = Balancer(servers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server, connection, response = balancer.begin("POST", self.path, body)
            self.send_response(response.status)
            self.send_header("Content-Type", response.headers["Content-Type"])
            self.send_header("Server-Address", server)
            self.end_headers()  # and the end of the connection is that of the response
            try:
                while piece := response.read1(65536):
                    self.wfile.write(piece)
                    self.wfile.flush()
            except (OSError, http.client.HTTPException):
                balancer.broken += 1
            finally:
                connection.close()
            with balancer._lock:
                balancer.served[server] += 1

        def log_message(self, *args: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    for target in (server.serve_forever, balancer.watch):
        threading.Thread(target=target, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", balancer
    finally:
        balancer.stop()
        server.shutdown()
        server.server_close()
