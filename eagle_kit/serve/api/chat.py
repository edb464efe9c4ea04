"""`POST /v1/chat/completions`."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from eagle_kit.serve.api.answer import Answer, finish_reason
from eagle_kit.serve.api.logprobs import chat_logprobs, off_loop_if_long
from eagle_kit.serve.api.prompts import chat_prompt
from eagle_kit.serve.api.protocol import ChatRequest
from eagle_kit.serve.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
)
from eagle_kit.serve.api.service import Service
from eagle_kit.serve.reply import Delta


class ChatAnswer(Answer[ChatRequest]):
    """Reply of the assistant."""

    response, event = ChatResponse, ChatChunk
    kinds = ("chat.completion", "chat.completion.chunk")

    @classmethod
    async def start(cls, service: Service, http: Any, body: ChatRequest) -> "ChatAnswer":
        """See :class:`Answer`; messages are rendered by the chat template."""
        service.enter(http, body, 1)
        with_tools = body.tool_choice != "none"
        prompt = await service.off_loop(chat_prompt, service.llm, body, with_tools, service.max_chars)
        return cls(service, body, await service.generate(http, body, [prompt], "chatcmpl"))

    async def choice(self, index: int, delta: Delta) -> ChatChoice:
        """See :class:`Answer`."""
        return ChatChoice(
            index=index,
            message=ChatMessage(content=delta.text),
            logprobs=await self._logprobs(delta),
            finish_reason=finish_reason(delta) or "stop",
        )

    def opening(self) -> Iterator[ChatChunkChoice]:
        """See :class:`Answer`: the role."""
        for index in range(len(self.generation.replies)):
            yield ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))

    async def additions(self, index: int, delta: Delta) -> list[BaseModel]:
        """See :class:`Answer`; the finish reason has an event of its own."""
        choices: list[BaseModel] = []
        logprobs = await self._logprobs(delta)
        if delta.text or (logprobs is not None and logprobs.content):
            text = ChatDelta(content=delta.text)
            choices.append(ChatChunkChoice(index=index, delta=text, logprobs=logprobs))
        if reason := finish_reason(delta):
            choices.append(ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=reason))
        return choices

    async def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        return await off_loop_if_long(chat_logprobs, self.service.token_names, delta)
