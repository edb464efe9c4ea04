"""Recurrent layers (gated delta rule, Mamba-2, short convolutions) over windows of nodes and packed texts."""

from eagle_kit.kernels.recurrence.reference import (
    Written,
    commit_recurrent,
    commit_tail,
    convolve_prompts,
    recurrent_prompts,
    recurrent_window,
    window_convolution,
)

__all__ = [
    "Written",
    "commit_recurrent",
    "commit_tail",
    "convolve_prompts",
    "recurrent_prompts",
    "recurrent_window",
    "window_convolution",
]
