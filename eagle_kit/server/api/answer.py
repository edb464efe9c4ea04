"""HTTP response to one generation request, whole or as server-sent events.

Chats (``chat.py``) and completions (``completions.py``) fill in the choices.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from pydantic import BaseModel

from eagle_kit.server.api.protocol import Sampling
from eagle_kit.server.api.responses import Response, Speculation
from eagle_kit.server.api.service import FINGERPRINT, FINISH_REASONS, Generation, Service
from eagle_kit.server.api.sse import event, merge, unless_gone
from eagle_kit.server.response_stream import Delta

BodyT = TypeVar("BodyT", bound=Sampling)
CHUNK = 2**15
"""Characters of JSON that are written before other coroutines run."""
NO_LOGPROBS = '"logprobs":null'
NO_CHOICES = '"choices":[]'
"""JSON of empty fields, which are replaced by their contents. Texts cannot hold them: quotes are escaped."""


class Written(NamedTuple):
    """Choice in an HTTP response or in an event.

    Attributes:
        choice: the choice without its log-probabilities.
        logprobs: the log-probabilities as pieces of JSON, which can be read once; None without.
        prompt_logprobs: those of the prompt, in the same way.
    """

    choice: BaseModel
    logprobs: Iterator[str] | None = None
    prompt_logprobs: Iterator[str] | None = None


class Answer(ABC, Generic[BodyT]):
    """HTTP response of one endpoint, made of the generated responses of one request.

    Args:
        service: the server's service.
        body: the validated request.
        generation: the generated responses, which the engine has begun.
    """

    response_type: ClassVar[type[Response]]
    """Schema of the whole HTTP response."""
    event_type: ClassVar[type[Response]]
    """Schema of an event."""
    kinds: ClassVar[tuple[str, str]]
    """The field ``object`` of the HTTP response and of an event."""

    def __init__(self, service: Service, body: BodyT, generation: Generation) -> None:
        self.service = service
        self.body = body
        self.generation = generation

    @classmethod
    @abstractmethod
    async def start(cls, service: Service, http: Any, body: BodyT) -> "Answer[BodyT]":
        """Tokenise the prompts and add their requests to the engine. Errors become error responses."""

    @abstractmethod
    def choice(self, index: int, delta: Delta) -> Written:
        """Make the choice of a finished generated response."""

    def prompt_logprobs(self) -> Iterator[str] | None:
        """Make the log-probabilities of the prompt as pieces of JSON, where they are a field of the whole
        response; else None."""
        return None

    def prompt_token_ids(self) -> dict[str, Any]:
        """The field with the prompt's tokens, where it is one of the whole response and asked for; else
        empty."""
        return {}

    @abstractmethod
    def opening(self) -> Iterable[BaseModel]:
        """Make the choices of the events that come before the first token."""

    @abstractmethod
    def additions(self, index: int, delta: Delta) -> list[Written]:
        """Make the choices of the events for new tokens of a generated response."""

    async def whole(self, http: Any) -> AsyncIterator[str]:
        """Wait for all generated responses, and return the HTTP response as chunks of JSON.

        Raises:
            ClientGone: the client has left.
        """
        deltas = await unless_gone(http, self.generation.collect())
        fields = {**self._head(0), **self.prompt_token_ids()}
        response = self.response_type(**fields, choices=[], usage=self.generation.usage())
        left_out = None if self.body.return_speculation else {"speculation"}
        text = response.model_copy(update=self._speculation()).model_dump_json(exclude=left_out)
        before, _, behind = text.partition(NO_CHOICES)

        def pieces() -> Iterator[str]:
            yield before + '"choices":['
            for index, delta in enumerate(deltas):
                written = self.choice(index, delta)
                yield "," if index else ""
                choice = _with_logprobs(written.choice.model_dump_json(), written.logprobs)
                yield from _with_prompt_logprobs(choice, written.prompt_logprobs)
            yield from _with_prompt_logprobs(iter(("]" + behind,)), self.prompt_logprobs())

        return _in_chunks(pieces())

    async def begin(self, http: Any) -> None:
        """Wait for the first token of any choice.

        An error before it becomes the status of the HTTP response, so that a router can try another server.

        Raises:
            ClientGone: the client has left.
            Exception: the error of a generated response that ended without a token.
        """
        waiting = [asyncio.ensure_future(response.begun()) for response in self.generation.responses]

        async def first() -> None:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

        try:
            await unless_gone(http, first())
        finally:
            for task in waiting:
                task.cancel()

    async def events(self) -> AsyncIterator[str]:
        """Iterate over the events of the HTTP response."""
        options = self.body.stream_options
        head = self._head(1)
        with_usage = bool(options and options.include_usage)
        continuous = bool(options and options.continuous_usage_stats)
        left_out = {"speculation"} if with_usage or continuous else {"speculation", "usage"}
        num_sent = 0
        first_fields = self.prompt_token_ids()

        def chunk(choice: BaseModel) -> str:
            usage = self.generation.usage(num_sent) if continuous else None
            made = self.event_type(**head, **first_fields, choices=[choice], usage=usage)
            first_fields.clear()
            return event(made, exclude=left_out)

        for choice in self.opening():
            yield chunk(choice)
            await asyncio.sleep(0)  # let other coroutines run: prompts may be long and choices many
        async for index, delta in merge(self.generation.responses):
            num_sent += len(delta.token_ids)
            for written in self.additions(index, delta):
                async for part in _in_chunks(_with_logprobs(chunk(written.choice), written.logprobs)):
                    yield part
        if with_usage or self.body.return_speculation:
            last = self.event_type(**head, choices=[], usage=self.generation.usage() if with_usage else None)
            yield event(last.model_copy(update=self._speculation()), exclude_none=True)

    def _head(self, kind: int) -> dict[str, Any]:
        return {
            "id": self.generation.id,
            "object": self.kinds[kind],
            "created": self.generation.created,
            "model": self.service.config.model_name,
            "system_fingerprint": FINGERPRINT,
        }

    def _speculation(self) -> dict[str, Speculation]:
        if not self.body.return_speculation:
            return {}
        generation = self.generation
        reasons = self.service.reasons()
        num_draft_tokens = generation.num_draft_tokens()
        found = Speculation.of(generation.stats(), num_draft_tokens, generation.shapes(), reasons)
        return {"speculation": found}


def _with_logprobs(text: str, logprobs: Iterator[str] | None) -> Iterator[str]:
    """Iterate over the JSON ``text`` of a choice or an event, with log-probabilities in the empty field."""
    if logprobs is None:
        yield text
        return
    before, _, behind = text.partition(NO_LOGPROBS)
    yield before + '"logprobs":'
    yield from logprobs
    yield behind


def _with_prompt_logprobs(pieces: Iterator[str], logprobs: Iterator[str] | None) -> Iterator[str]:
    """Iterate over the ``pieces`` of a JSON object, with log-probabilities of the prompt as last field."""
    if logprobs is None:
        yield from pieces
        return
    last = ""
    for piece in pieces:
        yield last
        last = piece
    yield last.removesuffix("}") + ',"prompt_logprobs":'
    yield from logprobs
    yield "}"


async def _in_chunks(pieces: Iterable[str]) -> AsyncIterator[str]:
    """Join pieces to chunks of about :data:`CHUNK` characters. Between chunks other coroutines run."""
    chunk: list[str] = []
    size = 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece)
        if size >= CHUNK:
            yield "".join(chunk)
            chunk = []
            size = 0
            await asyncio.sleep(0)
    if chunk:
        yield "".join(chunk)


def finish_reason(delta: Delta) -> str | None:
    """Return OpenAI's name of the finish reason."""
    return FINISH_REASONS.get(delta.finish_reason or "", delta.finish_reason)
