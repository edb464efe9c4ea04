"""Server-sent events, many responses as one stream, and clients that go away."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from eagle_kit.server.api.errors import as_api_error
from eagle_kit.server.response_stream import Delta, ResponseStream

T = TypeVar("T")
DONE = "data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has closed the connection."""


def event(data: BaseModel | dict[str, Any], **dump: Any) -> str:
    """Format one event."""
    text = json.dumps(data) if isinstance(data, dict) else data.model_dump_json(**dump)
    return f"data: {text}\n\n"


async def guarded(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Iterate over ``events`` and the end mark; an error becomes an event, since the status has been sent."""
    try:
        async for item in events:
            yield item
    except Exception as error:
        yield event(as_api_error(error).body())
    yield DONE


async def merge(responses: Sequence[ResponseStream]) -> AsyncIterator[tuple[int, Delta]]:
    """Iterate over (index, delta) of several responses as they arrive, until all have finished."""
    if len(responses) == 1:
        async for delta in responses[0]:
            yield 0, delta
        return
    waiting = {asyncio.ensure_future(anext(response)): i for i, response in enumerate(responses)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                try:
                    delta = task.result()
                except StopAsyncIteration:
                    continue
                if delta.finish_reason is None:
                    waiting[asyncio.ensure_future(anext(responses[index]))] = index
                yield index, delta
    finally:
        for task in waiting:
            task.cancel()


async def unless_gone(request: Any, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``. Raises :class:`ClientGone` as soon as the client has closed the
    connection."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(request: Any) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
