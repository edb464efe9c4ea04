"""Rows of several tables of any dtypes: gathered, written or extended by entries, in one launch, or on a CPU
in one call of C++ where it is loaded.

Every cycle calls it for the engine's slots.

Legend: M rows of a table, B rows taken, N entries of a row.
"""

from collections.abc import Sequence

import torch

from eagle_kit.ops.backend import Backend, copies_in_cpp, uses_triton


def gather_rows(
    tables: Sequence[torch.Tensor], rows: torch.Tensor, *, backend: Backend | None = None
) -> list[torch.Tensor]:
    """Copy ``rows`` int64 ``[B]`` of each of the contiguous tables ``[M, ...]`` -> ``[B, ...]``
    each."""
    if uses_triton("rows", rows, backend):
        from eagle_kit.ops.rows import triton

        gathered: list[torch.Tensor] = triton.gather_rows(list(tables), rows.contiguous())
        return gathered
    if copies_in_cpp(*tables, rows, backend=backend):
        gathered = torch.ops.eagle_kit_cpp.gather_rows(list(tables), rows.contiguous())
        return gathered
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
    if uses_triton("rows", rows, backend):
        from eagle_kit.ops.rows import triton

        triton.write_rows(list(tables), rows.contiguous(), [value.contiguous() for value in values])
        return
    if copies_in_cpp(*tables, rows, *values, backend=backend):
        contiguous = [value.contiguous() for value in values]
        torch.ops.eagle_kit_cpp.write_rows(list(tables), rows.contiguous(), contiguous)
        return
    for table, value in zip(tables, values, strict=True):
        table[rows] = value


def append_rows(
    tables: Sequence[torch.Tensor],
    counts: torch.Tensor,
    rows: torch.Tensor,
    values: Sequence[torch.Tensor],
    added: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Append ``values [B, ...]`` to ``rows`` int64 ``[B]`` of each table ``[M, N, ...]``, behind the first
    ``counts`` int64 ``[M]`` entries of a row, or over the last one where a row is full. ``added [B]`` is then
    added to the counts. A row may repeat only where its content does not matter."""
    if copies_in_cpp(*tables, counts, rows, *values, added, backend=backend):
        contiguous = [value.contiguous() for value in values]
        torch.ops.eagle_kit_cpp.append_rows(
            list(tables), counts, rows.contiguous(), contiguous, added.contiguous()
        )
        return
    row_counts = counts.index_select(0, rows)
    for table, value in zip(tables, values, strict=True):
        table[rows, row_counts.clamp(max=table.shape[1] - 1)] = value
    counts.index_copy_(0, rows, row_counts + added)
