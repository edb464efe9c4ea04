"""`POST /v1/completions`."""

from collections.abc import Iterator, Sequence
from typing import Any

from eagle_kit.engine.text_stream import Detokenizer, TextContext, text_context
from eagle_kit.server.api.answer import Answer, Written, finish_reason
from eagle_kit.server.api.logprobs import RepeatedPrompt, TextOffsets, completion_logprobs, prompt_logprobs
from eagle_kit.server.api.prompts import text_prompt
from eagle_kit.server.api.protocol import CompletionRequest
from eagle_kit.server.api.responses import CompletionChoice, CompletionChunk, CompletionResponse
from eagle_kit.server.api.service import Generation, Service
from eagle_kit.server.response_stream import Delta


class CompletionAnswer(Answer[CompletionRequest]):
    """Continuations of texts or of token ids."""

    response_type = CompletionResponse
    event_type = CompletionChunk
    kinds = ("text_completion", "text_completion")

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        generation: Generation,
        contexts: Sequence[TextContext],
        echoes: Sequence[str],
    ) -> None:
        super().__init__(service, body, generation)
        self._contexts = contexts
        self._echoes = echoes
        self._offsets: dict[int, TextOffsets] = {}
        self._begun: set[int] = set()
        self._repeats_scores = bool(body.echo) and body.logprobs is not None

    @classmethod
    async def start(cls, service: Service, http: Any, body: CompletionRequest) -> "CompletionAnswer":
        """See :class:`Answer`."""
        service.enter(http, body, len(body.prompts))

        # One by one, so that others have their turn in the thread that tokenises.
        given: Sequence[str | list[int]] = body.prompts
        prompts = []
        contexts = []
        for prompt in given:
            ids, context = await service.off_loop(http, _read_prompt, service, body, prompt)
            prompts.append(ids)
            contexts.append(context)

        generation = await service.generate(http, body, prompts, "cmpl", contexts=contexts)
        echoes: list[str] = []
        if body.echo:
            for prompt, context in zip(given, contexts, strict=True):
                echoes.append(await service.off_loop(http, _echo_text, service, body, prompt, context))
        return cls(service, body, generation, contexts, echoes)

    def choice(self, index: int, delta: Delta) -> Written:
        """See :class:`Answer`."""
        written = self._written(index, delta, self._echo(index) + delta.text)
        num_top = self.body.prompt_logprobs
        if num_top is None:
            return written
        names = self.service.token_names
        scored = self.generation.scored_prompt(index)
        return written._replace(prompt_logprobs=prompt_logprobs(names, self._prompt(index), scored, num_top))

    def opening(self) -> Iterator[CompletionChoice]:
        """See :class:`Answer`: the prompts, when they are to be repeated. Their log-probabilities are known
        with the first token only, and the prompts come with them."""
        is_known = self.body.echo and not self._repeats_scores
        for index in range(len(self.generation.responses) if is_known else 0):
            yield CompletionChoice(index=index, text=self._echo(index))

    def additions(self, index: int, delta: Delta) -> list[Written]:
        """See :class:`Answer`."""
        text = delta.text
        if self._repeats_scores and index not in self._offsets:
            text = self._echo(index) + text
        has_tokens = self.body.logprobs is not None or self.body.return_token_ids
        is_empty = not text and delta.finish_reason is None and not has_tokens
        return [] if is_empty else [self._written(index, delta, text)]

    def _written(self, index: int, delta: Delta, text: str) -> Written:
        """Choice with the ``text`` and the log-probabilities of a delta, the first one's with those of a
        repeated prompt."""
        choice = CompletionChoice(index=index, text=text, finish_reason=finish_reason(delta))
        if self.body.return_token_ids:
            choice.token_ids = delta.token_ids
            choice.prompt_token_ids = None if index in self._begun else list(self._prompt(index))
        self._begun.add(index)
        num_top = self.body.logprobs
        if num_top is None:
            return Written(choice)
        prompt = None
        if self._repeats_scores and index not in self._offsets:
            scored = self.generation.scored_prompt(index)
            offsets = TextOffsets(self._detokenizer(TextContext()))
            prompt = RepeatedPrompt(self._prompt(index), scored, num_top, offsets)
        offsets = self._offsets_of(index)
        names = self.service.token_names
        return Written(choice, completion_logprobs(names, delta.token_ids, delta.logprobs, offsets, prompt))

    def _offsets_of(self, index: int) -> TextOffsets:
        """Offsets of the tokens of choice ``index``."""
        offsets = self._offsets.get(index)
        if offsets is None:
            context = self._contexts[index // self.body.num_choices]
            offsets = TextOffsets(self._detokenizer(context), len(self._echo(index)))
            self._offsets[index] = offsets
        return offsets

    def _detokenizer(self, context: TextContext) -> Detokenizer:
        shown = self.service.special_tokens if self.body.shows_special_tokens else frozenset()
        return Detokenizer(self.service.llm.tokenizer, shown, context)

    def _prompt(self, index: int) -> Sequence[int]:
        """Token ids of the prompt of choice ``index``."""
        return self.generation.prompts[index // self.body.num_choices]

    def _echo(self, index: int) -> str:
        """Prompt of choice ``index``; empty where it is not to be repeated."""
        return self._echoes[index // self.body.num_choices] if self._echoes else ""


def _read_prompt(
    service: Service, body: CompletionRequest, prompt: str | list[int]
) -> tuple[list[int], TextContext]:
    """Token ids of a prompt, and its end that the text of the responses continues."""
    is_text = isinstance(prompt, str)
    ids = text_prompt(service.llm, prompt, service.max_chars) if isinstance(prompt, str) else list(prompt)
    skip = not body.shows_special_tokens
    return ids, text_context(service.llm.tokenizer, ids, is_text=is_text, skip_special_tokens=skip)


def _echo_text(
    service: Service, body: CompletionRequest, prompt: str | list[int], context: TextContext
) -> str:
    """Text of a prompt, without the beginning of a character that is part of the response."""
    if isinstance(prompt, str):
        return prompt
    finished = prompt[: len(prompt) - len(context.unfinished)]
    skip = not body.shows_special_tokens
    decode = service.llm.tokenizer.decode
    return str(decode(finished, skip_special_tokens=skip, clean_up_tokenization_spaces=False))
