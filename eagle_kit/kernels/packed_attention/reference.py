"""Packed attention by torch's own flash attention, document by document.

Legend: T packed tokens, Hq / Hkv heads, D head size.
"""

import torch
from torch.nn.functional import pad

from eagle_kit.kernels.prefill_attention import prefill_attention

LONG = 4096
"""Tokens of a document from which narrow values are filled up with zeros: torch has no flash attention for
them, and scores of a whole document would be there at once."""


def document_spans(doc_start: torch.Tensor) -> list[tuple[int, int]]:
    """``doc_start`` int64 ``[T]``, where each token's document begins -> (start, stop) of each document."""
    starts = torch.unique_consecutive(doc_start).tolist()
    return list(zip(starts, [*starts[1:], doc_start.shape[0]], strict=True))


def packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: list[tuple[int, int]], scale: float
) -> torch.Tensor:
    """Query t sees the keys of its document up to t; differentiable.

    Args:
        q: ``[T, Hq, D]``.
        k, v: ``[T, Hkv, D]``.
        spans: the documents, which cover 0..T-1 in order.

    Returns:
        ``[T, Hq, D]``.
    """
    size, missing = v.shape[-1], k.shape[-1] - v.shape[-1]
    out = []
    for a, b in spans:
        values = pad(v[a:b], (0, missing)) if missing > 0 and b - a >= LONG else v[a:b]
        out.append(prefill_attention(q[a:b], k[a:b], values, scale)[..., :size])
    return torch.cat(out)
