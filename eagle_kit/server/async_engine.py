"""Engine of an event loop: one thread steps it, coroutines add requests and read their tokens.

Everything of the engine happens in its thread. The loop hands it requests and aborts through an inbox. News
of a step go to a thread that makes their text (``text_thread.py``), which hands them to the loop in one call,
and tells the engine of a stop text that it finds. Unread tokens of a request are merged into one
:class:`Delta`, so a slow reader costs memory for one reply and no more.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from eagle_kit.core.errors import RankLost, UserError
from eagle_kit.engine.memory.engine_memory import NEED_LESS
from eagle_kit.ops.device_memory import out_of_memory_cause, release_cached_memory
from eagle_kit.server.reply import (
    Delta,
    EngineFailed,
    Observer,
    OutOfMemory,
    Overloaded,
    ReplyStream,
)
from eagle_kit.server.room import has_room
from eagle_kit.server.text_thread import News, Progress, TextThread
from eagle_kit.server.turns import TurnThread

if TYPE_CHECKING:
    from eagle_kit.engine.engine import Engine
    from eagle_kit.engine.request import Request

Health = Literal["ok", "draining", "unhealthy"]


class _Arrival(NamedTuple):
    """Request on its way into the engine, and the future of its admission."""

    reply: ReplyStream
    taken: "asyncio.Future[None]"


class _Stopped(NamedTuple):
    """Reply that holds a stop text."""

    reply: ReplyStream


_Item = _Arrival | ReplyStream | _Stopped
"""What the engine's thread is told: a request, one to abort, one to end."""

STUCK_S = 10.0
"""Seconds that the engine's thread gets to end, once another rank is lost."""
TELLING_S = 2.0
"""Seconds for readers to hear of it, where it has not."""


class AsyncEngine:
    """Engine in a thread of its own.

    Make it, :meth:`start` it in the event loop that uses it, :meth:`shutdown` it in the same loop.

    Args:
        engine: exclusive between start and the end of shutdown, but for its counters and the preparation of
            requests.
        capacity: most requests at a time, running, waiting and with a grammar that is being compiled; more
            raise :class:`Overloaded`. Clients with few have a quarter of it beside, which those with
            many cannot fill.
        observer: told of latencies.

    Attributes:
        draining: set when it begins to shut down.
        on_failure: called with the error when the engine has failed, in the engine's thread; and in another
            one with that of a lost rank, where the engine had failed by another error.
        on_stuck: called with the error, in another thread, when the engine has lost a rank and its thread
            does not end: nothing but the end of the process helps.
    """

    def __init__(self, engine: "Engine", *, capacity: int, observer: Observer | None = None) -> None:
        self.engine, self.capacity = engine, capacity
        self.failure: BaseException | None = None
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.on_stuck: Callable[[RankLost], None] = lambda error: None
        self._lost: RankLost | None = None
        self._text = TextThread(self._deliver_soon, self._stop, self._tell, observer)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="eagle-kit engine", daemon=True)
        self._compiling = TurnThread("eagle-kit grammar")
        self._num_reserved: Counter[str] = Counter()
        self._live: set[ReplyStream] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended = asyncio.Event()
        self.draining = asyncio.Event()
        self._wake = threading.Condition()
        self._inbox: list[_Item] = []
        self._todo: deque[_Item] = deque()
        self._closed = False
        self._progress: dict[int, Progress] = {}

    @property
    def health(self) -> Health:
        """State: ``"ok"``, ``"draining"`` during shutdown, ``"unhealthy"`` when the thread has failed."""
        if self.failure is not None:
            return "unhealthy"
        return "draining" if self.draining.is_set() else "ok"

    @property
    def num_live(self) -> int:
        """Admitted requests that have not finished, those on their way included."""
        return len(self._live)

    def start(self) -> None:
        """Start the thread; call it in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._text.start()
        self._compiling.start()

    async def add(self, requests: "Sequence[Request]", *, is_probe: bool = False) -> list[ReplyStream]:
        """Take requests, all of them or none.

        Args:
            is_probe: take them even if there is no room, to see whether the engine lives.

        Raises:
            UserError: the engine can never serve one of them.
            Overloaded: there is no room for all of them now, or the server shuts down.
            EngineFailed: the engine does not run any more.
        """
        num_needed = 0 if is_probe else len(requests)
        client = requests[0].client
        self.check_room(num_needed, client)
        loop = asyncio.get_running_loop()
        with self._reserved(num_needed, client):
            for request in requests:
                if request.params.constraint is not None and request.reply.match is None:
                    await self._prepare(request)
        self.check_room(num_needed, client)
        arrivals = [_Arrival(ReplyStream(request, self._abort), loop.create_future()) for request in requests]
        replies = [arrival.reply for arrival in arrivals]
        for reply in replies:
            reply.company = replies
            reply.request.group = requests[0].number
        self._live.update(replies)
        self._idle.clear()
        self._post(arrivals)
        try:
            await asyncio.gather(*(arrival.taken for arrival in arrivals))
        except BaseException:
            for arrival in arrivals:
                arrival.taken.cancel()
                arrival.reply.close()
            raise
        return replies

    async def stream(self, request: "Request") -> AsyncIterator[Delta]:
        """Add one request and iterate over its deltas; leaving the loop early aborts it."""
        (reply,) = await self.add([request])
        try:
            async for delta in reply:
                yield delta
        finally:
            reply.close()

    async def shutdown(self, grace_s: float = 0.0) -> None:
        """Admit nothing more, let running requests finish for ``grace_s`` seconds, abort the rest, end the
        thread.

        Readers of aborted requests get the tokens so far, with the finish reason ``"abort"``. Waiting
        requests are
        rejected at once, those without a token at the end: their readers get :class:`Overloaded`.
        """
        self.draining.set()
        self._refuse(lambda request: request.stats.admitted_at == 0.0)
        if grace_s > 0 and not self._idle.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), grace_s)
        self._refuse(lambda request: not request.token_ids)
        for reply in list(self._live):
            reply.close()
        self._compiling.close()
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread.is_alive():
            await self._ended.wait()  # which can be cancelled, should a step never end
            self._thread.join()

    def fail(self, error: RankLost) -> None:
        """End the engine, which has lost another rank, also while it has no work. Any thread may call it.
        A step that waits for the other rank on a GPU may never end: its readers are told all the same."""
        with self._wake:
            self._lost = error
            self._wake.notify()
        threading.Thread(target=self._leave_step, args=(error,), daemon=True).start()

    def _leave_step(self, error: RankLost) -> None:
        if self._thread.is_alive():  # else it has ended, or will when it starts
            self._thread.join(STUCK_S)
        if self._thread.is_alive():
            self.failure = error
            self._fail_everything(error)
            self._thread.join(TELLING_S)
        if self._thread.is_alive():
            self.on_stuck(error)
        elif self.failure is not None and not isinstance(self.failure, RankLost):
            self.on_failure(error)  # the thread has ended by an error that does not say so, as of a device

    def check_room(self, count: int, client: str = "") -> None:
        """Raise the errors of :meth:`add` for ``count`` requests of a client."""
        if self.failure is not None:
            raise EngineFailed("The engine has failed; the server must be restarted.")
        if self.draining.is_set():
            raise Overloaded("The server is shutting down.")
        if count > self.capacity:
            raise UserError(
                f"The request asks for {count} replies at once, the server holds at most {self.capacity}.",
                "Ask for fewer.",
            )
        num_held = len(self._live) + self._num_reserved.total()
        if not count:
            return
        own = sum(reply.request.client == client for reply in self._live) + self._num_reserved[client]
        if not has_room(count, held=num_held, own=own, most=self.capacity):
            raise Overloaded(f"The server holds {num_held} of at most {self.capacity} requests.")

    async def _prepare(self, request: "Request") -> None:
        """Compile a grammar in the thread that does nothing else. It has a bounded amount of work, clients
        take turns, and a client's short grammars do not wait for its long ones that have not begun.

        Raises:
            UserError: the grammar is of no use.
            Overloaded: the server shuts down.
        """
        self.check_room(0)
        constraint = request.params.constraint
        assert constraint is not None
        num_chars = len(constraint.text)
        done = self._compiling.run(request.client, self.engine.prepare, request, size=num_chars)
        stop = asyncio.ensure_future(self.draining.wait())
        either: set[asyncio.Future[Any]] = {done, stop}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            if not done.done():
                done.cancel()
        if done.cancelled():
            self.check_room(0)
        await done

    @contextmanager
    def _reserved(self, count: int, client: str) -> Iterator[None]:
        self._num_reserved[client] += count
        try:
            yield
        finally:
            self._num_reserved[client] -= count
            if not self._num_reserved[client]:
                del self._num_reserved[client]

    def _refuse(self, is_idle: "Callable[[Request], bool]") -> None:
        """Reject HTTP requests all of whose choices are idle (503)."""
        idle = [reply for reply in self._live if all(is_idle(each.request) for each in reply.company)]
        for reply in idle:
            self._abort(reply)
            self._finish(reply, Overloaded("The server is shutting down."))

    def _post(self, items: Sequence[_Item]) -> None:
        with self._wake:
            if not self._closed:
                self._inbox += items
                self._wake.notify()
                return
        # The thread has ended or ends without looking into the inbox again.
        self._fail_on_loop(items)

    def _abort(self, reply: ReplyStream) -> None:
        self._post([reply])

    def _fail_on_loop(self, items: Sequence[_Item]) -> None:
        error = EngineFailed("The engine does not run any more.")
        for item in items:
            if isinstance(item, ReplyStream):
                self._finish(item, error)
            elif isinstance(item, _Arrival):
                self._taken(item, error)

    def _finish(self, reply: ReplyStream, news: "Delta | Exception") -> None:
        reply.put(news)
        self._live.discard(reply)
        if not self._live:
            self._idle.set()

    def _taken(self, arrival: _Arrival, error: Exception | None) -> None:
        if error is not None:
            self._finish(arrival.reply, error)
        if not arrival.taken.done():
            if error is None:
                arrival.taken.set_result(None)
            else:
                arrival.taken.set_exception(error)

    def _deliver(self, news: "Sequence[tuple[ReplyStream, Delta | Exception]]") -> None:
        for reply, item in news:
            if isinstance(item, Exception) or item.finish_reason is not None:
                self._finish(reply, item)
            else:
                reply.put(item)

    # What follows runs in the thread that makes text.

    def _deliver_soon(self, news: "Sequence[tuple[ReplyStream, Delta | Exception]]") -> None:
        self._call(self._deliver, news)

    def _stop(self, reply: ReplyStream) -> None:
        self._tell(_Stopped(reply))

    def _tell(self, item: _Item) -> None:
        with self._wake:
            if not self._closed:  # else the reply is aborted anyway, which finds a stop text too
                self._inbox.append(item)
                self._wake.notify()

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            # Whatever it is, the state of the engine is unknown now: every reader hears of it, none waits.
            self.failure = error
            if isinstance(error, RankLost):  # whose sentence ends the server
                _log_cause(error)
            else:
                logging.getLogger(__name__).critical("The engine has failed.", exc_info=error)
            self._fail_everything(error)
            self.on_failure(error)
        finally:
            self._text.then(partial(self._call, self._ended.set))
            self._text.end()

    def _turn(self) -> bool:
        """Process the inbox and step once; returns False at the end of the thread."""
        with self._wake:
            while not (self._inbox or self._closed or self.engine.has_work or self._lost):
                self._wake.wait()
            if self._lost is not None:
                raise self._lost
            self._todo.extend(self._inbox)
            self._inbox.clear()
            if self._closed and not self._todo and not self._progress:
                return False
        while self._todo:
            item = self._todo.popleft()
            if isinstance(item, _Arrival):
                self._admit(item)
            elif isinstance(item, ReplyStream):
                self._end(item, self.engine.abort)
            else:
                self._end(item.reply, self.engine.stop)
        if self.engine.has_work:
            self._step()
        return True

    def _step(self) -> None:
        """Step the engine once and send its news.

        Where the GPU has too little memory every request ends with an error, and the engine goes on. With
        several ranks it does not: the others have taken the step.
        """
        cause = None
        news: Sequence[Request] = ()
        try:
            news = self.engine.step()
        except torch.OutOfMemoryError as error:
            if self.engine.target.ranks is not None:
                raise
            cause = out_of_memory_cause(error, "computing a step")
        if cause is None:
            self._publish(news)
        else:  # the frames of the error, which held tensors, are gone
            self._drop_requests(OutOfMemory(f"{cause} {NEED_LESS}"))

    def _drop_requests(self, error: OutOfMemory) -> None:
        """End every request of the engine with ``error``."""
        logging.getLogger(__name__).error("All requests end: %s", error)
        replies = [progress.reply for progress in self._progress.values()]
        self._progress.clear()
        for reply in replies:
            self.engine.abort(reply.request)
        self.engine.drain()
        release_cached_memory()
        self._text.then(partial(self._deliver_soon, [(reply, error) for reply in replies]))

    def _admit(self, arrival: _Arrival) -> None:
        request = arrival.reply.request
        try:
            self.engine.add_request(request)
        except UserError as error:
            self._call(self._taken, arrival, error)
            return
        except Exception as error:  # taking a request computes nothing, so it fails alone
            logging.getLogger(__name__).error("The engine could not take a request.", exc_info=error)
            failed = EngineFailed(f"The engine could not take the request ({type(error).__name__}).")
            self._call(self._taken, arrival, failed)
            return
        self._progress[request.number] = Progress(arrival.reply, time.perf_counter())
        self._call(self._taken, arrival, None)

    def _end(self, reply: ReplyStream, end: "Callable[[Request], None]") -> None:
        progress = self._progress.get(reply.request.number)
        if progress is None or progress.reply is not reply:
            return  # it has finished, or was never admitted
        if reply.request.finish_reason is None:
            end(reply.request)
        self._publish([reply.request])

    def _publish(self, requests: "Sequence[Request]") -> None:
        """Send the news of these requests, in one piece, to the thread that makes their text."""
        news, now, known = [], time.perf_counter(), self._progress
        for request in requests:
            progress = known.get(request.number)
            if progress is None:
                continue
            reason = request.finish_reason
            news.append(News(progress, len(request.token_ids), request.reply.num_shown, reason, now))
            if reason is not None:
                del known[request.number]
        if news:
            self._text.put(news)

    def _fail_everything(self, error: BaseException) -> None:
        with self._wake:
            self._closed = True
            items = [*self._todo, *self._inbox]
            self._todo.clear()
            self._inbox.clear()
        failed = EngineFailed(f"The engine has failed ({type(error).__name__}).")
        replies = [progress.reply for progress in self._progress.values()]
        self._progress.clear()
        self._text.then(partial(self._deliver_soon, [(reply, failed) for reply in replies]))
        self._call(self._fail_on_loop, items)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            # The loop is gone, and with it every reader.


def _log_cause(error: RankLost) -> None:
    """Log in a line the first of the errors that made it known, if there was one of other words."""
    cause = error.__cause__
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is not None and not isinstance(cause, RankLost):
        name = type(cause).__name__
        logging.getLogger(__name__).error("A rank was lost; the first error was %s: %s", name, cause)
