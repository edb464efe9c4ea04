"""Packed attention by torch's own flash attention, document by document.

Legend: T packed tokens, Hq / Hkv heads, D head size.
"""

import torch
from torch.nn.functional import pad

from eagle_kit.ops.attention.prefill import prefill_attention
from eagle_kit.ops.attention.variant import AttentionVariant

LONG = 4096
"""Number of tokens of a document from which narrow values are padded with zeros: torch has no flash attention
for them, and would materialise the scores of a whole document."""


def document_spans(doc_start: torch.Tensor) -> list[tuple[int, int]]:
    """(start, stop) of each document, from ``doc_start`` int64 ``[T]``, the first token of each token's
    document."""
    starts = torch.unique_consecutive(doc_start).tolist()
    return list(zip(starts, [*starts[1:], doc_start.shape[0]], strict=True))


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: list[tuple[int, int]],
    variant: AttentionVariant | float,
) -> torch.Tensor:
    """Causal attention of every token to the tokens of its own document; differentiable.

    Args:
        q: ``[T, Hq, D]``.
        k, v: ``[T, Hkv, D]``.
        spans: (start, stop) of the documents, which cover 0..T-1 in order.
        variant: how the layer attends; a number is the scale of plain attention.

    Returns:
        ``[T, Hq, D]``.
    """
    size = v.shape[-1]
    missing = k.shape[-1] - size
    out = []
    for start, stop in spans:
        values = v[start:stop]
        if missing > 0 and stop - start >= LONG:
            values = pad(values, (0, missing))
        out.append(prefill_attention(q[start:stop], k[start:stop], values, variant)[..., :size])
    return torch.cat(out)
