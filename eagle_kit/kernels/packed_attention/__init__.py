"""Causal attention inside each document of a packed row."""

import torch

from eagle_kit.kernels.backend import Backend, uses_triton
from eagle_kit.kernels.packed_attention import reference
from eagle_kit.kernels.packed_attention.reference import document_spans

__all__ = ["document_spans", "packed_attention"]


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: list[tuple[int, int]],
    scale: float,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """See :func:`eagle_kit.kernels.packed_attention.reference.packed_attention`."""
    if uses_triton(q, backend):
        from eagle_kit.kernels.packed_attention import triton

        return triton.packed_attention(q, k, v, triton.document_starts(spans, q.device), scale)
    return reference.packed_attention(q, k, v, spans, scale)
