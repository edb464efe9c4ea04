"""Log-probabilities in OpenAI's two shapes."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from eagle_kit.core.output import TokenLogprobs
from eagle_kit.serve.api.responses import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from eagle_kit.serve.reply import Delta
from eagle_kit.serve.text_stream import Detokenizer
from eagle_kit.serve.token_names import TokenNames

T = TypeVar("T")
FEW_TOKENS = 32
LOWEST = -9999.0
"""OpenAI's value for a token of probability zero; JSON has no infinity."""


class TextOffsets:
    """Offsets of the tokens of one reply in its text. The second part of a character has the offset of the
    first.

    Args:
        detokenizer: of the reply.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._offset = 0

    def push(self, tokens: Sequence[int]) -> list[int]:
        """Compute the offsets of further tokens, in characters."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push((token,)))
        return offsets


def chat_logprobs(names: TokenNames, tokens: Sequence[int], entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Convert to the shape of `/v1/chat/completions`."""

    def top(token: int, logprob: float) -> dict[str, Any]:
        text, content = names.of(token)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(content)}

    return ChatLogprobs(
        content=[
            ChatLogprob(
                **top(token, entry.logprob), top_logprobs=[TopLogprob(**top(*pair)) for pair in entry.top]
            )
            for token, entry in zip(tokens, entries, strict=True)
        ]
    )


def completion_logprobs(
    names: TokenNames, tokens: Sequence[int], entries: Sequence[TokenLogprobs], offsets: TextOffsets
) -> CompletionLogprobs:
    """Convert to the shape of `/v1/completions`; ``offsets`` has read the reply's tokens before these."""
    return CompletionLogprobs(
        tokens=[names.written(token) for token in tokens],
        token_logprobs=[max(entry.logprob, LOWEST) for entry in entries],
        top_logprobs=[
            _by_name(names, ((token, entry.logprob), *entry.top))
            for token, entry in zip(tokens, entries, strict=True)
        ],
        text_offset=offsets.push(tokens),
    )


def _by_name(names: TokenNames, pairs: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Map the names of tokens, the chosen one first, to their log-probabilities. A token whose name another
    one has taken is named by its id."""
    token_of: dict[str, int] = {}
    found: dict[str, float] = {}
    for token, value in pairs:
        name = names.written(token)
        if token_of.setdefault(name, token) != token:
            name = f"token_id:{token}"
        found[name] = max(value, LOWEST)
    return found


async def off_loop_if_long(build: Callable[..., T], names: TokenNames, delta: Delta, *more: Any) -> T:
    """Call ``build(names, tokens, entries, *more)``, beside the event loop for many tokens."""
    arguments = (names, delta.token_ids, delta.logprobs, *more)
    if len(delta.token_ids) > FEW_TOKENS:
        return await asyncio.to_thread(build, *arguments)
    return build(*arguments)
