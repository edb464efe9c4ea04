"""Response bodies: OpenAI's shapes, and ``speculation`` as an extension of ours."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from eagle_kit.core.shape import SpecShape
from eagle_kit.core.stats import SpecStats


class ResponseBody(BaseModel):
    """Body of a response, or a part of one. The text under a field is its description."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describe the fields also of a body that leaves some out when it is written."""
        return handler({key: value for key, value in core_schema.items() if key != "serialization"})  # type: ignore[arg-type]


class OptionalFields(ResponseBody):
    """A body some of whose fields are left out where they are None."""

    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    """Names of these fields."""

    @model_serializer(mode="wrap")
    def _only_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {name: each for name, each in fields.items() if each is not None or name not in self.OPTIONAL}


class CachedTokens(ResponseBody):
    """Tokens of the prompt that the prefix cache held."""

    cached_tokens: int = 0
    """Number of tokens, those of other clients' prompts included."""


class CompletionDetails(ResponseBody):
    """Tokens of the responses by their origin. Drafts have OpenAI's names for predictions."""

    reasoning_tokens: int = 0
    """Tokens before the end of the reasoning, in chats of models whose form of it is known."""

    accepted_prediction_tokens: int = 0
    """Tokens that a draft had proposed."""

    rejected_prediction_tokens: int = 0
    """Other draft tokens of the windows. They are not among `completion_tokens`."""


class Usage(ResponseBody):
    """Tokens of prompt and response; a prompt with several choices counts once."""

    prompt_tokens: int
    """Tokens of the prompts."""

    completion_tokens: int
    """Tokens of all choices."""

    total_tokens: int
    """Both."""

    prompt_tokens_details: CachedTokens
    """How many tokens of the prompts were cached."""

    completion_tokens_details: CompletionDetails
    """How many tokens are reasoning, and how many were drafted."""


class Speculation(ResponseBody):
    """Acceptance of the drafts of this response."""

    accept_length: float
    """Tokens per verify, the bonus token included."""

    num_verifies: int
    """Cycles in which a draft was verified."""

    num_accepted_tokens: int
    """Accepted draft tokens, bonus tokens excluded."""

    histogram: list[int]
    """`histogram[k]`: verifies that emitted k tokens, the bonus token included."""

    num_accepted_at: list[int]
    """`num_accepted_at[d]`: verifies that accepted the draft token at depth d + 1."""

    shapes: dict[str, int]
    """Cycles by speculation shape; `none` counts plain cycles, which are not verifies."""

    reasons: list[str]
    """Expected gain of the chosen shapes by batch size; empty if `--shape` was given."""

    num_drafts: int
    """`num_verifies` under vLLM's name."""

    num_draft_tokens: int
    """Draft tokens of the windows that were verified, under vLLM's name."""

    num_accepted_tokens_per_pos: list[int]
    """`num_accepted_at` under vLLM's name."""

    spec_verify_ct: int
    """`num_verifies` under SGLang's name."""

    spec_accept_length: float
    """`accept_length` under SGLang's name."""

    spec_accept_rate: float
    """Share of the draft tokens that were accepted, under SGLang's name."""

    spec_accept_token_num: int
    """`num_accepted_tokens` under SGLang's name."""

    spec_draft_token_num: int
    """`num_draft_tokens` under SGLang's name."""

    spec_accept_histogram: list[int]
    """Verifies by the number of their draft tokens in the response, from 0, under SGLang's name."""

    @classmethod
    def of(
        cls,
        stats: SpecStats,
        num_draft_tokens: int,
        shapes: Mapping[SpecShape, int],
        reasons: list[str],
    ) -> "Speculation":
        """Convert an engine's counts."""
        num_accepted = sum(stats.num_accepted_at)
        return cls(
            num_drafts=stats.num_verifies,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens_per_pos=stats.num_accepted_at,
            spec_verify_ct=stats.num_verifies,
            spec_accept_length=round(stats.accept_length, 4),
            spec_accept_rate=round(num_accepted / max(num_draft_tokens, 1), 4),
            spec_accept_token_num=num_accepted,
            spec_draft_token_num=num_draft_tokens,
            spec_accept_histogram=_verifies_by_accepted(stats),
            accept_length=round(stats.accept_length, 4),
            num_verifies=stats.num_verifies,
            num_accepted_tokens=sum(stats.num_accepted_at),
            histogram=stats.histogram,
            num_accepted_at=stats.num_accepted_at,
            shapes={str(shape): count for shape, count in sorted(shapes.items())},
            reasons=reasons,
        )


def _verifies_by_accepted(stats: SpecStats) -> list[int]:
    """Verifies by the number of their accepted drafts, from 0."""
    at_least = [stats.num_verifies, *stats.num_accepted_at, 0]
    return [more - fewer for more, fewer in pairwise(at_least)]


class TopLogprob(ResponseBody):
    """A token, its log-probability, and its bytes as numbers."""

    token: str
    """Text of the token behind other tokens, with its leading blank."""

    logprob: float
    """Natural logarithm of the probability before temperature, penalties and biases; at least -9999."""

    bytes: list[int]
    """Bytes of the token, also if they are a part of a character."""


class ChatLogprob(TopLogprob):
    """The token that was chosen, with the most likely ones, best first."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseBody):
    """One entry per token of the content."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(ResponseBody):
    """Parallel lists, one entry per token; offsets count characters of the text."""

    tokens: list[str]
    """Texts of the tokens. A part of a character, or a byte token whose character has a token of its own, is
    written as `bytes:\\xe2`."""

    token_logprobs: list[float | None]
    """Natural logarithms of the probabilities before temperature, penalties and biases; at least -9999. Null
    for the first token of a repeated prompt."""

    top_logprobs: list[dict[str, float] | None]
    """Most likely tokens. Of two tokens with the same text the second is written as `token_id:123`. Null for
    the first token of a repeated prompt."""

    text_offset: list[int]
    """Number of characters before the token; of the later bytes of a character, before the character."""


class PromptLogprob(ResponseBody):
    """Log-probability of a token at a place of the prompt, in vLLM's shape."""

    logprob: float
    """Natural logarithm of the probability; at least -9999."""

    rank: int
    """How many tokens are at least as likely; 1 is the most likely."""

    decoded_token: str
    """Text of the token behind other tokens, with its leading blank."""


class GeneratedFunctionCall(ResponseBody):
    """Function that is called; ``arguments`` is a JSON object as text."""

    name: str
    arguments: str


class GeneratedToolCall(ResponseBody):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: GeneratedFunctionCall


class ToolCallDelta(GeneratedToolCall):
    """A call of a tool in a stream, whole, with its number in the message."""

    index: int


class ChatMessage(OptionalFields):
    """The response. ``reasoning_content`` and ``tool_calls`` are there where there are any; ``content`` is
    null where there are calls alone."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[GeneratedToolCall] | None = None

    OPTIONAL = ("reasoning_content", "tool_calls")


class ChatChoice(OptionalFields):
    """One of `n` responses."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    """`stop`, `length`, `tool_calls`, or `abort`: the server was stopped, `/abort` was called, or a
    constraint left no token that could follow."""

    token_ids: list[int] | None = None
    """Tokens of the response, or of this event; there with `return_token_ids`."""

    OPTIONAL = ("token_ids",)


class ChatDelta(OptionalFields):
    """Addition of a chunk; absent fields are left out, as OpenAI does it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None

    OPTIONAL = ("role", "content", "reasoning_content", "tool_calls")


class ChatChunkChoice(OptionalFields):
    """Addition of a chunk to one response."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None

    token_ids: list[int] | None = None
    """Tokens of the response, or of this event; there with `return_token_ids`."""

    OPTIONAL = ("token_ids",)


class CompletionChoice(OptionalFields):
    """One of `n` texts of one of the prompts, or an addition to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None

    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    """Log-probabilities of the prompt by token id, null for its first token; there when they are asked
    for."""

    prompt_token_ids: list[int] | None = None
    """Tokens of the prompt; there with `return_token_ids`, in a stream in the first event."""

    token_ids: list[int] | None = None
    """Tokens of the response, or of this event; there with `return_token_ids`."""

    OPTIONAL = ("prompt_logprobs", "prompt_token_ids", "token_ids")


class Response(ResponseBody):
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


class ChatResponse(OptionalFields, Response):
    """`POST /v1/chat/completions`."""

    choices: list[ChatChoice]

    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    """Log-probabilities of the prompt by token id, null for its first token; there when they are asked
    for."""

    prompt_token_ids: list[int] | None = None
    """Tokens of the prompt; there with `return_token_ids`, in a stream in the first event."""

    OPTIONAL = ("prompt_logprobs", "prompt_token_ids")


class CompletionResponse(Response):
    """`POST /v1/completions`."""

    choices: list[CompletionChoice]


class ChatChunk(OptionalFields, Response):
    """Event of a chat stream."""

    choices: list[ChatChunkChoice]

    prompt_token_ids: list[int] | None = None
    """Tokens of the prompt; there with `return_token_ids`, in a stream in the first event."""

    OPTIONAL = ("prompt_token_ids",)


class CompletionChunk(CompletionResponse):
    """Event of a completion stream."""


class ModelCard(ResponseBody):
    """Model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "eagle_kit"
    max_model_len: int


class ModelList(ResponseBody):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(ResponseBody):
    """`POST /tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int


class Text(ResponseBody):
    """`POST /detokenize`."""

    prompt: str


class Aborted(ResponseBody):
    """`POST /abort`: responses that were still running or waiting."""

    num_aborted: int


class ProfileReport(ResponseBody):
    """`POST /start_profile` and `/stop_profile`."""

    status: Literal["running", "written"]
    """`running`: the profile has begun. `written`: the file of rank 0 is there."""

    num_steps: int
    """Steps that are to be recorded, or that were."""

    files: list[str]
    """Files in the server's `--profile-dir`, one of each rank."""


class HealthReport(ResponseBody):
    """`GET /health`, its parts, and `/health_generate`."""

    status: Literal["ok", "draining", "unhealthy", "busy"]


class ErrorDetail(ResponseBody):
    """Error, and the parameter that it is about."""

    message: str
    """Cause and remedy."""

    type: str
    """Kind of error, in OpenAI's words."""

    param: str | None
    """Field of the request that is wrong; null if none is."""

    code: str | None
    """Short name of the error; null if it has none."""


class ErrorResponse(ResponseBody):
    """Body of every response of 400 and above."""

    error: ErrorDetail
