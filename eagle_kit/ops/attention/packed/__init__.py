"""Causal attention inside each document of a packed sequence.

The trainer and capture call it for the target's forward. It has a backward pass.
"""

import torch

from eagle_kit.ops.attention.packed import reference
from eagle_kit.ops.attention.packed.reference import document_spans
from eagle_kit.ops.attention.variant import AttentionVariant, as_variant
from eagle_kit.ops.backend import Backend, is_differentiated, uses_triton

MAX_HEAD_SIZE = 256
"""Largest size of a head that the kernel takes."""

__all__ = ["document_spans", "packed_attention"]


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: list[tuple[int, int]],
    variant: AttentionVariant | float,
    *,
    starts: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """See :func:`eagle_kit.ops.attention.packed.reference.packed_attention`; ``starts`` int32 ``[T]``,
    the first token of each token's document, is made of ``spans`` where it is not given."""
    variant = as_variant(variant)
    if (
        uses_triton("attention/packed", q, backend)
        and q.shape[-1] <= MAX_HEAD_SIZE
        and (variant.is_softmax or not is_differentiated(q, k, v))
    ):
        from eagle_kit.ops.attention.packed import triton

        starts = triton.document_starts(spans, q.device) if starts is None else starts
        return triton.packed_attention(q, k, v, starts, variant)
    return reference.packed_attention(q, k, v, spans, variant)
