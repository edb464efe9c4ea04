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
    """The text with tokens that must be produced in green and others dim. Without colour, the tokens that
    must be produced are between ``⟦`` and ``⟧``.

    Args:
        color: None for colour if standard output is a terminal.
        max_tokens: most tokens to show.
    """
    if color is None:
        color = sys.stdout.isatty()
    ids = chat.ids[:max_tokens]
    response = chat.response[:max_tokens]

    # Parts between changes of the response.
    borders = [0, *(np.nonzero(np.diff(response))[0] + 1).tolist(), len(ids)]
    parts = []
    num_chars = 0
    for start, stop in pairwise(borders):
        # A decoder may drop the blank of its first token, so a part is decoded together with all before it.
        whole = tokenizer.decode(ids[:stop].tolist())
        text = whole[num_chars:]
        num_chars = len(whole)

        is_response = response[start] >= 0
        if color:
            style = GREEN if is_response else DIM
            text = f"{style}{text}{RESET}"
        elif is_response:
            text = f"⟦{text}⟧"
        parts.append(text)

    if len(chat.ids) > max_tokens:
        parts.append(f" … ({len(chat.ids) - max_tokens} more tokens)")
    return "".join(parts)
