"""Sizes at which matmuls on a CPU add up in one order, so that a token's bits do not depend on the window,
chunk or batch that it is computed in.

Found by comparing MKL's fp32 products of all sizes (AVX2); ``tests/kv`` holds attention to them.
"""

LEAST_ROWS = 4
"""Rows of a matrix below which BLAS adds up in another order than for more."""
SPLIT_TERMS = 384
"""Terms that BLAS adds up in one go. Between half of it and this, it takes two halves."""
COLUMNS = 64
"""Numbers of columns are rounded up to a multiple of this."""


def round_columns(count: int) -> int:
    """Round ``count`` keys up to a number of columns whose sums have one order."""
    columns = -(-count // COLUMNS) * COLUMNS
    return SPLIT_TERMS if SPLIT_TERMS // 2 < columns < SPLIT_TERMS else columns


def least_nodes(group: int) -> int:
    """Nodes to which a window is padded when it has fewer; ``group`` query heads share a KV head."""
    return -(-LEAST_ROWS // group)
