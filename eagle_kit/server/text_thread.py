"""Text of live replies, made beside the engine.

The engine's thread puts the news of a step here, this thread turns new tokens into text and hands both on.
A reply with a stop text is handed on as far as it is certain: what completes the stop text comes with the end
of the reply, which the engine, some cycles late, puts at the right token.
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from eagle_kit.core.output import NOT_FINITE
from eagle_kit.server.reply import Delta, EngineFailed, NotFinite, Observer, ReplyStream


class Progress:
    """Progress of a live request's reader; owned by the thread that makes text."""

    def __init__(self, reply: ReplyStream, now: float) -> None:
        self.reply = reply
        self.num_tokens = self.num_chars = 0
        self.last_news_at = now
        self.has_failed = self.is_stopped = False


class News(NamedTuple):
    """State of a request after a step: tokens of its reply, those of them that are text, the reason if it has
    ended, and when that was known, ``time.perf_counter()`` seconds."""

    progress: Progress
    num_tokens: int
    num_shown: int
    finish_reason: str | None
    now: float


class TextThread:
    """Thread that makes text.

    Args:
        deliver: takes what readers get next, in the order in which it was put here.
        stop: told of a reply that holds a stop text and has not ended yet.
        abort: told of a reply whose text cannot be made.
        observer: told of latencies.
    """

    def __init__(
        self,
        deliver: Callable[[Sequence[tuple[ReplyStream, Delta | Exception]]], None],
        stop: Callable[[ReplyStream], None],
        abort: Callable[[ReplyStream], None],
        observer: Observer | None,
    ) -> None:
        self._deliver, self._stop, self._abort, self._observer = deliver, stop, abort, observer
        self._queue = SimpleQueue[Sequence[News] | Callable[[], None] | None]()
        self._thread = threading.Thread(target=self._run, name="eagle-kit text", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, news: Sequence[News]) -> None:
        """Take the news of a step."""
        self._queue.put(news)

    def then(self, call: Callable[[], None]) -> None:
        """Call ``call`` behind all news so far."""
        self._queue.put(call)

    def end(self) -> None:
        """End the thread behind all of that."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if callable(item):
                item()
                continue
            found = [
                (news.progress.reply, delta) for news in item if (delta := self._text_of(news)) is not None
            ]
            if found:
                self._deliver(found)

    def _text_of(self, news: News) -> Delta | Exception | None:
        progress = news.progress
        if progress.has_failed:
            return None
        delta, request = self._delta(news), progress.reply.request
        failure = None if request.stream is None else request.stream.failure
        if failure is not None:
            progress.has_failed = True
            if news.finish_reason is None:
                self._abort(progress.reply)
        if (failure is not None or news.finish_reason is not None) and self._observer is not None:
            self._observer.finished(request)
        if failure is not None:
            return EngineFailed(f"The text of the reply could not be made ({type(failure).__name__}).")
        return NotFinite(NOT_FINITE) if news.finish_reason == "error" else delta

    def _delta(self, news: News) -> Delta | None:
        progress, text = news.progress, ""
        request = progress.reply.request
        if (stream := request.stream) is not None:
            stream.read(request.token_ids, news.num_shown)
            if news.finish_reason is not None:
                stream.finish()
            elif stream.stopped:
                if not progress.is_stopped:
                    progress.is_stopped = True
                    self._stop(progress.reply)
                return None  # until the engine has put the end at its place
            text = stream.text
        new = slice(progress.num_tokens, news.num_tokens)
        delta = Delta(
            text[progress.num_chars :],
            request.token_ids[new],
            request.reply.logprobs.part(progress.num_tokens, news.num_tokens),
            news.finish_reason,
        )
        if delta.token_ids:
            if self._observer is not None:
                first = progress.num_tokens == 0
                since = request.arrived_at if first else progress.last_news_at
                self._observer.emitted(request, len(delta.token_ids), news.now - since, first)
            progress.last_news_at = news.now
        progress.num_chars, progress.num_tokens = len(text), news.num_tokens
        return delta if delta.token_ids or delta.text or delta.finish_reason else None
