"""Tree masks of other engines, made from ancestors' bits.

Engines and attention libraries have three formats for the keys that a window's node attends to: a mask over
prefix and window (``FULL_MASK`` of SGLang, the custom mask of FlashInfer), a mask over the window
(``QLEN_ONLY``), or that mask in bits (``QLEN_ONLY_BITPACKING``). This package uses the bits.

Legend: B requests, N query nodes, M keys of a window, P keys of a request's prefix.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from eagle_kit.core.shape import MAX_WINDOW

MaskForm = Literal["full", "window", "packed"]
WORDS = ((8, torch.uint8), (16, torch.int16), (32, torch.int32), (64, torch.int64))
"""Widths of packed words, and the types that hold them: two's complement where there is a sign."""


def tree_mask(
    ancestors: torch.Tensor, form: MaskForm, prefix: Sequence[int] = (), *, num_keys: int | None = None
) -> torch.Tensor:
    """Convert ancestors' bits to a form of tree mask.

    Args:
        ancestors: int64 ``[B, N]``; bit j of a node is set if it attends to key j of its window, its own
            among them.
        form: ``full``, ``window`` or ``packed``.
        prefix: P of each request, for ``full`` only; every node attends to all of it.
        num_keys: M, if it is not N: in a draft step only the last nodes are queries.

    Returns:
        ``full``: bool ``[sum of N (P + M)]``, the requests' masks ``[N, P + M]`` one after another.
        ``window``: bool ``[B, N, M]``.
        ``packed``: ``[B, N]`` of the narrowest words of 8, 16, 32 or 64 bits that hold M; bit j is key j.
    """
    nodes = ancestors.shape[1]
    keys = nodes if num_keys is None else num_keys
    assert keys <= MAX_WINDOW
    if form == "packed":
        dtype = next(dtype for width, dtype in WORDS if keys <= width)
        return ancestors.to(dtype)
    window = (ancestors[:, :, None] >> torch.arange(keys, device=ancestors.device)) & 1 == 1
    if form == "window":
        return window
    assert len(prefix) == len(ancestors), "a full mask needs the prefix of every request"
    masks = [torch.cat((own.new_ones(nodes, p), own), 1) for own, p in zip(window, prefix, strict=True)]
    return torch.cat([mask.flatten() for mask in masks])
