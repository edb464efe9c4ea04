"""What the server sends: OpenAI's shapes, and ``speculation`` as an extension of ours."""

from typing import Any, Literal

from pydantic import BaseModel, model_serializer

from eagle_kit.core.stats import SpecStats


class CachedTokens(BaseModel):
    """How many of the prompt's tokens the prefix cache held."""

    cached_tokens: int = 0


class Usage(BaseModel):
    """Tokens of prompt and reply; a prompt with several choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Speculation(BaseModel):
    """Acceptance of this response: ``histogram[k]`` verifies emitted k tokens, the bonus token included."""

    accept_length: float
    num_verifies: int
    num_accepted_tokens: int
    histogram: list[int]
    num_accepted_at: list[int]

    @classmethod
    def of(cls, stats: SpecStats) -> "Speculation":
        """From an engine's counts."""
        return cls(
            accept_length=round(stats.accept_length, 4),
            num_verifies=stats.num_verifies,
            num_accepted_tokens=sum(stats.num_accepted_at),
            histogram=stats.histogram,
            num_accepted_at=stats.num_accepted_at,
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


class ChatMessage(BaseModel):
    """The reply; tool calls of the model stay in its content."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One of `n` replies."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class ChatDelta(BaseModel):
    """What a chunk adds; what it lacks is left out, as OpenAI does it."""

    role: Literal["assistant"] | None = None
    content: str | None = None

    @model_serializer
    def _only_given(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in (("role", self.role), ("content", self.content))
            if value is not None
        }


class ChatChunkChoice(BaseModel):
    """What a chunk adds to one reply."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class CompletionChoice(BaseModel):
    """One of `n` texts of one of the prompts, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Response(BaseModel):
    """What all responses begin with."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ChatResponse(Response):
    """`POST /v1/chat/completions`; `speculation` when asked for."""

    choices: list[ChatChoice]
    usage: Usage
    speculation: Speculation | None = None


class CompletionResponse(Response):
    """`POST /v1/completions`; `speculation` when asked for."""

    choices: list[CompletionChoice]
    usage: Usage
    speculation: Speculation | None = None


class ChatChunk(Response):
    """One event of a chat stream; the last one may have usage and speculation instead of choices."""

    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    speculation: Speculation | None = None


class CompletionChunk(Response):
    """One event of a completion stream; the last one may have usage and speculation instead of choices."""

    choices: list[CompletionChoice]
    usage: Usage | None = None
    speculation: Speculation | None = None


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "eagle_kit"
    max_model_len: int


class ModelList(BaseModel):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]


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
    """`GET /health` and `/health_generate`."""

    status: Literal["ok", "draining", "unhealthy", "busy"]


class ErrorDetail(BaseModel):
    """What went wrong, and in which parameter."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every response of 400 and above."""

    error: ErrorDetail
