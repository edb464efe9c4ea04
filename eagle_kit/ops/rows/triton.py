"""Rows of several tables in one launch: a program copies a piece of one row of every table.

A row is read as the widest integers that divide its bytes, so that every dtype is one kernel; tables may
differ in width, and a piece beyond the end of a narrow one copies nothing.

Bytes: each row read and written once. A decode cycle's rows are some 10 KB a request: the launch is the cost.
"""

import torch
import triton
import triton.language as tl

from eagle_kit.ops.custom_operator import custom_operator

BLOCK = 512
"""Words of a table that a program copies."""
NUM_WARPS = 8
WIDTHS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit
def _copy_rows(rows, sources, targets, words, WRITES: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a piece of one row of every table: from row ``rows[b]`` to row b, or if WRITES from b to
    ``rows[b]``. Grid ``(B, pieces of the widest rows)``; ``sources`` and ``targets`` are tuples of pointers,
    ``words`` the sizes of rows."""
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + b)
    source_row = row
    target_row = b
    if WRITES:
        source_row = b
        target_row = row
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for table in tl.static_range(len(sources)):
        size = words[table]
        piece = tl.load(sources[table] + source_row * size + i, i < size)
        tl.store(targets[table] + target_row * size + i, piece, i < size)


def _words(table: torch.Tensor) -> torch.Tensor:
    """View rows as the widest integers that divide their bytes."""
    rows = table.view(len(table), -1).view(torch.uint8)
    return rows.view(next(dtype for dtype in WIDTHS if rows.shape[1] % dtype.itemsize == 0))


def _launch(
    rows: torch.Tensor, sources: list[torch.Tensor], targets: list[torch.Tensor], writes: bool
) -> None:
    """Copy rows of ``sources`` to ``targets``."""
    source_words = []
    target_words = []
    for source, target in zip(sources, targets, strict=True):
        if source.numel() and target.numel():  # a table may have no columns
            source_words.append(_words(source))
            target_words.append(_words(target))
    if not source_words or not len(rows):
        return
    sizes = tuple(source.shape[1] for source in source_words)
    _copy_rows[(len(rows), triton.cdiv(max(sizes), BLOCK))](
        rows,
        tuple(source_words),
        tuple(target_words),
        sizes,
        WRITES=writes,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def _gathered(tables: list[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
    return [table.new_empty(len(rows), *table.shape[1:]) for table in tables]


@custom_operator("eagle_kit::gather_rows")
def gather_rows(tables: list[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
    """Rows ``rows [B]`` of contiguous tables ``[M, ...]``."""
    out = _gathered(tables, rows)
    _launch(rows, tables, out, writes=False)
    return out


@gather_rows.register_fake
def _(tables, rows):
    return _gathered(tables, rows)


@custom_operator("eagle_kit::write_rows", mutates_args=("tables",))
def write_rows(tables: list[torch.Tensor], rows: torch.Tensor, values: list[torch.Tensor]) -> None:
    """Write ``values [B, ...]`` to rows ``rows [B]`` of ``tables [M, ...]``, all contiguous."""
    for table, value in zip(tables, values, strict=True):
        assert table.dtype == value.dtype and table.shape[1:] == value.shape[1:], "a value has another type"
    _launch(rows, values, tables, writes=True)


@write_rows.register_fake
def _(tables, rows, values):
    return None
