"""Thread that makes the text of live responses, beside the engine's thread.

The engine's thread puts the progress of a step here. This thread makes text of new tokens and delivers both.
When it finds a stop text it delivers nothing more of the response, and reports it to the engine. The engine
ends the response at the right token some cycles later, and the rest of the text comes with that end.
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from eagle_kit.core.output import NOT_FINITE
from eagle_kit.ops.step_ranges import StepRanges
from eagle_kit.server.response_stream import (
    Delta,
    EngineFailed,
    NotFinite,
    Observer,
    OutOfMemory,
    ResponseStream,
)


class Progress:
    """What the reader of a live response has received. Owner: the text thread.

    Attributes:
        response: the response.
        num_tokens: delivered tokens.
        num_chars: delivered characters.
        last_tokens_at: when the last tokens were known, ``time.perf_counter()`` seconds.
        has_failed: True if the text could not be made.
        is_stopped: True if a stop text was found and reported.
    """

    def __init__(self, response: ResponseStream, now: float) -> None:
        self.response = response
        self.num_tokens = 0
        self.num_chars = 0
        self.last_tokens_at = now
        self.has_failed = False
        self.is_stopped = False


class ResponseUpdate(NamedTuple):
    """State of a response after a step.

    Attributes:
        progress: what its reader has received.
        num_tokens: tokens of the response.
        num_text_tokens: those of them that are text.
        finish_reason: why the response has ended; None if it goes on.
        now: when this was known, ``time.perf_counter()`` seconds.
    """

    progress: Progress
    num_tokens: int
    num_text_tokens: int
    finish_reason: str | None
    now: float


class TextThread:
    """Thread that makes text. The functions that it is given are called in it.

    Args:
        deliver: called with what the readers of a step get, in the order of :meth:`put`.
        stop: called with a response that has a stop text and has not ended.
        abort: called with a response whose text cannot be made.
        observer: receives latencies.
        ranges: makes the named range of a step's texts in traces.
    """

    def __init__(
        self,
        deliver: Callable[[Sequence[tuple[ResponseStream, Delta | Exception]]], None],
        stop: Callable[[ResponseStream], None],
        abort: Callable[[ResponseStream], None],
        observer: Observer | None,
        ranges: StepRanges,
    ) -> None:
        self._deliver = deliver
        self._stop = stop
        self._abort = abort
        self._observer = observer
        self._ranges = ranges
        self._queue = SimpleQueue[Sequence[ResponseUpdate] | Callable[[], None] | None]()
        self._thread = threading.Thread(target=self._run, name="eagle-kit text", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, updates: Sequence[ResponseUpdate]) -> None:
        """Put the state of the responses after a step."""
        self._queue.put(updates)

    def then(self, call: Callable[[], None]) -> None:
        """Call ``call`` after all that was put so far."""
        self._queue.put(call)

    def end(self) -> None:
        """End the thread after all that was put so far."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if callable(item):
                item()
                continue
            with self._ranges("text"):
                self._make_texts(item)

    def _make_texts(self, updates: Sequence[ResponseUpdate]) -> None:
        """Make the text of the responses after a step, and deliver it."""
        deliveries = []
        for update in updates:
            delta = self._text_of(update)
            if delta is not None:
                deliveries.append((update.progress.response, delta))
        if deliveries:
            self._deliver(deliveries)

    def _text_of(self, update: ResponseUpdate) -> Delta | Exception | None:
        """Return what a reader gets next: new text and tokens, or an error; None if there is nothing new."""
        progress = update.progress
        if progress.has_failed:
            return None
        request = progress.response.request
        delta = self._delta(update)

        # A response whose text cannot be made ends with an error.
        failure = None if request.stream is None else request.stream.failure
        if failure is not None:
            progress.has_failed = True
            if update.finish_reason is None:
                self._abort(progress.response)
        if (failure is not None or update.finish_reason is not None) and self._observer is not None:
            self._observer.finished(request)
        if failure is not None:
            return EngineFailed(f"The text of the response could not be made ({type(failure).__name__}).")
        lack_of_memory = request.response.failure
        if lack_of_memory is not None:
            return OutOfMemory(f"{lack_of_memory.cause} {lack_of_memory.remedy}")
        return NotFinite(NOT_FINITE) if update.finish_reason == "error" else delta

    def _delta(self, update: ResponseUpdate) -> Delta | None:
        """Read the new tokens of a response, and return what its reader has not got yet."""
        progress = update.progress
        request = progress.response.request

        # The text so far. Behind a stop text nothing is delivered until the engine has ended the response.
        text = ""
        if (stream := request.stream) is not None:
            stream.decode(request.token_ids, update.num_text_tokens)
            if update.finish_reason is not None:
                stream.finish()
            elif stream.stopped:
                if not progress.is_stopped:
                    progress.is_stopped = True
                    self._stop(progress.response)
                return None
            text = stream.text

        # What is new.
        new = slice(progress.num_tokens, update.num_tokens)
        delta = Delta(
            text[progress.num_chars :],
            request.token_ids[new],
            request.response.logprobs.part(progress.num_tokens, update.num_tokens),
            update.finish_reason,
        )

        # Note what was delivered, and when.
        if delta.token_ids:
            if self._observer is not None:
                first = progress.num_tokens == 0
                since = request.arrived_at if first else progress.last_tokens_at
                self._observer.emitted(request, len(delta.token_ids), update.now - since, first)
            progress.last_tokens_at = update.now
        progress.num_chars = len(text)
        progress.num_tokens = update.num_tokens

        is_new = delta.token_ids or delta.text or delta.finish_reason
        return delta if is_new else None
