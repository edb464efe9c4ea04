"""Request bodies: every known parameter, strictly typed; all others are rejected.

An explicit ``null`` is the default, as OpenAI does it. Parameters that change nothing here are accepted so
that common clients work: `user`, `metadata`, `safety_identifier`, `prompt_cache_key`, `store: false`,
`service_tier: "auto" | "default"`, `modalities: ["text"]`, `best_of: 1`, and what SGLang's router
adds to every body (those of its server's parameters that have no ``null``).
"""

import json
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from eagle_kit.core.errors import cut
from eagle_kit.core.sampling_params import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_SALT_CHARS,
)

MAX_CHOICES = 128
Token = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
ItemT = TypeVar("ItemT")
Several = Annotated[list[ItemT], Field(fail_fast=True)]
"""List whose validation stops at the first wrong item, since a body can hold a million of them."""


def _read_schema(schema: Any) -> Any:
    """Read a schema that was given as the text of a JSON object; others are returned as they are."""
    if not isinstance(schema, str):
        return schema
    try:
        value = json.loads(schema, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("a JSON schema is an object, or the text of one")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


Schema = Annotated[dict[str, Any], BeforeValidator(_read_schema, json_schema_input_type=dict[str, Any] | str)]
Pattern = Annotated[str, Field(min_length=1, max_length=65536)]
Choice = Annotated[str, Field(min_length=1, max_length=1024)]
Choices = Annotated[Several[Choice], Field(min_length=1, max_length=256)]


class Strict(BaseModel):
    """No unknown keys, no conversions: ``true`` is not 1 and ``1.0`` is not a whole number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class TextPart(Strict):
    """A piece of a message's text; parts are joined by line ends."""

    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    """A call the assistant made; ``arguments`` is a JSON object as text."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str


class ToolCall(Strict):
    """One of the calls of an assistant's message."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(Strict):
    """One turn. ``reasoning`` is vLLM's name of ``reasoning_content``. The last four fields are ``null`` in
    responses that clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Author of the message. `developer` becomes `system` where the chat template knows no developers."""

    content: str | Several[TextPart] | None = None
    """Text, or text parts, which are joined by line ends. Pictures and sounds are refused."""

    name: str | None = None
    """Passed to the chat template, which may leave it out."""

    tool_calls: Several[ToolCall] | None = None
    """Calls of an earlier response; only with the role `assistant`."""

    tool_call_id: str | None = None
    """Identifier of the call that this message answers; only with the role `tool`, which needs it."""

    reasoning_content: str | None = None
    """Reasoning of an earlier response, passed to the chat template, as `thinking` where it has that name;
    the template may leave it out."""

    reasoning: str | None = None
    """vLLM's name of `reasoning_content`."""

    refusal: None = None
    """Only `null`, as responses have it."""

    audio: None = None
    """Only `null`, as responses have it."""

    function_call: None = None
    """Only `null`, as responses have it."""

    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    """Only `null` or an empty list."""

    @model_validator(mode="after")
    def _check(self) -> "Message":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a message of the {self.role} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only a message of the assistant has tool_calls")
        if (self.reasoning_content or self.reasoning) and self.role != "assistant":
            raise ValueError("only a message of the assistant has reasoning_content")
        if self.reasoning_content and self.reasoning and self.reasoning_content != self.reasoning:
            raise ValueError("reasoning_content and reasoning differ; give one of them")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id belongs to messages of a tool, and they need one")
        return self


class FunctionDefinition(Strict):
    """A function that the model may be told of; ``parameters`` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    """Name of the function."""

    description: str | None = None
    """What the function does, passed to the chat template."""

    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments. A `tool_choice` that forces a call needs a supported schema."""

    strict: bool | None = None
    """`true` is refused: with `tool_choice: "auto"` the arguments are not forced to match the schema."""

    @model_validator(mode="after")
    def _check(self) -> "FunctionDefinition":
        if self.strict:
            raise ValueError(
                "strict: true is not supported, since with tool_choice auto calls are not held to their "
                "schema; leave strict out (pydantic_function_tool sets it), or use tool_choice required"
            )
        return self


class Tool(Strict):
    """One of the tools handed to the chat template."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Strict):
    """A function by its name."""

    name: Annotated[str, Field(min_length=1, max_length=256)]


class NamedTool(Strict):
    """The tool that the response must call."""

    type: Literal["function"]
    function: FunctionName


class SchemaFormat(Strict):
    """A JSON schema with its name, in OpenAI's shape."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    """Name of the schema; it has no effect."""

    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    """The JSON schema. A keyword that is not supported is refused with 400."""

    description: str | None = None
    """It has no effect."""

    strict: bool | None = None
    """It has no effect: the schema is always enforced."""


class ResponseFormat(Strict):
    """Format of the response; a schema is always enforced, whatever `strict` says."""

    type: Literal["text", "json_object", "json_schema"]
    """`text` is no constraint, `json_object` any JSON object, `json_schema` the object of the schema."""

    json_schema: SchemaFormat | None = None
    """The schema; only with the type `json_schema`, which needs it."""

    @model_validator(mode="after")
    def _check(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, which needs it")
        return self


class Constraint(NamedTuple):
    """What a response must match: ``value`` is a schema, a regular expression, texts of which the response is
    one, or None for any JSON object."""

    kind: Literal["json_object", "json_schema", "regex", "choice"]
    value: dict[str, Any] | str | list[str] | None


class StructuredOutputs(Strict):
    """Constraint on the response by vLLM's names; exactly one of them."""

    json_schema: Annotated[Schema | None, Field(alias="json")] = None
    """JSON schema that the response matches, as an object or as the text of one."""

    regex: Pattern | None = None
    """Regular expression that the whole response matches."""

    choice: Choices | None = None
    """Texts, one of which is the whole response."""

    json_object: bool | None = None
    """`true`: the response is any JSON object."""

    @model_validator(mode="after")
    def _check(self) -> "StructuredOutputs":
        if len(self.constraints) != 1:
            raise ValueError("give exactly one of json, regex, choice and json_object: true")
        return self

    @property
    def constraints(self) -> list[Constraint]:
        """Those that were given."""
        found = [
            Constraint("json_schema", self.json_schema),
            Constraint("regex", self.regex),
            Constraint("choice", self.choice),
        ]
        given = [each for each in found if each.value is not None]
        if self.json_object:
            given.append(Constraint("json_object", None))
        return given


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = None
    """Send `usage` in the last event."""

    continuous_usage_stats: bool | None = None
    """Send `usage` in every event, as vLLM and SGLang do."""

    include_obfuscation: Literal[False] | None = None
    """Accepted as `false`; it has no effect."""


class Sampling(Strict):
    """Parameters of both completion endpoints."""

    model: str | None = None
    """Name of the served model, or the path or hub id that was served. Default: the served model."""

    stream: bool | None = None
    """Send the response as server-sent events. Default: false."""

    stream_options: StreamOptions | None = None
    """Options of a stream; only with `stream: true`."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Responses to each prompt. Response i draws with `seed` + i. Default: 1."""

    max_tokens: CountOrZero | None = None
    """Most tokens of a response; 0 computes the prompt alone. Default: 16 in completions, the rest of the
    context in chats. A number that the context has no room for is refused."""

    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Report the log-probability and the rank of every token of the prompt, and this many most likely
    tokens, as vLLM does: `[null, {"token id": {"logprob", "rank", "decoded_token"}}, ...]`. Not in a
    stream."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    """Sampling temperature; 0 is greedy decoding. Values above 2 are allowed. Default: 1."""

    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the most likely tokens whose probabilities add up to this. Default: 1."""

    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Sample from this many most likely tokens; 0 and -1 mean all of them. Default: 0."""

    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample from tokens at least this times as likely as the most likely one. Default: 0."""

    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Seed of the random numbers. In fp32 a response with a seed does not depend on its batch. Default: drawn
    by the server."""

    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from a logit for every occurrence of the token in the response. Default: 0."""

    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted once from the logits of tokens that occur in the response. Default: 0."""

    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    """Divides positive, and multiplies negative, logits of tokens of the prompt and the response. Default:
    1."""

    logit_bias: Annotated[dict[str, Bias], Field(max_length=2**15)] | None = None
    """Number added to the logit of each token id, whose key is the id as text."""

    allowed_token_ids: Annotated[Several[Token], Field(min_length=1, max_length=2**15)] | None = None
    """No other token is emitted. The response ends by itself only if an end token of the model is among
    them. It excludes all grammars."""

    bad_words: Annotated[Several[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    """Words whose token sequences are not emitted, with and without a blank before them."""

    stop: StopText | Annotated[Several[StopText], Field(max_length=16)] | None = None
    """Text, or texts, that end the response and are not a part of it. The text that is complete first ends
    the response."""

    stop_token_ids: Annotated[Several[Token], Field(max_length=256)] | None = None
    """Tokens that end the response."""

    ignore_eos: bool | None = None
    """Do not end the response at an end token of the model. Default: false."""

    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    """Requests with larger numbers are served first. Default: 0."""

    response_format: ResponseFormat | None = None
    """Format of the response; it excludes the other constraints."""

    regex: Pattern | None = None
    """Regular expression that the whole response matches; in a chat, what follows its reasoning. It excludes
    the other constraints."""

    structured_outputs: StructuredOutputs | None = None
    """vLLM's name for a constraint on the response; it excludes the other constraints."""

    guided_json: Schema | None = None
    """vLLM's older name of `structured_outputs.json`."""

    guided_regex: Pattern | None = None
    """vLLM's older name of `structured_outputs.regex`."""

    guided_choice: Choices | None = None
    """vLLM's older name of `structured_outputs.choice`."""

    speculative: bool | None = None
    """`false` decodes this request plainly, also among requests with drafts: the same as
    `speculative_depth: 0`. It does not change the response. Default: true."""

    speculative_depth: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """The greatest depth of a draft that may be accepted in a cycle. It does not change the response.
    Default: no limit."""

    return_speculation: bool | None = None
    """Add `speculation` to the response; in a stream, to its last event. Default: false."""

    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    """Text that separates caches: pages, n-grams and compiled grammars are shared only among requests with
    the same salt."""

    user: str | None = None
    """Accepted; it has no effect."""

    metadata: Annotated[dict[str, str], Field(max_length=64)] | None = None
    """Accepted; it has no effect."""

    safety_identifier: str | None = None
    """Accepted; it has no effect."""

    prompt_cache_key: str | None = None
    """Accepted; it has no effect."""

    store: Literal[False] | None = None
    """Accepted as `false`; it has no effect."""

    service_tier: Literal["auto", "default"] | None = None
    """Accepted as `auto` or `default`; it has no effect."""

    include_stop_str_in_output: bool | None = None
    """The text has the stop text, or the token, that ended the response. Default: false."""

    no_stop_trim: bool | None = None
    """SGLang's name of `include_stop_str_in_output`."""

    min_tokens: CountOrZero | None = None
    """Tokens of a response before an end token, with `ignore_eos` too, or one of `stop_token_ids`; until then
    no stop text ends it. A grammar that allows nothing else ends the response before. Default: 0."""

    return_token_ids: bool | None = None
    """Add the ids of the tokens as vLLM does: `token_ids` to choices, and `prompt_token_ids` to the choices
    of completions and to the response of a chat; in a stream to its first event. Default: false."""

    skip_special_tokens: bool | None = None
    """`false` shows special tokens in the text, except the token that ended the response. Default: true."""

    return_hidden_states: Literal[False] | None = None
    """Accepted as `false`, as SGLang's router sends it; it has no effect."""

    @model_validator(mode="after")
    def _check_sampling(self) -> "Sampling":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options belong to a stream; set stream to true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs are not in a stream; set stream to false")
        if self.speculative is False and self.speculative_depth:
            raise ValueError("speculative: false excludes a speculative_depth above 0; give one of them")
        if len(self.constraints) > 1:
            raise ValueError(
                "regex, response_format, structured_outputs and guided_* exclude each other; give one of them"
            )
        if self.has_grammar and self.allowed_token_ids is not None:
            raise ValueError("allowed_token_ids excludes response_format, regex and their other names")
        return self

    @property
    def includes_stop(self) -> bool:
        """True if the text has what ended the response."""
        return bool(self.include_stop_str_in_output or self.no_stop_trim)

    @property
    def num_choices(self) -> int:
        """Responses per prompt."""
        return self.n or 1

    @property
    def shows_special_tokens(self) -> bool:
        """True if special tokens are part of the text."""
        return self.skip_special_tokens is False

    @property
    def has_grammar(self) -> bool:
        """True if responses must match something."""
        return bool(self.constraints)

    @property
    def constraints(self) -> list[Constraint]:
        """What responses must match, by whatever name it was given; at most one."""
        found = [
            Constraint("regex", self.regex),
            Constraint("json_schema", self.guided_json),
            Constraint("regex", self.guided_regex),
            Constraint("choice", self.guided_choice),
        ]
        given = [each for each in found if each.value is not None]
        if self.structured_outputs is not None:
            given += self.structured_outputs.constraints
        wanted = self.response_format
        if wanted is not None and wanted.json_schema is not None:
            given.append(Constraint("json_schema", wanted.json_schema.json_schema))
        elif wanted is not None and wanted.type == "json_object":
            given.append(Constraint("json_object", None))
        return given


class ChatMessages(Strict):
    """What the chat template is given; ``chat_template_kwargs`` are arguments that it reads, such as
    ``enable_thinking``."""

    messages: Annotated[Several[Message], Field(min_length=1, max_length=4096)]
    """The conversation."""

    tools: Annotated[Several[Tool], Field(max_length=512)] | None = None
    """Tools that the response may call. An empty list is none. A chat template without a place for tools
    refuses them."""

    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """Arguments of the chat template, such as `{"enable_thinking": false}`. Names that the template does
    not read are refused."""


class ChatRequest(ChatMessages, Sampling):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: CountOrZero | None = None
    """The same as `max_tokens`; both may be given if they are equal."""

    logprobs: bool | None = None
    """Report the log-probability of every token. Default: false."""

    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Most likely tokens to report beside each token; only with `logprobs: true`. Default: 0."""

    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """`none`: calls are not parsed. `auto`, the default with tools: the model decides. `required`, or a
    function: a grammar forces the call, and no other constraint may be given."""

    parallel_tool_calls: bool | None = None
    """`false`: a response has its first call only. Default: true."""

    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    """Accepted as `["text"]`; it has no effect."""

    add_generation_prompt: bool | None = None
    """`false` renders the messages without the beginning of a response. Default: true, or false with
    `continue_final_message`."""

    continue_final_message: bool | None = None
    """The response continues the last message, which is the assistant's. It has the new text only. Default:
    false."""

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Handed to a chat template that reads it. In one that reads `enable_thinking` or `thinking`, `none`
    switches that off, and any other effort on. Other templates refuse it."""

    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    """Most tokens of the reasoning, after which its end is forced; -1 is no limit. Only for models that write
    it between `<think>` and `</think>`, and only where the prompt has not closed it."""

    echo: Literal[False] | None = None
    """Accepted as `false`; it has no effect."""

    separate_reasoning: Literal[True] | None = None
    """Accepted as `true`, as SGLang's router sends it; it has no effect."""

    stream_reasoning: Literal[True] | None = None
    """Accepted as `true`, as SGLang's router sends it; it has no effect."""

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatRequest":
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message needs a last message of the assistant")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        choice = self.tool_choice
        named = self.chosen_function
        allowed = (None, "none") if self.tools is None else (None, "none", "auto")
        if not self.tools and choice not in allowed:
            raise ValueError(f"tool_choice {choice if named is None else cut(named)} needs tools")
        names = [tool.function.name for tool in self.tools or ()]
        if named is not None and named not in names:
            raise ValueError(f"tool_choice names {cut(named)}, which is none of the tools")
        if named is not None and names.count(named) > 1:
            raise ValueError(f"tool_choice names {cut(named)}, which is the name of several tools")
        if self.must_call and self.has_grammar:
            raise ValueError("tool_choice excludes response_format and regex, unless it is none or auto")
        if self.must_call and self.allowed_token_ids is not None:
            raise ValueError("tool_choice excludes allowed_token_ids, unless it is none or auto")
        return self

    @property
    def chosen_function(self) -> str | None:
        """Name of the function that the response must call, where the request names one."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def must_call(self) -> bool:
        """True if the response must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)


class CompletionRequest(Sampling):
    """`POST /v1/completions`: a text, several, or their token ids."""

    # From left to right each kind is given up at its first wrong item, and what was right is not read twice.
    prompt: Annotated[
        str
        | Annotated[Several[Token], Field(min_length=1, max_length=2**20)]
        | Annotated[Several[str], Field(min_length=1, max_length=4096)]
        | Annotated[
            Several[Annotated[Several[Token], Field(min_length=1)]], Field(min_length=1, max_length=4096)
        ],
        Field(union_mode="left_to_right"),
    ]
    """Text, texts, the token ids of a prompt, or lists of token ids. The response continues the prompt."""

    echo: bool | None = None
    """Repeat the prompt before the response, its log-probabilities before those of the response; the first
    token has null. Special tokens of token ids are repeated only with `skip_special_tokens: false`. Default:
    false."""

    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Report the log-probability of every token, and of this many most likely tokens."""

    best_of: Literal[1] | None = None
    """Accepted as 1; it has no effect."""

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt  # type: ignore[list-item, return-value]


class TokenizeRequest(Strict):
    """`POST /tokenize`: a text as it is, or messages through the chat template."""

    model: str | None = None
    """Name of the served model. Default: the served model."""

    prompt: str | None = None
    """Text; either this or `messages`."""

    messages: Annotated[Several[Message], Field(min_length=1, max_length=4096)] | None = None
    """Conversation for the chat template; either this or `prompt`."""

    tools: Annotated[Several[Tool], Field(max_length=512)] | None = None
    """Tools for the chat template; only with `messages`."""

    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """Arguments of the chat template; only with `messages`."""

    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens; only with `prompt`. Default: true."""

    add_generation_prompt: Literal[True] | None = None
    """Accepted as `true` with `messages`; the generation prompt is always added."""

    @model_validator(mode="after")
    def _check(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is not None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens belongs to a prompt; the chat template has its own")
        if self.messages is None and self.add_generation_prompt is not None:
            raise ValueError("add_generation_prompt belongs to messages; a prompt is continued as it stands")
        if self.messages is None and (self.tools is not None or self.chat_template_kwargs is not None):
            raise ValueError("tools and chat_template_kwargs belong to messages")
        return self

    @property
    def chat(self) -> ChatMessages | None:
        """The messages and what else the chat template is given."""
        if self.messages is None:
            return None
        return ChatMessages.model_construct(
            messages=self.messages, tools=self.tools, chat_template_kwargs=self.chat_template_kwargs
        )


class DetokenizeRequest(Strict):
    """`POST /detokenize`."""

    model: str | None = None
    """Name of the served model. Default: the served model."""

    tokens: Annotated[Several[Token], Field(max_length=2**20)]
    """Token ids."""

    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text. Default: false."""


class AbortRequest(Strict):
    """`POST /abort`: the `X-Request-Id` (or response id) of a request, or all of them."""

    request_id: Annotated[str, Field(min_length=1, max_length=160)] | None = None
    """The `X-Request-Id` of a request, or the id of its response. An id that a client chose is found only for
    requests from that client's address."""

    abort_all: bool | None = None
    """`true`: end all responses to the caller's address."""

    @model_validator(mode="after")
    def _check(self) -> "AbortRequest":
        if (self.request_id is None) == (not self.abort_all):
            raise ValueError("give either request_id or abort_all: true")
        return self


class ProfileRequest(Strict):
    """`POST /start_profile`: what the profile records; without a body it is the default of every field."""

    num_steps: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Steps of the engine, after which the profile ends by itself. Default: 100."""

    activities: Annotated[list[Literal["CPU", "GPU"]], Field(min_length=1, max_length=8)] | None = None
    """`CPU`: operations of the engine's thread, and ranges. `GPU`: kernels and copies. Default: those of the
    engine's device."""

    with_stack: bool | None = None
    """Record Python's stack of every operation, which makes traces several times as large. Default: false."""

    record_shapes: bool | None = None
    """Record the shapes of every operation's inputs. Default: false."""

    output_dir: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Folder of the files: the server's `--profile-dir`, or one in it. Default: the former."""

    profile_by_stage: Literal[False] | None = None
    """Accepted as `false`, as SGLang's clients send it; it has no effect."""

    merge_profiles: Literal[False] | None = None
    """Accepted as `false`, as SGLang's clients send it; it has no effect."""

    model: str | None = None
    """Accepted, as vLLM's load generator sends it; it has no effect."""

    prompt: Any = None
    """Accepted, as vLLM's load generator sends it; it has no effect."""

    messages: Any = None
    """Accepted, as vLLM's load generator sends it; it has no effect."""

    temperature: float | None = None
    """Accepted, as vLLM's load generator sends it; it has no effect."""

    repetition_penalty: float | None = None
    """Accepted, as vLLM's load generator sends it; it has no effect."""

    max_tokens: Count | None = None
    """Accepted, as vLLM's load generator sends it; it has no effect."""

    max_completion_tokens: Count | None = None
    """Accepted, as vLLM's load generator sends it; it has no effect."""

    logprobs: Any = None
    """Accepted, as vLLM's load generator sends it; it has no effect."""

    ignore_eos: bool | None = None
    """Accepted, as vLLM's load generator sends it; it has no effect."""

    stream: bool | None = None
    """Accepted, as vLLM's load generator sends it; it has no effect."""

    stream_options: Any = None
    """Accepted, as vLLM's load generator sends it; it has no effect."""
