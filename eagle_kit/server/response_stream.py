"""Response of one request as an async iterator of deltas."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from eagle_kit.core.output import ResponseLogprobs

if TYPE_CHECKING:
    from eagle_kit.engine.request import Request


class Overloaded(Exception):
    """The queue is full, or the server is shutting down; try again later (HTTP 503)."""


class EngineFailed(Exception):
    """The engine raised an unexpected error: in the admission of this request, or in a step, which ends its
    thread and with it every request (HTTP 500)."""


class OutOfMemory(EngineFailed):
    """The GPU had too little memory to compute this request alone, or any part of a step, which ends all
    requests. The engine goes on (HTTP 503)."""


class NotFinite(EngineFailed):
    """The target's logits are not finite, which ends this request alone (HTTP 500)."""


@dataclass
class Delta:
    """Addition to a response: text, tokens, their log-probabilities when asked for, and at the end the finish
    reason."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: ResponseLogprobs = field(default_factory=ResponseLogprobs)
    finish_reason: str | None = None

    def add(self, later: "Delta") -> None:
        """Append a later delta to this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs.extend(later.logprobs)
        self.finish_reason = later.finish_reason


class Observer(Protocol):
    """Observer of latencies, called in the text thread. Its methods are cheap and never raise."""

    def emitted(self, request: "Request", num_tokens: int, seconds: float, first: bool) -> None:
        """Observe ``num_tokens``, ``seconds`` after the ones before, or after the arrival when ``first``."""

    def finished(self, request: "Request") -> None:
        """Observe the end of a request."""


class ResponseStream:
    """Response of an admitted request: an async iterator of :class:`Delta`, the last of which has the
    finish reason.

    :meth:`close` may be called at any time, any number of times; it aborts an unfinished request.

    Attributes:
        request: the request.
        siblings: responses of the same HTTP request, this one among them.
        finish_reason: why the response has ended; None before the end, and after an error.
    """

    def __init__(self, request: "Request", abort: Callable[["ResponseStream"], None]) -> None:
        self.request = request
        self.siblings: Sequence[ResponseStream] = (self,)
        self.finish_reason: str | None = None
        self._abort = abort
        self._changed = asyncio.Event()
        self._unread: Delta | None = None
        self._error: Exception | None = None

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while self._unread is None:
            if self._error is not None:
                raise self._error
            if self.finish_reason is not None:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        delta = self._unread
        self._unread = None
        return delta

    async def begun(self) -> None:
        """Wait for the first token or the end. Raises the error of a response that ended without a token."""
        while self._unread is None and self._error is None and self.finish_reason is None:
            self._changed.clear()
            await self._changed.wait()
        if self._unread is None and self._error is not None:
            raise self._error

    async def collect(self) -> Delta:
        """Wait for the end, and return the response as one delta."""
        whole = Delta()
        async for delta in self:
            whole.add(delta)
        return whole

    def close(self) -> None:
        """Abort the request unless it has finished."""
        if self.finish_reason is None and self._error is None:
            self._abort(self)

    def put(self, delta: "Delta | Exception") -> None:
        """Add new tokens, or the error that ends the response. Only the event loop calls it."""
        if self._error is not None:
            return
        if isinstance(delta, Exception):
            self._error = delta
        else:
            self.finish_reason = delta.finish_reason
            if self._unread is None:
                self._unread = delta
            else:
                self._unread.add(delta)
        self._changed.set()
