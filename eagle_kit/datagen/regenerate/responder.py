"""Who answers: our engine, or a server (:mod:`.server`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from eagle_kit.core.output import RequestOutput
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.stats import SpecStats
from eagle_kit.data.chat.messages import ChatPrompt, Tool
from eagle_kit.data.chat.reply.choice import choose_forms
from eagle_kit.data.chat.reply.parts import ReplyParts, read_reply
from eagle_kit.engine.text_stream import TextStream

if TYPE_CHECKING:
    from eagle_kit.engine.llm import LLM


@dataclass(frozen=True)
class Reply:
    """One finished reply.

    Attributes:
        finish_reason: ``"stop"``, ``"length"``, or whatever else ended it.
        num_tokens: of the reply, as far as known.
        ids: tokens of the prompt and the reply; None where they are not known.
        num_prompt_tokens: of the prompt; 0 where it is not known.
        refused: why the responder would not answer this prompt; None where it has.
        reasoning: what was thought before the text, where the two are told apart.
        tool_calls: calls, as messages have them, where they are read; otherwise they stay in the text.
        generated: the reply as it was written, special tokens included; None where it is the text.
        stats: acceptance, where there is a draft.
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
    """Source of replies.

    Attributes:
        batch_size: replies that are made together.
        max_prompt_tokens: longest prompt that it takes; None where it does not say.
        repeats: it gives the same replies when asked again, so that those behind an unfinished one need not
            be kept when it is stopped.
    """

    repeats: bool
    batch_size: int
    max_prompt_tokens: int | None

    def num_tokens(self, prompt: ChatPrompt) -> int | None:
        """Number of tokens of a prompt; None where it is not known before.

        Raises:
            PromptError: the chat template does not render it.
        """

    def answer(
        self,
        prompts: Sequence[ChatPrompt],
        params: Sequence[SamplingParams],
        take: Callable[[int, Reply], None],
    ) -> None:
        """Answer prompts, and ``take`` each reply with the number of its prompt as it comes, in this
        thread."""


class EngineResponder:
    """Our engine, whose replies are read into parts in the form that the target's chat template writes."""

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
        take: Callable[[int, Reply], None],
    ) -> None:
        """See :class:`Responder`."""

        def finish(number: int, output: RequestOutput) -> None:
            ids = [*output.prompt_ids, *output.token_ids]
            count = len(output.token_ids)
            reply = Reply(output.text, output.finish_reason, count, ids, stats=output.stats)
            take(number, self._read(reply, output, prompts[number].tools, params[number].stop))

        self._llm.chat(
            [self._llm.tokenize_chat(prompt) for prompt in prompts], list(params), on_finish=finish
        )

    def _read(self, reply: Reply, output: RequestOutput, tools: Sequence[Tool], stop: Sequence[str]) -> Reply:
        """The reply in parts; as it is where it has none but text."""
        if self._forms is None:
            return reply
        reader = self._forms.reader(output.prompt_ids, tools)
        if reader is None:
            return reply

        # The text, with the special tokens that the reader must see.
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
        parts = read_reply(reader, text, end)
        if parts == ReplyParts(content=output.text):
            return reply
        calls = [{"type": "function", "function": call._asdict()} for call in parts.calls]
        generated = tokenizer.decode(
            output.token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return replace(
            reply,
            text=parts.content,
            reasoning=parts.reasoning or None,
            tool_calls=calls or None,
            generated=generated,
        )

    def _is_ended(self, output: RequestOutput) -> bool:
        """True for a reply whose last token is its end."""
        ends = self._llm.renderer.end_token_ids
        return output.finish_reason == "stop" and not ends.isdisjoint(output.token_ids[-1:])
