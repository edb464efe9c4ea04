"""Who answers: our engine, or a server (:mod:`.server`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from eagle_kit.core.output import RequestOutput
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.stats import SpecStats
from eagle_kit.data.chat.messages import ChatPrompt

if TYPE_CHECKING:
    from eagle_kit.serve.llm import LLM


@dataclass(frozen=True)
class Reply:
    """One finished reply.

    Attributes:
        finish_reason: ``"stop"``, ``"length"``, or whatever else ended it.
        num_tokens: of the reply, as far as known.
        ids: tokens of the prompt and the reply; None where they are not known.
        num_prompt_tokens: of the prompt; 0 where it is not known.
        refused: why the responder would not answer this prompt; None where it has.
        reasoning: what was thought before the text, where a server tells the two apart.
        tool_calls: calls, as messages have them, where a server reads them; otherwise they stay in the text.
        stats: acceptance, where there is a draft.
    """

    text: str
    finish_reason: str
    num_tokens: int
    ids: list[int] | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
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
    """Our engine."""

    repeats = True

    def __init__(self, llm: "LLM") -> None:
        self._llm, self.batch_size = llm, llm.max_batch_size
        self.max_prompt_tokens: int | None = llm.max_context - 1

    def num_tokens(self, prompt: ChatPrompt) -> int | None:
        """See :class:`Responder`."""
        return len(self._llm.tokenize(prompt))

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
            take(number, Reply(output.text, output.finish_reason, count, ids, stats=output.stats))

        self._llm.generate([self._llm.tokenize(prompt) for prompt in prompts], list(params), on_finish=finish)
