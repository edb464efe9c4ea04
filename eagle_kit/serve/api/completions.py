"""`POST /v1/completions`."""

from collections.abc import AsyncIterator
from typing import Any

from eagle_kit.serve.api.logprobs import TextOffsets, completion_logprobs, off_loop_if_long
from eagle_kit.serve.api.prompts import text_prompt
from eagle_kit.serve.api.protocol import CompletionRequest
from eagle_kit.serve.api.responses import (
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionResponse,
    Speculation,
)
from eagle_kit.serve.api.service import FINGERPRINT, FINISH_REASONS, Generation, Service
from eagle_kit.serve.api.sse import event, merge, unless_gone
from eagle_kit.serve.reply import Delta


async def start(service: Service, http: Any, body: CompletionRequest) -> Generation:
    """Tokenise and hand over. Raises what becomes an error response."""
    service.enter(http, body, len(body.prompts))
    # One by one, so that others have their turn in the thread that tokenises.
    prompts = [
        list(prompt)
        if isinstance(prompt, list)
        else await service.off_loop(text_prompt, service.llm, prompt, service.max_chars)
        for prompt in body.prompts
    ]
    return await service.generate(http, body, prompts, "cmpl")


async def whole(service: Service, http: Any, body: CompletionRequest, generation: Generation) -> str:
    """The response as JSON, when every choice is finished."""
    choices = []
    for index, delta in enumerate(await unless_gone(http, generation.collect())):
        choices.append(
            CompletionChoice(
                index=index,
                text=_echo(service, body, index) + delta.text,
                logprobs=await _logprobs(service, body, delta, TextOffsets(service.llm.tokenizer)),
                finish_reason=FINISH_REASONS.get(delta.finish_reason or "", delta.finish_reason),
            )
        )
    response = CompletionResponse(**_head(service, generation), choices=choices, usage=generation.usage())
    if body.return_speculation:
        response.speculation = Speculation.of(generation.stats())
    return response.model_dump_json(exclude=None if body.return_speculation else {"speculation"})


async def chunks(service: Service, body: CompletionRequest, generation: Generation) -> AsyncIterator[str]:
    """The response as events."""
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    continuous = bool(body.stream_options and body.stream_options.continuous_usage_stats)
    head = _head(service, generation)
    left_out = {"speculation"} if with_usage else {"speculation", "usage"}
    left_out -= {"usage"} if continuous else set()
    offsets = [TextOffsets(service.llm.tokenizer) for _ in generation.replies]
    num_sent = 0

    def chunk(choice: CompletionChoice) -> str:
        usage = generation.usage(num_sent) if continuous else None
        return event(CompletionChunk(**head, choices=[choice], usage=usage), exclude=left_out)

    for index in range(len(generation.replies) if body.echo else 0):
        choice = CompletionChoice(index=index, text=_echo(service, body, index))
        yield chunk(choice)
    async for index, delta in merge(generation.replies):
        num_sent += len(delta.token_ids)
        logprobs = await _logprobs(service, body, delta, offsets[index])
        reason = FINISH_REASONS.get(delta.finish_reason or "", delta.finish_reason)
        if delta.text or reason or logprobs is not None:
            choice = CompletionChoice(index=index, text=delta.text, logprobs=logprobs, finish_reason=reason)
            yield chunk(choice)
    if with_usage or body.return_speculation:
        end = CompletionChunk(**head, choices=[], usage=generation.usage() if with_usage else None)
        end.speculation = Speculation.of(generation.stats()) if body.return_speculation else None
        yield event(end, exclude_none=True)


def _echo(service: Service, body: CompletionRequest, index: int) -> str:
    """The prompt of choice ``index`` when it is to be repeated."""
    if not body.echo:
        return ""
    prompt = body.prompts[index // body.num_choices]
    return prompt if isinstance(prompt, str) else service.llm.tokenizer.decode(prompt)


async def _logprobs(
    service: Service, body: CompletionRequest, delta: Delta, offsets: TextOffsets
) -> CompletionLogprobs | None:
    if body.logprobs is None:
        return None
    return await off_loop_if_long(completion_logprobs, service.token_names, delta, offsets)


def _head(service: Service, generation: Generation) -> dict[str, Any]:
    return {
        "id": generation.id,
        "object": "text_completion",
        "created": generation.created,
        "model": service.settings.model_name,
        "system_fingerprint": FINGERPRINT,
    }
