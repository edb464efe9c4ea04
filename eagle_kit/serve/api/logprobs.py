"""Log-probabilities in OpenAI's two shapes."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from eagle_kit.core.request import TokenLogprobs
from eagle_kit.serve.api.responses import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from eagle_kit.serve.text_stream import REPLACEMENT

LOWEST = -9999.0
"""What OpenAI sends for a token that is all but impossible; JSON has no infinity."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def token_text(tokenizer: Any, token: int) -> str:
    """A token alone as text, special tokens included; a part of a character is U+FFFD."""
    return tokenizer.backend_tokenizer.decode([token], skip_special_tokens=False)


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes a token stands for, which may be a part of a character."""
    text = token_text(tokenizer, token)
    if REPLACEMENT not in text:
        return text.encode()
    name = tokenizer.convert_ids_to_tokens(token) or ""
    if match := BYTE_TOKEN.fullmatch(name):
        return bytes([int(match[1], 16)])
    table = _byte_of_letter()
    return (
        bytes(table[letter] for letter in name) if all(letter in table for letter in name) else text.encode()
    )


@lru_cache
def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE writes every byte as a letter (GPT-2): printable ones as themselves, the others in order
    from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def chat_logprobs(tokenizer: Any, tokens: Sequence[int], entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """The shape of `/v1/chat/completions`."""

    def top(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(tokenizer, token),
            "logprob": max(logprob, LOWEST),
            "bytes": list(token_bytes(tokenizer, token)),
        }

    return ChatLogprobs(
        content=[
            ChatLogprob(
                **top(token, entry.logprob), top_logprobs=[TopLogprob(**top(*pair)) for pair in entry.top]
            )
            for token, entry in zip(tokens, entries, strict=True)
        ]
    )


def completion_logprobs(
    tokenizer: Any, tokens: Sequence[int], entries: Sequence[TokenLogprobs], offset: int
) -> CompletionLogprobs:
    """The shape of `/v1/completions`; ``offset`` is where the first token's text begins. The chosen token is
    always among the top ones. Parts of characters are written as ``bytes:\\xe2``, as OpenAI did."""
    names = [_name(tokenizer, token) for token in tokens]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token_text(tokenizer, token))
    return CompletionLogprobs(
        tokens=names,
        token_logprobs=[max(entry.logprob, LOWEST) for entry in entries],
        top_logprobs=[
            {
                _name(tokenizer, other): max(value, LOWEST)
                for other, value in ((token, entry.logprob), *entry.top)
            }
            for token, entry in zip(tokens, entries, strict=True)
        ],
        text_offset=offsets,
    )


def _name(tokenizer: Any, token: int) -> str:
    text = token_text(tokenizer, token)
    if REPLACEMENT not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes(tokenizer, token))
