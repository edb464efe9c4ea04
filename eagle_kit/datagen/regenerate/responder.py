"""Sources of responses: our engine, or a server (:mod:`.server`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from eagle_kit.core.output import RequestOutput
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.stats import SpecStats
from eagle_kit.data.chat.messages import ChatPrompt, Tool
from eagle_kit.data.chat.response.choice import choose_forms
from eagle_kit.data.chat.response.parts import ResponseParts, read_response
from eagle_kit.engine.text_stream import TextStream

if TYPE_CHECKING:
    from eagle_kit.engine.llm import LLM


@dataclass(frozen=True)
class GeneratedResponse:
    """One finished response.

    Attributes:
        text: the response without reasoning and calls that were parsed.
        finish_reason: ``"stop"``, ``"length"``, or another reason of the engine or server.
        num_tokens: tokens of the response; 0 if not known.
        ids: token ids of the prompt and the response; None if not known.
        reasoning: the thought before the text; None if it is not parsed or there is none.
        tool_calls: calls in the form of messages; None if they are not parsed or there are none.
        generated: the response as it was generated, with special tokens; None if that is the text.
        num_prompt_tokens: tokens of the prompt; 0 if not known.
        refused: why the responder did not answer the prompt; None if it did.
        stats: acceptance of a draft.
    """

    text: str
    finish_reason: str
    num_tokens: int
    ids: list[int] | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    generated: str | None = None
    num_prompt_tokens: int = 0
    refused: str | None = None
    stats: SpecStats = field(default_factory=SpecStats)


class Responder(Protocol):
    """Source of responses.

    Attributes:
        repeats: True if it gives the same responses when asked again. Then the responses behind an unfinished
            one need not be written when it is stopped.
        batch_size: number of responses that are generated together.
        max_prompt_tokens: maximum length of a prompt; None if not known.
    """

    repeats: bool
    batch_size: int
    max_prompt_tokens: int | None

    def num_tokens(self, prompt: ChatPrompt) -> int | None:
        """Number of tokens of a prompt; None if it is not known before the response.

        Raises:
            PromptError: the chat template does not render it.
        """

    def answer(
        self,
        prompts: Sequence[ChatPrompt],
        params: Sequence[SamplingParams],
        take: Callable[[int, GeneratedResponse], None],
    ) -> None:
        """Answer prompts.

        Args:
            params: sampling parameters of each prompt.
            take: called in this thread with the number of a prompt and its response, as soon as that is
                there.
        """


class EngineResponder:
    """Our engine. Responses are parsed in the form that the target's chat template writes."""

    repeats = True

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm
        self.batch_size = llm.max_batch_size
        self.max_prompt_tokens: int | None = llm.max_context - 1
        self._forms = None if llm.tokenizer is None else choose_forms(llm.renderer)

    def num_tokens(self, prompt: ChatPrompt) -> int | None:
        """See :class:`Responder`."""
        return len(self._llm.tokenize_chat(prompt))

    def answer(
        self,
        prompts: Sequence[ChatPrompt],
        params: Sequence[SamplingParams],
        take: Callable[[int, GeneratedResponse], None],
    ) -> None:
        """See :class:`Responder`."""

        def finish(number: int, output: RequestOutput) -> None:
            response = GeneratedResponse(
                text=output.text,
                finish_reason=output.finish_reason,
                num_tokens=len(output.token_ids),
                ids=[*output.prompt_ids, *output.token_ids],
                stats=output.stats,
            )
            take(number, self._read(response, output, prompts[number].tools, params[number].stop))

        self._llm.chat(
            [self._llm.tokenize_chat(prompt) for prompt in prompts], list(params), on_finish=finish
        )

    def _read(
        self, response: GeneratedResponse, output: RequestOutput, tools: Sequence[Tool], stop: Sequence[str]
    ) -> GeneratedResponse:
        """Parse a response into text, reasoning and calls; unchanged if it has text alone."""
        if self._forms is None:
            return response
        reader = self._forms.reader(output.prompt_ids, tools)
        if reader is None:
            return response

        # The text, with the special tokens that the parser needs.
        tokenizer = self._llm.tokenizer
        text = output.text
        is_ended = self._is_ended(output)
        shown = self._forms.shown_tokens(bool(tools))
        if shown:
            stream = TextStream(tokenizer, stop, included_special_tokens=shown)
            stream.push(output.token_ids[:-1] if is_ended else output.token_ids)
            stream.finish()
            text = stream.text

        # Its parts.
        end = tokenizer.convert_ids_to_tokens(output.token_ids[-1]) if is_ended else ""
        parts = read_response(reader, text, end)
        if parts == ResponseParts(content=output.text):
            return response
        calls = [{"type": "function", "function": call._asdict()} for call in parts.calls]
        generated = tokenizer.decode(
            output.token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return replace(
            response,
            text=parts.content,
            reasoning=parts.reasoning or None,
            tool_calls=calls or None,
            generated=generated,
        )

    def _is_ended(self, output: RequestOutput) -> bool:
        """True if the last token of a response is an end token."""
        ends = self._llm.renderer.end_token_ids
        return output.finish_reason == "stop" and not ends.isdisjoint(output.token_ids[-1:])
