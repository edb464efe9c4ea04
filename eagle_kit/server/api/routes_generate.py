"""Routes that generate text."""

from typing import TYPE_CHECKING, Any

from eagle_kit.server.api.answer import Answer
from eagle_kit.server.api.body import body_of
from eagle_kit.server.api.chat import ChatAnswer
from eagle_kit.server.api.completions import CompletionAnswer
from eagle_kit.server.api.documented import body_schema, error_responses
from eagle_kit.server.api.params import num_logprobs
from eagle_kit.server.api.protocol import ChatRequest, CompletionRequest
from eagle_kit.server.api.responses import ChatResponse, CompletionResponse
from eagle_kit.server.api.service import Service
from eagle_kit.server.api.sse import ClientGone, guarded

if TYPE_CHECKING:
    from fastapi import FastAPI

GONE = 499
"""Status for the log when the client has left; nobody receives it."""


def add_generation_routes(app: "FastAPI", service: Service) -> None:
    """`/v1/chat/completions` and `/v1/completions`."""
    from fastapi import Depends, Request, Response
    from fastapi.responses import StreamingResponse

    async def respond(kind: type[Answer[Any]], http: Request, body: Any) -> Response:
        answer = await kind.start(service, http, body)
        try:
            if body.stream:
                await answer.begin(http)
                return StreamingResponse(
                    guarded(answer.events()),
                    media_type="text/event-stream",
                    headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
                )
            chunks = await answer.whole(http)
        except ClientGone:
            return Response(status_code=GONE)
        if num_logprobs(body) is None:
            return Response("".join([chunk async for chunk in chunks]), media_type="application/json")
        # Not held as a whole: a token of a choice has more than a kilobyte of JSON.
        return StreamingResponse(chunks, media_type="application/json")

    def responses(model: Any) -> dict[int | str, dict[str, Any]]:
        ok = {
            "model": model,
            "content": {"text/event-stream": {}},
            "description": "The response, or its events.",
        }
        return {200: ok, **error_responses()}

    @app.post(
        "/v1/chat/completions",
        response_model=None,
        responses=responses(ChatResponse),
        openapi_extra=body_schema(app, ChatRequest),
    )
    async def create_chat_completion(
        http: Request,
        body: ChatRequest = Depends(body_of(ChatRequest, service)),  # noqa: B008
    ) -> Response:
        """Answer a conversation. Without `stream` the response is one JSON object, else server-sent events
        that end with `[DONE]`. Every parameter that is not listed is refused."""
        return await respond(ChatAnswer, http, body)

    @app.post(
        "/v1/completions",
        response_model=None,
        responses=responses(CompletionResponse),
        openapi_extra=body_schema(app, CompletionRequest),
    )
    async def create_completion(
        http: Request,
        body: CompletionRequest = Depends(body_of(CompletionRequest, service)),  # noqa: B008
    ) -> Response:
        """Continue texts or token ids; the conditions are those of `/v1/chat/completions`."""
        return await respond(CompletionAnswer, http, body)
