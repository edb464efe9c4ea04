"""`POST /v1/chat/completions`."""

from collections.abc import AsyncIterator
from typing import Any

from eagle_kit.serve.api.logprobs import chat_logprobs, off_loop_if_long
from eagle_kit.serve.api.prompts import chat_prompt
from eagle_kit.serve.api.protocol import ChatRequest
from eagle_kit.serve.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    Speculation,
)
from eagle_kit.serve.api.service import FINGERPRINT, FINISH_REASONS, Generation, Service
from eagle_kit.serve.api.sse import event, merge, unless_gone
from eagle_kit.serve.reply import Delta


async def start(service: Service, http: Any, body: ChatRequest) -> Generation:
    """Render, tokenise and hand over. Raises what becomes an error response."""
    service.enter(http, body, 1)
    tools = None if body.tool_choice == "none" else body.tools
    prompt = await service.off_loop(chat_prompt, service.llm, body.messages, tools, service.max_chars)
    return await service.generate(http, body, [prompt], "chatcmpl")


async def whole(service: Service, http: Any, body: ChatRequest, generation: Generation) -> str:
    """The response as JSON, when every choice is finished."""
    choices = []
    for index, delta in enumerate(await unless_gone(http, generation.collect())):
        choices.append(
            ChatChoice(
                index=index,
                message=ChatMessage(content=delta.text),
                logprobs=await _logprobs(service, body, delta),
                finish_reason=_reason(delta.finish_reason) or "stop",
            )
        )
    response = ChatResponse(
        **_head(service, generation, "chat.completion"), choices=choices, usage=generation.usage()
    )
    if body.return_speculation:
        response.speculation = Speculation.of(generation.stats())
    return response.model_dump_json(exclude=None if body.return_speculation else {"speculation"})


async def chunks(service: Service, body: ChatRequest, generation: Generation) -> AsyncIterator[str]:
    """The response as events."""
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    continuous = bool(body.stream_options and body.stream_options.continuous_usage_stats)
    head = _head(service, generation, "chat.completion.chunk")
    left_out = {"speculation"} if with_usage else {"speculation", "usage"}
    left_out -= {"usage"} if continuous else set()
    num_sent = 0

    def chunk(
        index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None, reason: str | None = None
    ) -> str:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)
        usage = generation.usage(num_sent) if continuous else None
        return event(ChatChunk(**head, choices=[choice], usage=usage), exclude=left_out)

    for index in range(len(generation.replies)):
        yield chunk(index, ChatDelta(role="assistant", content=""))
    async for index, delta in merge(generation.replies):
        num_sent += len(delta.token_ids)
        logprobs = await _logprobs(service, body, delta)
        if delta.text or (logprobs is not None and logprobs.content):
            yield chunk(index, ChatDelta(content=delta.text), logprobs)
        if delta.finish_reason is not None:
            yield chunk(index, ChatDelta(), reason=_reason(delta.finish_reason))
    if with_usage or body.return_speculation:
        last = ChatChunk(**head, choices=[], usage=generation.usage() if with_usage else None)
        last.speculation = Speculation.of(generation.stats()) if body.return_speculation else None
        yield event(last, exclude_none=True)


def _head(service: Service, generation: Generation, kind: str) -> dict[str, Any]:
    return {
        "id": generation.id,
        "object": kind,
        "created": generation.created,
        "model": service.settings.model_name,
        "system_fingerprint": FINGERPRINT,
    }


def _reason(reason: str | None) -> str | None:
    return FINISH_REASONS.get(reason, reason) if reason is not None else None


async def _logprobs(service: Service, body: ChatRequest, delta: Delta) -> ChatLogprobs | None:
    return await off_loop_if_long(chat_logprobs, service.token_names, delta) if body.logprobs else None
