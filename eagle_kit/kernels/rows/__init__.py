"""Rows of several tables of any dtypes, gathered or written in one launch.

Legend: M rows of a table, B rows taken.
"""

from collections.abc import Sequence

import torch

from eagle_kit.kernels.backend import Backend, uses_triton


def gather_rows(
    tables: Sequence[torch.Tensor], rows: torch.Tensor, *, backend: Backend | None = None
) -> list[torch.Tensor]:
    """Copy ``rows`` int64 ``[B]`` of each of the contiguous tables ``[M, ...]`` -> ``[B, ...]``
    each."""
    if uses_triton(rows, backend):
        from eagle_kit.kernels.rows import triton

        found: list[torch.Tensor] = triton.gather_rows(list(tables), rows.contiguous())
        return found
    return [table[rows] for table in tables]


def write_rows(
    tables: Sequence[torch.Tensor],
    rows: torch.Tensor,
    values: Sequence[torch.Tensor],
    *,
    backend: Backend | None = None,
) -> None:
    """Overwrite ``rows`` int64 ``[B]`` of each table by ``values [B, ...]`` of its dtype. A row may repeat
    only where its content does not matter."""
    if uses_triton(rows, backend):
        from eagle_kit.kernels.rows import triton

        triton.write_rows(list(tables), rows.contiguous(), [value.contiguous() for value in values])
        return
    for table, value in zip(tables, values, strict=True):
        table[rows] = value
