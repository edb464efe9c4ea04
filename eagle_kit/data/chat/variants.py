"""Choice of chat-template arguments for each conversation of a mixture, such as thinking on or off."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from eagle_kit.config.train import TemplateVariant


def draw_kwargs(variants: Sequence[TemplateVariant], seed: int, key: str) -> Mapping[str, Any]:
    """Arguments of one of ``variants``, drawn by their weights.

    The draw is a hash of ``seed`` and ``key``, a text that identifies the conversation. It does not depend on
    other conversations or on their order.
    """
    if not variants:
        return {}
    digest = hashlib.sha256(f"{seed}\n{key}".encode()).digest()
    drawn = int.from_bytes(digest[:8], "big") / 2**64 * sum(variant.weight for variant in variants)
    for variant in variants:
        drawn -= variant.weight
        if drawn < 0:
            return variant.kwargs
    return variants[-1].kwargs
