"""Text of a conversation with its supervised tokens marked."""

import sys
from itertools import pairwise
from typing import Any

import numpy as np

from eagle_kit.data.chat.renderer import TokenizedChat

GREEN = "\033[32m"
DIM = "\033[2m"
RESET = "\033[0m"


def preview(chat: TokenizedChat, tokenizer: Any, *, color: bool | None = None, max_tokens: int = 400) -> str:
    """The text, tokens that must be produced in green (without colour between ``⟦`` and ``⟧``), others dim.

    Args:
        color: None decides by whether standard output is a terminal.
        max_tokens: how much to show.
    """
    if color is None:
        color = sys.stdout.isatty()
    ids = chat.ids[:max_tokens]
    reply = chat.reply[:max_tokens]
    borders = [0, *(np.nonzero(np.diff(reply))[0] + 1).tolist(), len(ids)]
    parts = []
    num_chars = 0
    for start, stop in pairwise(borders):
        # A part is decoded behind all before it, since a decoder may drop the blank of its first token.
        whole = tokenizer.decode(ids[:stop].tolist())
        text = whole[num_chars:]
        num_chars = len(whole)
        is_reply = reply[start] >= 0
        if color:
            text = f"{GREEN if is_reply else DIM}{text}{RESET}"
        elif is_reply:
            text = f"⟦{text}⟧"
        parts.append(text)
    cut = "" if len(chat.ids) <= max_tokens else f" … ({len(chat.ids) - max_tokens} more tokens)"
    return "".join(parts) + cut
