"""`POST /v1/chat/completions`."""

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.structured_outputs import ThinkingBudget, Thought
from eagle_kit.data.chat.response.parts import Call, ResponseParts, ResponseReader
from eagle_kit.engine.text_stream import text_context
from eagle_kit.server.api.answer import Answer, Written, finish_reason
from eagle_kit.server.api.logprobs import chat_logprobs, prompt_logprobs
from eagle_kit.server.api.prompts import chat_prompt, chat_tools
from eagle_kit.server.api.protocol import ChatRequest
from eagle_kit.server.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatResponse,
    GeneratedFunctionCall,
    GeneratedToolCall,
    ToolCallDelta,
)
from eagle_kit.server.api.service import Generation, Service
from eagle_kit.server.api.tool_choice import ChosenCallReader
from eagle_kit.server.response_stream import Delta

ID_LENGTH = 9
"""Length of the id of a call, which Mistral's templates check."""


class ChatAnswer(Answer[ChatRequest]):
    """HTTP response of a chat: messages of the assistant.

    Args:
        readers: parser of each generated response into reasoning, content and calls; None where all of it
            is content.
    """

    response_type = ChatResponse
    event_type = ChatChunk
    kinds = ("chat.completion", "chat.completion.chunk")

    def __init__(
        self,
        service: Service,
        body: ChatRequest,
        generation: Generation,
        readers: Sequence[ResponseReader | None],
    ) -> None:
        super().__init__(service, body, generation)
        self._readers = readers
        self._num_calls = [0] * len(generation.responses)

    @classmethod
    async def start(cls, service: Service, http: Any, body: ChatRequest) -> "ChatAnswer":
        """See :class:`Answer`; messages are rendered by the chat template."""
        # Check the request, and tokenise its messages.
        service.enter(http, body, 1)
        tools = () if body.tool_choice == "none" else chat_tools(body)
        prompt = await service.off_loop(http, chat_prompt, service.llm, body, tools, service.max_chars)

        # A free response: its form is known from the prompt.
        forms = service.response_forms
        constrained = await service.off_loop(http, forms.constrained, prompt)
        budget = _thinking_budget(body, constrained.thought)
        contexts = []
        if body.continue_final_message:
            skip = not body.shows_special_tokens
            contexts = [text_context(service.llm.tokenizer, prompt, is_text=True, skip_special_tokens=skip)]
        if not (body.has_grammar or body.must_call):
            shown = forms.shown_tokens(bool(tools))
            generation = await service.generate(
                http, body, [prompt], "chatcmpl", shown, contexts=contexts, thinking_budget=budget
            )
            make_reader = partial(forms.reader, prompt, tools)
            readers = [await service.off_loop(http, make_reader) for _ in generation.responses]
            return cls(service, body, replace(generation, thought=constrained.thought), readers)

        # A response under a grammar, which begins behind the reasoning.
        generation = await service.generate(
            http,
            body,
            [prompt],
            "chatcmpl",
            constrained.shown_tokens,
            constrained.thought,
            contexts=contexts,
            thinking_budget=budget,
        )
        generation = replace(generation, thought=constrained.thought)
        readers = []
        for _ in generation.responses:
            reader = None if constrained.make_reader is None else constrained.make_reader()
            readers.append(ChosenCallReader(body.chosen_function, reader) if body.must_call else reader)
        return cls(service, body, generation, readers)

    def choice(self, index: int, delta: Delta) -> Written:
        """See :class:`Answer`."""
        parts = self._read(index, delta)
        calls = [_tool_call(call) for call in parts.calls]
        choice = ChatChoice(
            index=index,
            message=ChatMessage(
                content=None if calls and not parts.content else parts.content,
                reasoning_content=parts.reasoning or None,
                tool_calls=calls or None,
            ),
            finish_reason=self._finish_reason(index, delta) or "stop",
            token_ids=self._token_ids(delta),
        )
        return Written(choice, self._logprobs(delta))

    def prompt_token_ids(self) -> dict[str, Any]:
        """See :class:`Answer`."""
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self.generation.prompts[0])}

    def prompt_logprobs(self) -> Iterator[str] | None:
        """See :class:`Answer`."""
        if self.body.prompt_logprobs is None:
            return None
        generation = self.generation
        return prompt_logprobs(
            self.service.token_names,
            generation.prompts[0],
            generation.scored_prompt(0),
            self.body.prompt_logprobs,
        )

    def opening(self) -> Iterator[ChatChunkChoice]:
        """See :class:`Answer`: the role."""
        for index in range(len(self.generation.responses)):
            yield ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))

    def additions(self, index: int, delta: Delta) -> list[Written]:
        """See :class:`Answer`.

        Reasoning, content, each call and the finish reason have their own events. The first event has the
        ids and the log-probabilities of all tokens.
        """
        first = self._num_calls[index]
        logprobs = self._logprobs(delta)
        parts = self._read(index, delta)
        deltas = [ChatDelta(reasoning_content=parts.reasoning)] if parts.reasoning else []
        token_ids = self._token_ids(delta)
        has_more = logprobs is not None or token_ids is not None
        if parts.content or (has_more and delta.token_ids and not parts.reasoning):
            deltas.append(ChatDelta(content=parts.content))
        for number, call in enumerate(parts.calls, first):
            made = _tool_call(call).model_dump()
            deltas.append(ChatDelta(tool_calls=[ToolCallDelta(index=number, **made)]))
        choices = []
        for each in deltas:
            choices.append(Written(ChatChunkChoice(index=index, delta=each, token_ids=token_ids), logprobs))
            logprobs = None
            token_ids = None
        if reason := self._finish_reason(index, delta):
            last = ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=reason)
            choices.append(Written(last))
        return choices

    def _read(self, index: int, delta: Delta) -> ResponseParts:
        """Parse the text of a delta; at the end of the response also what the parser held back."""
        reader = self._readers[index]
        if reader is None:
            return ResponseParts(content=delta.text)
        parts = reader.feed(delta.text)
        if delta.finish_reason:
            parts.add(reader.finish(self._end(index)))
        if self.body.parallel_tool_calls is False:
            del parts.calls[max(0, 1 - self._num_calls[index]) :]
        self._num_calls[index] += len(parts.calls)
        return parts

    def _end(self, index: int) -> str:
        """Return the text of the token that ended a response; empty if no token did."""
        request = self.generation.responses[index].request
        is_ended = request.finish_reason == "stop" and request.response.num_text_tokens < len(
            request.token_ids
        )
        return self.service.llm.tokenizer.convert_ids_to_tokens(request.token_ids[-1]) if is_ended else ""

    def _finish_reason(self, index: int, delta: Delta) -> str | None:
        """Return OpenAI's name of the finish reason.

        It is ``tool_calls`` for a response with calls that was not cut off, unless the request named a
        function.
        """
        reason = finish_reason(delta)
        has_calls = self._num_calls[index] > 0 and self.body.chosen_function is None
        return "tool_calls" if reason == "stop" and has_calls else reason

    def _token_ids(self, delta: Delta) -> list[int] | None:
        return delta.token_ids if self.body.return_token_ids else None

    def _logprobs(self, delta: Delta) -> Iterator[str] | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(self.service.token_names, delta.token_ids, delta.logprobs)


def _thinking_budget(body: ChatRequest, thought: Thought | None) -> ThinkingBudget | None:
    """The budget of the reasoning that a request asks for. Raise UserError where its end cannot be forced."""
    num_tokens = body.thinking_token_budget
    if num_tokens is None or num_tokens == -1:
        return None
    if thought is None or len(thought.end) != 1:
        raise UserError(
            f"thinking_token_budget is {num_tokens}, and no token is known that ends the "
            "reasoning of this prompt's response.",
            "Leave it out, or send reasoning_effort if the chat template reads it.",
        )
    return ThinkingBudget(thought, num_tokens)


def _tool_call(call: Call) -> GeneratedToolCall:
    """Make a call with a random id; a client may use its request id again."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return GeneratedToolCall(
        id=uuid.uuid4().hex[:ID_LENGTH], function=GeneratedFunctionCall(name=call.name, arguments=arguments)
    )
