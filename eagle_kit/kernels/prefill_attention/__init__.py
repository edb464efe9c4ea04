"""Causal attention of prompt chunks over what is cached before them."""

from eagle_kit.kernels.prefill_attention.reference import prefill_attention

__all__ = ["prefill_attention"]
