"""An engine behind an event loop: coroutines add requests and read responses, and a thread steps the engine.

Three threads pass a request on, after its prompt was tokenised and its grammar compiled in threads of their
own (``api/service.py``, :meth:`AsyncEngine.add`):

* The event loop posts requests and aborts to an inbox.
* The engine's thread reads the inbox, steps the engine and sends the progress of responses to the text
  thread.
* The text thread (``text_thread.py``) makes text of tokens and delivers it to the event loop, in one call for
  a step. It posts a stop text that it finds to the inbox.

Unread tokens of a response are merged into one :class:`Delta`, so a slow reader costs memory for one response
only.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch

from eagle_kit.core.errors import RankLost, UserError
from eagle_kit.engine.memory.engine_memory import NEED_LESS
from eagle_kit.ops.compilations import count_compilations
from eagle_kit.ops.device_memory import out_of_memory_cause, release_cached_memory
from eagle_kit.server.fair_queue import FairThread
from eagle_kit.server.response_stream import (
    Delta,
    EngineFailed,
    Observer,
    OutOfMemory,
    Overloaded,
    ResponseStream,
)
from eagle_kit.server.room import has_room
from eagle_kit.server.text_thread import Progress, ResponseUpdate, TextThread

if TYPE_CHECKING:
    from eagle_kit.engine.engine import Engine
    from eagle_kit.engine.request import Request

T = TypeVar("T")
Health = Literal["ok", "draining", "unhealthy"]


class _Arrival(NamedTuple):
    """Request on its way into the engine.

    Attributes:
        response: stream of its response.
        admitted: done when the engine has taken the request; holds the error if it has not.
    """

    response: ResponseStream
    admitted: "asyncio.Future[None]"


class _Abort(NamedTuple):
    """Message of the event loop or the text thread: the request of a response is to be aborted."""

    response: ResponseStream


class _StopFound(NamedTuple):
    """Message of the text thread: the text of a response contains a stop text, where the response is to
    end."""

    response: ResponseStream


class _Call(NamedTuple):
    """Message of the event loop: a function to call between two steps.

    Attributes:
        function: the function.
        result: holds what it returns or raises.
    """

    function: Callable[[], Any]
    result: "asyncio.Future[Any]"


_Message = _Arrival | _Abort | _StopFound | _Call
"""Messages of the inbox."""

STUCK_S = 10.0
"""Seconds that the engine's thread has to end, once another rank is lost."""
NOTIFY_S = 2.0
"""Seconds that the loop has to send the errors, if the thread has not ended by then."""


class AsyncEngine:
    """An engine in its own thread.

    Call :meth:`start` in the event loop that uses it, and :meth:`shutdown` in the same loop.

    Args:
        engine: used by this object alone from start to the end of shutdown. Others may read its counters and
            prepare requests.
        capacity: most requests at a time: running, waiting, and with a grammar that is being compiled. More
            raise :class:`Overloaded`. A quarter more is reserved for clients with few requests.
        observer: receives latencies.

    Attributes:
        failure: error that ended the engine; None while it runs.
        draining: set when shutdown begins.
        on_failure: called in the engine's thread with the error that ended it. If the engine failed because
            of a lost rank but raised another error, it is called again, in another thread, with
            :class:`RankLost`.
        on_stuck: called in another thread with the error, if a rank is lost and the engine's thread does not
            end. Only the end of the process helps then.
    """

    def __init__(self, engine: "Engine", *, capacity: int, observer: Observer | None = None) -> None:
        self.engine = engine
        self.capacity = capacity

        # Failures.
        self.failure: BaseException | None = None
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.on_stuck: Callable[[RankLost], None] = lambda error: None
        self._lost: RankLost | None = None

        # Threads: of text, of the engine, and of grammars.
        self._text = TextThread(
            deliver=self._deliver_from_thread,
            stop=self._stop_from_thread,
            abort=self._abort_from_thread,
            observer=observer,
            ranges=engine.ranges,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="eagle-kit engine", daemon=True)
        self._compiling = FairThread("eagle-kit grammar")

        # State of the event loop: live responses, their number per client, and the requests per client whose
        # grammar is being compiled.
        self._num_reserved: Counter[str] = Counter()
        self._num_live_of: Counter[str] = Counter()
        self._live: set[ResponseStream] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended = asyncio.Event()
        self.draining = asyncio.Event()

        # The inbox, which all threads post to while they hold ``_wake``.
        self._wake = threading.Condition()
        self._inbox: list[_Message] = []
        self._closed = False

        # State of the engine's thread: messages taken from the inbox, and the progress of each response.
        self._messages: deque[_Message] = deque()
        self._progress: dict[int, Progress] = {}

    @property
    def health(self) -> Health:
        """``"ok"``; ``"draining"`` during shutdown; ``"unhealthy"`` after a failure."""
        if self.failure is not None:
            return "unhealthy"
        return "draining" if self.draining.is_set() else "ok"

    @property
    def num_live(self) -> int:
        """Number of requests that have not finished, those on their way into the engine included."""
        return len(self._live)

    def start(self) -> None:
        """Start the thread; call it in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._text.start()
        self._compiling.start()

    async def add(self, requests: "Sequence[Request]", *, is_probe: bool = False) -> list[ResponseStream]:
        """Add requests to the engine, all of them or none.

        Args:
            is_probe: add them even if there is no room, to see whether the engine still emits tokens.

        Returns:
            Their responses, as streams.

        Raises:
            UserError: the engine can never serve one of them.
            Overloaded: there is no room for all of them now, or the server is shutting down.
            EngineFailed: the engine has failed.
        """
        num_needed = 0 if is_probe else len(requests)
        client = requests[0].client
        self.check_room(num_needed, client)

        # Compile grammars. Their requests have a place meanwhile.
        loop = asyncio.get_running_loop()
        with self._reserved(num_needed, client):
            for request in requests:
                if request.params.constraint is not None and request.response.match is None:
                    await self._prepare(request)
        self.check_room(num_needed, client)

        # Post the requests to the engine's thread, as one group of its scheduler.
        arrivals = [
            _Arrival(ResponseStream(request, self._abort), loop.create_future()) for request in requests
        ]
        responses = [arrival.response for arrival in arrivals]
        for response in responses:
            response.siblings = responses
            response.request.group = requests[0].number
        self._live.update(responses)
        self._num_live_of[client] += len(responses)
        self._idle.clear()
        self._post(arrivals)

        # Wait until the engine has taken them all.
        try:
            await asyncio.gather(*(arrival.admitted for arrival in arrivals))
        except BaseException:
            for arrival in arrivals:
                arrival.admitted.cancel()
                arrival.response.close()
            raise
        return responses

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function in the engine's thread, between two steps, and return what it returns.

        Raises:
            EngineFailed: the engine has failed, or it has been shut down.
            Exception: what the function raises; the engine goes on.
        """
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._post([_Call(function, result)])
        return await result

    async def stream(self, request: "Request") -> AsyncIterator[Delta]:
        """Add one request and iterate over its deltas. Leaving the iteration early aborts the request."""
        (response,) = await self.add([request])
        try:
            async for delta in response:
                yield delta
        finally:
            response.close()

    async def shutdown(self, grace_s: float = 0.0) -> None:
        """Shut down: admit no more requests, wait for running ones, abort the rest, and end the thread.

        Waiting requests are refused at once, and requests without a token after the grace period. Their
        readers get :class:`Overloaded`. Readers of aborted requests get the tokens so far, with the finish
        reason ``"abort"``.

        Args:
            grace_s: seconds that running requests have to finish.
        """
        # Refuse waiting requests, and let the others finish.
        self.draining.set()
        self._refuse(lambda request: request.stats.admitted_at == 0.0)
        if grace_s > 0 and not self._idle.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), grace_s)

        # Refuse or abort the rest.
        self._refuse(lambda request: not request.token_ids)
        for response in list(self._live):
            response.close()
        self._compiling.close()

        # End the thread. The wait can be cancelled, in case a step never ends.
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread.is_alive():
            await self._ended.wait()
            self._thread.join()

    def fail(self, error: RankLost) -> None:
        """End the engine because another rank is lost. Any thread may call it.

        A step that waits for the other rank on a GPU may never end. Its readers get the error all the same.
        """
        with self._wake:
            self._lost = error
            self._wake.notify()
        threading.Thread(target=self._abandon_step, args=(error,), daemon=True).start()

    def _abandon_step(self, error: RankLost) -> None:
        """Wait for the engine's thread to end. If it does not, send the error to all readers without it."""
        if self._thread.is_alive():
            self._thread.join(STUCK_S)
        if self._thread.is_alive():
            self.failure = error
            self._fail_everything(error)
            self._thread.join(NOTIFY_S)
        if self._thread.is_alive():
            self.on_stuck(error)
        elif self.failure is not None and not isinstance(self.failure, RankLost):
            # The thread has ended by another error, such as one of the device, which the lost rank caused.
            self.on_failure(error)

    def check_room(self, count: int, client: str = "") -> None:
        """Raise the errors that :meth:`add` would raise for ``count`` requests of a client."""
        if self.failure is not None:
            raise EngineFailed("The engine has failed; the server must be restarted.")
        if self.draining.is_set():
            raise Overloaded("The server is shutting down.")
        if count > self.capacity:
            raise UserError(
                f"The request asks for {count} responses at once, the server holds at most {self.capacity}.",
                "Ask for fewer.",
            )
        num_held = len(self._live) + self._num_reserved.total()
        if not count:
            return
        num_of_client = self._num_live_of[client] + self._num_reserved[client]
        if not has_room(count, held=num_held, own=num_of_client, most=self.capacity):
            raise Overloaded(f"The server holds {num_held} of at most {self.capacity} requests.")

    async def _prepare(self, request: "Request") -> None:
        """Compile a request's grammar in the thread of grammars.

        Clients take turns, and of one client's grammars the shortest comes first.

        Raises:
            UserError: the grammar cannot be compiled.
            Overloaded: the server is shutting down.
        """
        # Start the compilation.
        self.check_room(0)
        constraint = request.params.constraint
        assert constraint is not None
        num_chars = len(constraint.text)
        done = self._compiling.run(request.client, self.engine.prepare, request, size=num_chars)

        # Wait for it, or for the beginning of shutdown.
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
        """Count requests as held while their grammars are compiled."""
        self._num_reserved[client] += count
        try:
            yield
        finally:
            self._num_reserved[client] -= count
            if not self._num_reserved[client]:
                del self._num_reserved[client]

    def _refuse(self, can_refuse: "Callable[[Request], bool]") -> None:
        """Refuse the HTTP requests of which all choices can be refused (503)."""
        idle = [
            response for response in self._live if all(can_refuse(each.request) for each in response.siblings)
        ]
        for response in idle:
            self._abort(response)
            self._finish(response, Overloaded("The server is shutting down."))

    def _post(self, messages: Sequence[_Message]) -> None:
        with self._wake:
            if not self._closed:
                self._inbox += messages
                self._wake.notify()
                return
        # The thread has ended, or will end without reading the inbox again.
        self._fail_on_loop(messages)

    def _abort(self, response: ResponseStream) -> None:
        self._post([_Abort(response)])

    def _fail_on_loop(self, messages: Sequence[_Message]) -> None:
        error = EngineFailed("The engine does not run any more.")
        for message in messages:
            if isinstance(message, _Abort):
                self._finish(message.response, error)
            elif isinstance(message, _Arrival):
                self._resolve_admission(message, error)
            elif isinstance(message, _Call):
                self._resolve_call(message, None, error)

    def _finish(self, response: ResponseStream, last: "Delta | Exception") -> None:
        """Give a reader the last delta, or the error, of its response."""
        response.put(last)
        if response in self._live:
            self._live.remove(response)
            client = response.request.client
            self._num_live_of[client] -= 1
            if not self._num_live_of[client]:
                del self._num_live_of[client]
        if not self._live:
            self._idle.set()

    def _resolve_admission(self, arrival: _Arrival, error: Exception | None) -> None:
        """Let :meth:`add` return, or raise the error."""
        if error is not None:
            self._finish(arrival.response, error)
        if not arrival.admitted.done():
            if error is None:
                arrival.admitted.set_result(None)
            else:
                arrival.admitted.set_exception(error)

    def _resolve_call(self, call: _Call, value: Any, error: Exception | None) -> None:
        """Let :meth:`call` return, or raise the error."""
        if call.result.done():  # the caller has left
            return
        if error is None:
            call.result.set_result(value)
        else:
            call.result.set_exception(error)

    def _deliver(self, deliveries: "Sequence[tuple[ResponseStream, Delta | Exception]]") -> None:
        for response, delta in deliveries:
            if isinstance(delta, Exception) or delta.finish_reason is not None:
                self._finish(response, delta)
            else:
                response.put(delta)

    # Methods that run in the text thread.

    def _deliver_from_thread(self, deliveries: "Sequence[tuple[ResponseStream, Delta | Exception]]") -> None:
        self._call_in_loop(self._deliver, deliveries)

    def _stop_from_thread(self, response: ResponseStream) -> None:
        self._post_from_thread(_StopFound(response))

    def _abort_from_thread(self, response: ResponseStream) -> None:
        self._post_from_thread(_Abort(response))

    def _post_from_thread(self, message: _Message) -> None:
        with self._wake:
            if not self._closed:  # after that the response is aborted anyway, which finds a stop text too
                self._inbox.append(message)
                self._wake.notify()

    # Methods that run in the engine's thread.

    def _run(self) -> None:
        try:
            with self._counting_compilations():
                while self._run_once():
                    pass
        except BaseException as error:
            # After any error the state of the engine is unknown. Every reader gets an error, none waits.
            self.failure = error
            if isinstance(error, RankLost):  # the server ends with its message
                _log_cause(error)
            else:
                logging.getLogger(__name__).critical("The engine has failed.", exc_info=error)
            self._fail_everything(error)
            self.on_failure(error)
        finally:
            self._text.then(partial(self._call_in_loop, self._ended.set))
            self._text.end()
            if self.engine.profile is not None:
                self.engine.stop_profile()

    def _counting_compilations(self) -> AbstractContextManager[Any]:
        """Context manager: kernels that are compiled in steps are counted. A CPU compiles none."""

        def count() -> None:
            self.engine.totals.num_compilations += 1

        if self.engine.runner.device.type != "cuda":
            return nullcontext()
        return count_compilations(count)

    def _run_once(self) -> bool:
        """Process the inbox and step the engine once; return False if the thread is to end."""
        # Wait for work, and empty the inbox.
        with self._wake:
            while not (self._inbox or self._closed or self.engine.has_work or self._lost):
                self._wake.wait()
            if self._lost is not None:
                raise self._lost
            self._messages.extend(self._inbox)
            self._inbox.clear()
            if self._closed and not self._messages and not self._progress:
                return False

        # Add, abort and end requests.
        while self._messages:
            message = self._messages.popleft()
            if isinstance(message, _Arrival):
                self._admit(message)
            elif isinstance(message, _Call):
                self._call(message)
            elif isinstance(message, _Abort):
                self._end_in_engine(message.response, self.engine.abort)
            else:
                self._end_in_engine(message.response, self.engine.stop)

        # Step.
        if self.engine.has_work:
            self._step()
        return True

    def _step(self) -> None:
        """Step the engine once, and send the progress of its responses.

        The engine itself runs a step in parts if the GPU has too little memory. If even so little fails that
        no request is at fault, every request ends with an error and the engine goes on. With several ranks it
        fails, because the other ranks have taken the step.
        """
        cause = None
        updated: Sequence[Request] = ()
        try:
            updated = self.engine.step()
        except torch.OutOfMemoryError as error:
            if self.engine.target.ranks is not None:
                raise
            cause = out_of_memory_cause(error, "computing a step")
            self.engine.totals.num_steps_out_of_memory += 1
        if cause is None:
            self._send_progress(updated)
        else:
            # Outside the handler, so that the frames of the error hold no tensors any more.
            self._drop_requests(OutOfMemory(f"{cause} {NEED_LESS}"))

    def _drop_requests(self, error: OutOfMemory) -> None:
        """End every request of the engine with ``error``."""
        logging.getLogger(__name__).error("All requests end: %s", error)
        responses = [progress.response for progress in self._progress.values()]
        self._progress.clear()
        for response in responses:
            self.engine.abort(response.request)
        self.engine.drain()
        release_cached_memory()
        self._text.then(partial(self._deliver_from_thread, [(response, error) for response in responses]))

    def _admit(self, arrival: _Arrival) -> None:
        """Add a request to the engine, and report to the loop whether that worked."""
        request = arrival.response.request
        try:
            self.engine.add_request(request)
        except UserError as error:
            self._call_in_loop(self._resolve_admission, arrival, error)
            return
        except Exception as error:  # adding a request computes nothing, so it fails alone
            logging.getLogger(__name__).error("The engine could not take a request.", exc_info=error)
            failed = EngineFailed(f"The engine could not take the request ({type(error).__name__}).")
            self._call_in_loop(self._resolve_admission, arrival, failed)
            return
        self._progress[request.number] = Progress(arrival.response, time.perf_counter())
        self._call_in_loop(self._resolve_admission, arrival, None)

    def _call(self, call: _Call) -> None:
        """Call a function between two steps, and send what it returns or raises to the loop."""
        value = None
        failure = None
        try:
            value = call.function()
        except Exception as error:
            failure = error
        self._call_in_loop(self._resolve_call, call, value, failure)
        if isinstance(failure, RankLost):  # it ends the engine, as in a step
            raise failure

    def _end_in_engine(self, response: ResponseStream, end: "Callable[[Request], None]") -> None:
        """End a request by a method of the engine, and send its progress."""
        progress = self._progress.get(response.request.number)
        if progress is None or progress.response is not response:
            return  # it has finished, or was never admitted
        if response.request.finish_reason is None:
            end(response.request)
        self._send_progress([response.request])

    def _send_progress(self, requests: "Sequence[Request]") -> None:
        """Send the progress of these requests to the text thread, in one message."""
        updates = []
        now = time.perf_counter()
        for request in requests:
            progress = self._progress.get(request.number)
            if progress is None:
                continue
            reason = request.finish_reason
            num_text_tokens = request.response.num_text_tokens
            updates.append(ResponseUpdate(progress, len(request.token_ids), num_text_tokens, reason, now))
            if reason is not None:
                del self._progress[request.number]
        if updates:
            self._text.put(updates)

    def _fail_everything(self, error: BaseException) -> None:
        """Send an error to the readers of all requests, admitted or on their way."""
        with self._wake:
            self._closed = True
            messages = [*self._messages, *self._inbox]
            self._messages.clear()
            self._inbox.clear()
        failed = EngineFailed(f"The engine has failed ({type(error).__name__}).")
        responses = [progress.response for progress in self._progress.values()]
        self._progress.clear()
        self._text.then(partial(self._deliver_from_thread, [(response, failed) for response in responses]))
        self._call_in_loop(self._fail_on_loop, messages)

    def _call_in_loop(self, function: Callable[..., None], *args: object) -> None:
        """Call a function in the event loop, from any thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            # The loop has ended, and with it every reader.


def _log_cause(error: RankLost) -> None:
    """Log the first error behind the loss of a rank, if it is another kind of error."""
    cause = error.__cause__
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is not None and not isinstance(cause, RankLost):
        name = type(cause).__name__
        logging.getLogger(__name__).error("A rank was lost; the first error was %s: %s", name, cause)
