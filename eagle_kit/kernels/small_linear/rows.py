"""Numbers of rows of the Triton kernels."""

MAX_ROWS = 64
"""Largest M of the Triton kernels."""


def row_bucket(m: int) -> int:
    """Number of rows that the Triton kernel computes for M: 16, 32 or 64."""
    return max(16, 1 << max(0, m - 1).bit_length())
