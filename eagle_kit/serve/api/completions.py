"""`POST /v1/completions`."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from eagle_kit.serve.api.answer import Answer, finish_reason
from eagle_kit.serve.api.logprobs import TextOffsets, completion_logprobs, off_loop_if_long
from eagle_kit.serve.api.prompts import text_prompt
from eagle_kit.serve.api.protocol import CompletionRequest
from eagle_kit.serve.api.responses import CompletionChoice, CompletionChunk, CompletionResponse
from eagle_kit.serve.api.service import Generation, Service
from eagle_kit.serve.reply import Delta


class CompletionAnswer(Answer[CompletionRequest]):
    """Continuations of texts or of token ids."""

    response, event = CompletionResponse, CompletionChunk
    kinds = ("text_completion", "text_completion")

    def __init__(self, service: Service, body: CompletionRequest, generation: Generation) -> None:
        super().__init__(service, body, generation)
        self._offsets = [TextOffsets(service.llm.tokenizer) for _ in generation.replies]
        self._echoes = [""] * len(generation.prompts)

    @classmethod
    async def start(cls, service: Service, http: Any, body: CompletionRequest) -> "CompletionAnswer":
        """See :class:`Answer`."""
        service.enter(http, body, len(body.prompts))
        # One by one, so that others have their turn in the thread that tokenises.
        prompts = [
            list(prompt)
            if isinstance(prompt, list)
            else await service.off_loop(text_prompt, service.llm, prompt, service.max_chars)
            for prompt in body.prompts
        ]
        answer = cls(service, body, await service.generate(http, body, prompts, "cmpl"))
        if body.echo:
            decode = service.llm.tokenizer.decode
            answer._echoes = [
                prompt if isinstance(prompt, str) else await service.off_loop(decode, prompt)
                for prompt in body.prompts
            ]
        return answer

    async def choice(self, index: int, delta: Delta) -> CompletionChoice:
        """See :class:`Answer`."""
        choice = await self._addition(index, delta)
        return choice.model_copy(update={"text": self._echo(index) + delta.text})

    def opening(self) -> Iterator[CompletionChoice]:
        """See :class:`Answer`: the prompts, when they are to be repeated."""
        for index in range(len(self.generation.replies) if self.body.echo else 0):
            yield CompletionChoice(index=index, text=self._echo(index))

    async def additions(self, index: int, delta: Delta) -> list[BaseModel]:
        """See :class:`Answer`."""
        choice = await self._addition(index, delta)
        return [choice] if choice.text or choice.finish_reason or choice.logprobs is not None else []

    async def _addition(self, index: int, delta: Delta) -> CompletionChoice:
        logprobs = None
        if self.body.logprobs is not None:
            names, offsets = self.service.token_names, self._offsets[index]
            logprobs = await off_loop_if_long(completion_logprobs, names, delta, offsets)
        reason = finish_reason(delta)
        return CompletionChoice(index=index, text=delta.text, logprobs=logprobs, finish_reason=reason)

    def _echo(self, index: int) -> str:
        """Prompt of choice ``index`` when it is to be repeated."""
        return self._echoes[index // self.body.num_choices]
