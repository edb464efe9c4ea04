"""Fair queue of calls, and a thread that runs them: clients take turns.

Of the clients with waiting calls, the one whose last turn began first comes next, as in the admission of
requests (:mod:`eagle_kit.engine.scheduler`). So a client waits for the call that runs, and for at most one
call of each other client, however many calls the others have put.
"""

import asyncio
import heapq
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Call(NamedTuple):
    """Call that waits for its turn. Of one client's calls the smallest comes first, then the oldest."""

    size: int
    number: int
    function: Callable[[], Any]
    result: "Future[Any]"


class FairQueue:
    """Queue of calls in which clients take turns. One thread at a time may use it."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Call]] = {}
        self._last_turn: dict[str, int] = {}
        self._served = ""
        self._num_turns = 0
        self._num_calls = 0

    def put(self, client: str, size: int, function: Callable[[], Any]) -> "Future[Any]":
        """Add a call, and return the future of its result."""
        result: Future[Any] = Future()
        # A new client goes behind those that wait, and before the one whose call runs.
        self._last_turn.setdefault(client, self._num_turns - 1)
        heapq.heappush(self._waiting.setdefault(client, []), Call(size, self._num_calls, function, result))
        self._num_calls += 1
        return result

    def take(self) -> Call | None:
        """Remove and return the next call; None if no call waits.

        The call counts as running until the next :meth:`take`. Cancelled calls take no turn.
        """
        self._forget_idle(self._served)
        self._served = ""
        while self._waiting:
            client = self._next_client()
            calls = self._waiting[client]
            call = heapq.heappop(calls)
            if not calls:
                del self._waiting[client]
            if call.result.set_running_or_notify_cancel():
                self._num_turns += 1
                self._last_turn[client] = self._num_turns
                self._served = client
                return call
            self._forget_idle(client)
        return None

    def _next_client(self) -> str:
        """The client whose last turn is the longest ago; among equal ones the client of the oldest call."""
        earliest = min(self._last_turn[client] for client in self._waiting)
        first = [client for client in self._waiting if self._last_turn[client] == earliest]
        if len(first) == 1:  # one client may have thousands of calls
            return first[0]
        return min(first, key=lambda client: min(call.number for call in self._waiting[client]))

    def _forget_idle(self, client: str) -> None:
        """Forget the last turn of a client without waiting calls."""
        if client not in self._waiting:
            self._last_turn.pop(client, None)


class FairThread:
    """Thread that runs the calls of a :class:`FairQueue` one after the other.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue = FairQueue()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def run(self, client: str, function: Callable[..., T], *args: Any, size: int = 0) -> "asyncio.Future[T]":
        """Call ``function`` in the thread, and return the future of its result.

        Args:
            client: name of the client that the call belongs to.
            size: calls of one client run in the order of their sizes, then of their arrival.
        """
        with self._changed:
            assert not self._is_closed, "nobody would run it"
            result = self._queue.put(client, size, lambda: function(*args))
            self._changed.notify()
        return asyncio.wrap_future(result)

    def close(self) -> None:
        """End the thread after all calls so far, without waiting for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            try:
                value = call.function()
            except BaseException as error:  # whoever awaits the future gets it
                call.result.set_exception(error)
            else:
                call.result.set_result(value)

    def _next(self) -> Call | None:
        """Wait for the next call; None at the end of the thread."""
        with self._changed:
            while (call := self._queue.take()) is None and not self._is_closed:
                self._changed.wait()
            return call
