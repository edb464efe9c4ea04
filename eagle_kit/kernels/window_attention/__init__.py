"""Attention of a window of nodes over a paged prefix and the window's own keys, masked by ancestor bits.

Decoding (N = 1), draft steps, verification and draft-extend are all calls of it.
"""

from eagle_kit.kernels.window_attention.plan import WindowPlan, ancestor_bits, chain_bits
from eagle_kit.kernels.window_attention.reference import window_attention

__all__ = ["WindowPlan", "ancestor_bits", "chain_bits", "window_attention"]
