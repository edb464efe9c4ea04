"""Text of a conversation with its supervised tokens marked."""

import sys
from itertools import pairwise
from typing import Any

import numpy as np

from eagle_kit.data.chat.renderer import TokenizedChat

GREEN, DIM, RESET = "\033[32m", "\033[2m", "\033[0m"


def preview(chat: TokenizedChat, tokenizer: Any, *, color: bool | None = None, max_tokens: int = 400) -> str:
    """The text, tokens that must be produced in green (without colour between ``⟦`` and ``⟧``), others dim.

    Args:
        color: None decides by whether standard output is a terminal.
        max_tokens: how much to show.
    """
    use_color = sys.stdout.isatty() if color is None else color
    before, after = (GREEN, RESET) if use_color else ("⟦", "⟧")
    ids, reply = chat.ids[:max_tokens], chat.reply[:max_tokens]
    borders = [0, *(np.nonzero(np.diff(reply))[0] + 1).tolist(), len(ids)]
    parts = []
    num_chars = 0
    for start, stop in pairwise(borders):
        # A part is decoded behind all before it, since a decoder may drop the blank of its first token.
        whole = tokenizer.decode(ids[:stop].tolist())
        text = whole[num_chars:]
        num_chars = len(whole)
        if reply[start] >= 0:
            parts.append(f"{before}{text}{after}")
        else:
            parts.append(f"{DIM}{text}{RESET}" if use_color else text)
    cut = "" if len(chat.ids) <= max_tokens else f" … ({len(chat.ids) - max_tokens} more tokens)"
    return "".join(parts) + cut
