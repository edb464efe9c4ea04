"""Response bodies: OpenAI's shapes, and ``speculation`` as an extension of ours."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

from eagle_kit.core.shape import SpecShape
from eagle_kit.core.stats import SpecStats


class CachedTokens(BaseModel):
    """Tokens of the prompt that the prefix cache held."""

    cached_tokens: int = 0


class Usage(BaseModel):
    """Tokens of prompt and reply; a prompt with several choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Speculation(BaseModel):
    """Acceptance of this response: ``histogram[k]`` verifies emitted k tokens, the bonus token included;
    ``shapes``: cycles in each shape; ``reasons``: what is expected of the shapes that are chosen by
    measurements, by batch size, and where the measurements come from."""

    accept_length: float
    num_verifies: int
    num_accepted_tokens: int
    histogram: list[int]
    num_accepted_at: list[int]
    shapes: dict[str, int]
    reasons: list[str]

    @classmethod
    def of(cls, stats: SpecStats, shapes: Mapping[SpecShape, int], reasons: list[str]) -> "Speculation":
        """Convert an engine's counts."""
        return cls(
            accept_length=round(stats.accept_length, 4),
            num_verifies=stats.num_verifies,
            num_accepted_tokens=sum(stats.num_accepted_at),
            histogram=stats.histogram,
            num_accepted_at=stats.num_accepted_at,
            shapes={str(shape): count for shape, count in sorted(shapes.items())},
            reasons=reasons,
        )


class TopLogprob(BaseModel):
    """A token, its log-probability, and its bytes as numbers."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """The token that was chosen, with the most likely ones, best first."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One entry per token of the content."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Parallel lists, one entry per token; offsets count characters of the text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class FunctionCall(BaseModel):
    """Function that is called; ``arguments`` is a JSON object as text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ToolCallDelta(ToolCall):
    """A call of a tool in a stream, whole, with its number in the message."""

    index: int


class ChatMessage(BaseModel):
    """The reply. ``reasoning_content`` and ``tool_calls`` are there where there are any; ``content`` is null
    where there are calls alone."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None

    @model_serializer(mode="wrap")
    def _only_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        absent = {name for name in ("reasoning_content", "tool_calls") if getattr(self, name) is None}
        return {name: value for name, value in handler(self).items() if name not in absent}


class ChatChoice(BaseModel):
    """One of `n` replies."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class ChatDelta(BaseModel):
    """Addition of a chunk; absent fields are left out, as OpenAI does it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None

    @model_serializer(mode="wrap")
    def _only_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}


class ChatChunkChoice(BaseModel):
    """Addition of a chunk to one reply."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class CompletionChoice(BaseModel):
    """One of `n` texts of one of the prompts, or an addition to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Response(BaseModel):
    """Common fields of responses and of their events. ``speculation`` is sent when asked for; the last event
    may have it and the usage instead of choices."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    usage: Usage | None = None
    speculation: Speculation | None = None


class ChatResponse(Response):
    """`POST /v1/chat/completions`."""

    choices: list[ChatChoice]


class CompletionResponse(Response):
    """`POST /v1/completions`."""

    choices: list[CompletionChoice]


class ChatChunk(Response):
    """Event of a chat stream."""

    choices: list[ChatChunkChoice]


class CompletionChunk(CompletionResponse):
    """Event of a completion stream."""


class ModelCard(BaseModel):
    """Model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "eagle_kit"
    max_model_len: int


class ModelList(BaseModel):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(BaseModel):
    """`POST /tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int


class Text(BaseModel):
    """`POST /detokenize`."""

    prompt: str


class Aborted(BaseModel):
    """`POST /abort`: replies that were still running or waiting."""

    num_aborted: int


class HealthReport(BaseModel):
    """`GET /health`, its parts, and `/health_generate`."""

    status: Literal["ok", "draining", "unhealthy", "busy"]


class ErrorDetail(BaseModel):
    """Error, and the parameter that it is about."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Body of every response of 400 and above."""

    error: ErrorDetail
