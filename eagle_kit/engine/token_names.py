"""Texts and bytes of single tokens, as they are behind other tokens.

A decoder may treat its first token in a special way (SentencePiece drops its leading blank), so a token is
decoded behind another one, whose text is cut off.
"""

import re
from functools import lru_cache
from typing import Any

from eagle_kit.engine.text_stream import REPLACEMENT

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece writes a blank."""


class TokenNames:
    """Cache of tokens as texts and bytes.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._rust = tokenizer.backend_tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}
        self._before = self._find_word()
        self._num_chars_before = len(self._decode(self._before))

    def of(self, token: int) -> tuple[str, bytes]:
        """A token as text, leading blanks and special tokens included, where a part of a character is U+FFFD,
        and the bytes that it stands for."""
        found = self._known.get(token)
        if found is None:
            text = self._decode([*self._before, token])[self._num_chars_before :]
            found = self._known[token] = text, self._bytes(token, text)
        return found

    def written(self, token: int) -> str:
        """Text of a token. A part of a character, and a byte token whose character is a token of its own, is
        written as ``bytes:\\xe2``, as OpenAI did."""
        text, content = self.of(token)
        if REPLACEMENT in text or self._has_twin(token, text):
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._rust.decode(ids, skip_special_tokens=False)

    def _find_word(self) -> list[int]:
        """Find a token that is a word or a part of one; none where the vocabulary has no such token."""
        for token in range(self._rust.get_vocab_size()):
            if BYTE_TOKEN.fullmatch(self._rust.id_to_token(token) or ""):
                continue
            text = self._rust.decode([token], skip_special_tokens=True)
            if text.isascii() and text.isalnum():
                return [token]
        return []

    def _bytes(self, token: int, text: str) -> bytes:
        if REPLACEMENT not in text:
            return text.encode()
        name = self._rust.id_to_token(token) or ""
        if match := BYTE_TOKEN.fullmatch(name):
            return bytes([int(match[1], 16)])
        table = _byte_of_letter()
        known = all(letter in table for letter in name)
        return bytes(table[letter] for letter in name) if known else text.encode()

    def _has_twin(self, token: int, text: str) -> bool:
        """Return True for a byte token whose character is another token's whole text."""
        name = self._rust.id_to_token(token) or ""
        is_byte = name != text and BYTE_TOKEN.fullmatch(name) is not None
        return is_byte and self._rust.token_to_id(text.replace(" ", BLANK)) is not None


@lru_cache
def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE writes every byte as a letter (GPT-2): printable ones as themselves, the others in order
    from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
