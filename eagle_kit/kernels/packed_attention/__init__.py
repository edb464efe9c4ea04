"""Causal attention inside each document of a packed row."""

from eagle_kit.kernels.packed_attention.reference import document_spans, packed_attention

__all__ = ["document_spans", "packed_attention"]
