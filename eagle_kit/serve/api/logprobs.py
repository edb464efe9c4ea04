"""Log-probabilities in OpenAI's two shapes."""

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from eagle_kit.core.output import TokenLogprobs
from eagle_kit.serve.api.responses import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from eagle_kit.serve.reply import Delta
from eagle_kit.serve.text_stream import REPLACEMENT, Detokenizer

T = TypeVar("T")
FEW_TOKENS = 32
LOWEST = -9999.0
"""OpenAI's value for a token of probability zero; JSON has no infinity."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenNames:
    """Cache of tokens as texts and bytes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def of(self, token: int) -> tuple[str, bytes]:
        """A token alone as text, special tokens included, where a part of a character is U+FFFD, and the
        bytes that it stands for."""
        found = self._known.get(token)
        if found is None:
            text = self.tokenizer.backend_tokenizer.decode([token], skip_special_tokens=False)
            found = self._known[token] = text, self._bytes(token, text)
        return found

    def written(self, token: int) -> str:
        """Text of a token; a part of a character is written as ``bytes:\\xe2``, as OpenAI did."""
        text, content = self.of(token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content) if REPLACEMENT in text else text

    def _bytes(self, token: int, text: str) -> bytes:
        if REPLACEMENT not in text:
            return text.encode()
        name = self.tokenizer.convert_ids_to_tokens(token) or ""
        if match := BYTE_TOKEN.fullmatch(name):
            return bytes([int(match[1], 16)])
        table = _byte_of_letter()
        known = all(letter in table for letter in name)
        return bytes(table[letter] for letter in name) if known else text.encode()


class TextOffsets:
    """Offsets of the tokens of one reply in its text. The second part of a character has the offset of the
    first."""

    def __init__(self, tokenizer: Any) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._offset = 0

    def push(self, tokens: Sequence[int]) -> list[int]:
        """Compute the offsets of further tokens, in characters."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push((token,)))
        return offsets


@lru_cache
def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE writes every byte as a letter (GPT-2): printable ones as themselves, the others in order
    from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


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
    """Convert to the shape of `/v1/completions`; ``offsets`` has read the reply's tokens before these. The
    chosen token is always among the top ones."""
    return CompletionLogprobs(
        tokens=[names.written(token) for token in tokens],
        token_logprobs=[max(entry.logprob, LOWEST) for entry in entries],
        top_logprobs=[
            {
                names.written(other): max(value, LOWEST)
                for other, value in ((token, entry.logprob), *entry.top)
            }
            for token, entry in zip(tokens, entries, strict=True)
        ],
        text_offset=offsets.push(tokens),
    )


async def off_loop_if_long(build: Callable[..., T], names: TokenNames, delta: Delta, *more: Any) -> T:
    """Call ``build(names, tokens, entries, *more)``, beside the event loop for many tokens."""
    arguments = (names, delta.token_ids, delta.logprobs, *more)
    if len(delta.token_ids) > FEW_TOKENS:
        return await asyncio.to_thread(build, *arguments)
    return build(*arguments)
