"""The form in which a target writes its responses: by name, or found in renderings of its chat template."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from eagle_kit.core.errors import UserError
from eagle_kit.core.structured_outputs import Thought
from eagle_kit.data.chat.messages import ChatPrompt, Message, Tool, Unusable
from eagle_kit.data.chat.renderer import ChatRenderer
from eagle_kit.data.chat.response.calls import DEEPSEEK, HERMES, LLAMA3, MISTRAL, CallForm
from eagle_kit.data.chat.response.checkpoint import CheckpointReader
from eagle_kit.data.chat.response.harmony import (
    CHANNEL,
    MARKERS,
    MESSAGE,
    HarmonyReader,
    begun_message,
    begun_part,
)
from eagle_kit.data.chat.response.parts import Call, ResponseReader, read_response
from eagle_kit.data.chat.response.tags import (
    END_THINK,
    THINK,
    ConstrainedReader,
    TagReader,
    closes_thought,
    opens_thought,
)

CHECKPOINT = "checkpoint"
HARMONY = "harmony"
TAGS = "think"
DEEPSEEK_R1 = "deepseek_r1"
"""Form ``think`` whose responses begin with a thought, with or without its opening tag, unless the prompt has
closed it."""
REASONING_PARSERS: dict[str, str] = {
    **dict.fromkeys((TAGS, "deepseek_v3", "deepseek-v3", "qwen3"), TAGS),
    **dict.fromkeys((DEEPSEEK_R1, "deepseek-r1"), DEEPSEEK_R1),
    **dict.fromkeys((HARMONY, "openai_gptoss", "gpt-oss"), HARMONY),
}
"""Forms of reasoning by their names here, in vLLM and in SGLang."""
TOOL_CALL_PARSERS: dict[str, CallForm | str] = {
    **dict.fromkeys(("hermes", "qwen", "qwen25", "qwen3_coder", "qwen3_xml"), HERMES),
    **dict.fromkeys(("deepseek", "deepseek_v3", "deepseekv3", "deepseek_v31", "deepseekv31"), DEEPSEEK),
    "mistral": MISTRAL,
    **dict.fromkeys(("llama3", "llama3_json"), LLAMA3),
    **dict.fromkeys((HARMONY, "openai", "gpt-oss"), HARMONY),
}
"""Forms of calls by their names here, in vLLM and in SGLang."""
TAIL = 64
"""Last tokens of a prompt among which the beginning of a response is searched."""
THOUGHT = "eaglekitthought"
QUESTION = {"role": "user", "content": "eaglekitquestion"}
TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "eaglekitprobe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
CALL = Call("eaglekitprobe", {"x": "y"})


class ConstrainedResponse(NamedTuple):
    """Reading of a response whose answer must match a grammar.

    Attributes:
        thought: bounds of its reasoning; None if the grammar holds from the first token.
        make_reader: makes a reader of reasoning and content; None if the whole response is content.
        shown_tokens: special tokens that the text for the reader must have.
    """

    thought: Thought | None = None
    make_reader: Callable[[], ResponseReader] | None = None
    shown_tokens: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ResponseForms:
    """Forms of the reasoning and the calls in responses of a target.

    Attributes:
        renderer: of the prompts; its tokenizer is the target's.
        reasoning: form of thoughts; None leaves them in the content.
        calls: form of calls; None leaves them in the content.
    """

    renderer: ChatRenderer
    reasoning: str | None = None
    calls: CallForm | str | None = None

    def reader(self, prompt_ids: Sequence[int], tools: Sequence[Tool] = ()) -> ResponseReader | None:
        """Make a reader of one response; None if the whole response is content.

        Args:
            prompt_ids: the prompt, which may have begun the response.
            tools: tools of the request; without any, calls are not read.
        """
        calls = self.calls if tools else None
        if self.reasoning is None and calls is None:
            return None
        tokenizer = self.renderer.tokenizer
        if CHECKPOINT in (self.reasoning, calls):
            prompt = tokenizer.decode(list(prompt_ids), skip_special_tokens=False)
            return CheckpointReader(
                tokenizer,
                prompt,
                tools=tools,
                has_thoughts=self.reasoning is not None,
                has_calls=calls is not None,
            )
        tail = tokenizer.decode(list(prompt_ids[-TAIL:]), skip_special_tokens=False)
        return _reader(self.reasoning, calls, tail, tools)

    def constrained(self, prompt_ids: Sequence[int]) -> ConstrainedResponse:
        """Choose the reading of a response to a prompt whose answer must match a grammar. Grammars have no
        markers of calls.

        There is no reasoning if the prompt has closed it, or if its markers are no tokens of their own.
        """
        form = self.reasoning
        if form == CHECKPOINT:
            form = _probe_thoughts(self.renderer)
        if form is None:
            return ConstrainedResponse()
        tail = self.renderer.tokenizer.decode(list(prompt_ids[-TAIL:]), skip_special_tokens=False)
        thought = self._thought(form, tail)
        if thought is None:
            return ConstrainedResponse()
        make_reader: Callable[[], ResponseReader] = partial(
            ConstrainedReader, is_opened=thought.opener is None
        )
        if form == HARMONY:
            make_reader = partial(_reader, form, None, tail, ())
        return ConstrainedResponse(
            thought, make_reader, ResponseForms(self.renderer, form).shown_tokens(False)
        )

    def _thought(self, form: str, prompt: str) -> Thought | None:
        """Bounds of the reasoning in a response to ``prompt``; None if there is none."""
        if form == HARMONY:
            if begun_part(prompt) == "content":
                return None
            final = self._tokens(f"{CHANNEL}final{MESSAGE}")
            return Thought(final, others=self._tokens("analysis")[:1])
        begin = self._tokens(THINK)
        end = self._tokens(END_THINK)
        if closes_thought(prompt) or len(begin) != 1 or len(end) != 1:
            return None
        is_opened = opens_thought(prompt) or form == DEEPSEEK_R1
        return Thought(end, None if is_opened else begin[0])

    def _tokens(self, text: str) -> tuple[int, ...]:
        """Tokens of a text."""
        return tuple(self.renderer.tokenizer(text, add_special_tokens=False)["input_ids"])

    def shown_tokens(self, has_tools: bool) -> frozenset[int]:
        """Special tokens that the text of responses must have for a reader, with tools or without."""
        calls = self.calls if has_tools else None
        added = self.renderer.tokenizer.added_tokens_decoder
        special = {token: about.content for token, about in added.items() if about.special}
        if CHECKPOINT in (self.reasoning, calls):
            return frozenset(special)

        markers: set[str] = set()
        if self.reasoning in (TAGS, DEEPSEEK_R1):
            markers.update((THINK, END_THINK))
        if isinstance(calls, CallForm):
            markers.update(calls.markers)
        if HARMONY in (self.reasoning, calls):
            markers.update(MARKERS)
        return frozenset(token for token, text in special.items() if text in markers)

    def __str__(self) -> str:
        """Names of the two forms."""
        calls = self.calls
        for name, form in TOOL_CALL_PARSERS.items():
            if form is self.calls:
                calls = name
                break
        return f"reasoning {self.reasoning or 'none'}, tool calls {calls or 'none'}"


def _reader(
    reasoning: str | None,
    calls: CallForm | str | None,
    prompt: str,
    tools: Sequence[Tool],
) -> ResponseReader:
    """Make a reader of a response to ``prompt`` in two forms, of which none is the checkpoint's."""
    if HARMONY in (reasoning, calls):
        return HarmonyReader(
            has_thoughts=reasoning == HARMONY,
            has_calls=calls == HARMONY,
            begun=begun_message(prompt),
        )
    return TagReader(
        has_thoughts=reasoning in (TAGS, DEEPSEEK_R1),
        form=calls if isinstance(calls, CallForm) else None,
        tools=tools,
        is_opened=opens_thought(prompt) or (reasoning == DEEPSEEK_R1 and not closes_thought(prompt)),
    )


def choose_forms(renderer: ChatRenderer, reasoning: str = "auto", calls: str = "auto") -> ResponseForms:
    """Choose the forms of a target's responses.

    Args:
        renderer: of the prompts of the target.
        reasoning: ``auto``, ``none`` or one of ``REASONING_PARSERS``.
        calls: ``auto``, ``none`` or one of ``TOOL_CALL_PARSERS``. ``auto`` is the checkpoint's own response
            template, or else the first form that reads a response back from a rendering of the chat template.

    Raises:
        UserError: an unknown name, or harmony for one of them and another form for the other.
    """
    check_names(reasoning, calls)
    has_own = "auto" in (reasoning, calls) and _has_response_template(renderer.tokenizer)
    thought_form: str | None = REASONING_PARSERS.get(reasoning)
    call_form: CallForm | str | None = TOOL_CALL_PARSERS.get(calls)
    if reasoning == "auto":
        thought_form = CHECKPOINT if has_own else _probe_thoughts(renderer)
    if calls == "auto":
        call_form = CHECKPOINT if has_own else _probe_calls(renderer)
    for whole in (HARMONY, CHECKPOINT):
        if whole in (thought_form, call_form) and {thought_form, call_form} - {whole, None}:
            raise UserError(
                f"The form {whole} has both reasoning and tool calls, and another one was given beside it.",
                "Give the same for --reasoning-parser and --tool-call-parser, or none.",
            )
    return ResponseForms(renderer, thought_form, call_form)


def check_names(reasoning: str, calls: str) -> None:
    """Raise UserError for a name that is not that of a form."""
    for flag, name, known in (
        ("--reasoning-parser", reasoning, REASONING_PARSERS),
        ("--tool-call-parser", calls, TOOL_CALL_PARSERS),
    ):
        if name not in ("auto", "none", *known):
            raise UserError(f"{flag} is {name!r}.", f"Use auto, none or one of {', '.join(known)}.")


def _has_response_template(tokenizer: Any) -> bool:
    """True if the tokenizer has a response template. Raises UserError if it cannot be read."""
    if getattr(tokenizer, "response_template", None) is None:
        return False
    try:
        tokenizer.get_response_parser(prefix="")
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"The tokenizer's response_template cannot be read ({error}).",
            "Correct it, or give --reasoning-parser and --tool-call-parser.",
        ) from None
    return True


def _probe_thoughts(renderer: ChatRenderer) -> str | None:
    """The form that reads back the thought of a response that the chat template renders; None if none
    does."""
    message = {"role": "assistant", "reasoning_content": THOUGHT, "content": "eaglekitanswer"}
    rendered = _render_response(renderer, message, ())
    if rendered is None:
        return None
    for form in (HARMONY, TAGS):
        reader = _reader(form, None, rendered.prompt, ())
        if read_response(reader, rendered.response).reasoning == THOUGHT:
            return form

    # A template may drop the thought even of the last response (DeepSeek-R1).
    return TAGS if END_THINK in renderer.template() else None


def _probe_calls(renderer: ChatRenderer) -> CallForm | str | None:
    """The form that reads back the call of a response that the chat template renders; None if none does."""
    call = {
        "id": "eaglekit1",  # nine letters and digits, as Mistral asks for
        "type": "function",
        "function": {"name": CALL.name, "arguments": CALL.arguments},
    }
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    rendered = _render_response(renderer, message, (TOOL,))
    if rendered is None or CALL.name not in rendered.response:
        return None
    forms: tuple[CallForm | str, ...] = (HARMONY, HERMES, DEEPSEEK, MISTRAL, LLAMA3)
    for form in forms:
        reader = _reader(None, form, rendered.prompt, (TOOL,))
        if read_response(reader, rendered.response).calls == [CALL]:
            return form
    return None


class _Rendered(NamedTuple):
    """Renderings of a prompt, and of the response after it without its end."""

    prompt: str
    response: str


def _render_response(renderer: ChatRenderer, message: Message, tools: Sequence[Tool]) -> _Rendered | None:
    """Render a question and the response ``message``; None if the chat template refuses them."""
    # Some templates write the generation prompt only if no response follows.
    try:
        question = ChatPrompt([QUESTION], tools)
        prompt = renderer.render(question, generation_prompt=True)
        text = renderer.render(ChatPrompt([QUESTION, message], tools), generation_prompt=False)
        if not text.startswith(prompt):
            prompt = renderer.render(question, generation_prompt=False)
    except (Unusable, UserError):
        return None
    if not text.startswith(prompt):
        return None

    # Cut the response before its end token.
    response = text[len(prompt) :]
    ends = [response.index(end) for end in renderer.end_names if end in response]
    return _Rendered(prompt, response[: min(ends, default=len(response))])
