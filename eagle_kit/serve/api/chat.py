"""`POST /v1/chat/completions`."""

from collections.abc import AsyncIterator
from typing import Any

from eagle_kit.core.request import TokenLogprobs
from eagle_kit.serve.api.logprobs import chat_logprobs
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


async def start(service: Service, http: Any, body: ChatRequest) -> Generation:
    """Render, tokenise and hand over. Raises what becomes an error response."""
    service.enter(http, body, 1)
    tools = None if body.tool_choice == "none" else body.tools
    prompt = await service.off_loop(chat_prompt, service.llm, body.messages, tools)
    return await service.generate(http, body, [prompt], "chatcmpl")


async def whole(service: Service, http: Any, body: ChatRequest, generation: Generation) -> str:
    """The response as JSON, when every choice is finished."""
    choices = []
    for index, delta in enumerate(await unless_gone(http, generation.collect())):
        choices.append(
            ChatChoice(
                index=index,
                message=ChatMessage(content=delta.text),
                logprobs=_logprobs(service, body, delta.token_ids, delta.logprobs),
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
    head = _head(service, generation, "chat.completion.chunk")
    left_out = {"speculation"} if with_usage else {"speculation", "usage"}

    def chunk(
        index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None, reason: str | None = None
    ) -> str:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)
        return event(ChatChunk(**head, choices=[choice]), exclude=left_out)

    for index in range(len(generation.replies)):
        yield chunk(index, ChatDelta(role="assistant", content=""))
    async for index, delta in merge(generation.replies):
        logprobs = _logprobs(service, body, delta.token_ids, delta.logprobs)
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


def _logprobs(
    service: Service, body: ChatRequest, tokens: list[int], entries: list[TokenLogprobs]
) -> ChatLogprobs | None:
    return chat_logprobs(service.llm.tokenizer, tokens, entries) if body.logprobs else None
