"""Rows of several tables in one launch: a program copies a piece of one row of every table.

A row is read as the widest integers that divide its bytes, so that every dtype is one kernel; tables may
differ in width, and a piece beyond the end of a narrow one copies nothing.

Bytes: each row read and written once. A decode cycle's rows are some 10 KB a request: the launch is the cost.
"""

import torch
import triton
import triton.language as tl

from eagle_kit.kernels.aot import Variant
from eagle_kit.kernels.rows import MAX_TABLES

BLOCK = 512
"""Words of a table that a program copies."""
NUM_WARPS = 8
WIDTHS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit
def _copy(source, target, source_row, target_row, words, BLOCK: tl.constexpr):
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < words
    piece = tl.load(source + source_row * words + i, inside)
    tl.store(target + target_row * words + i, piece, inside)


@triton.jit
def _copy_rows(rows, s0, s1, s2, s3, s4, s5, s6, s7, t0, t1, t2, t3, t4, t5, t6, t7, n0, n1, n2, n3, n4, n5,
               n6, n7, COUNT: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    own = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + own)
    a, b = row, own
    if WRITES:
        a, b = own, row
    _copy(s0, t0, a, b, n0, BLOCK)
    if COUNT > 1:
        _copy(s1, t1, a, b, n1, BLOCK)
    if COUNT > 2:
        _copy(s2, t2, a, b, n2, BLOCK)
    if COUNT > 3:
        _copy(s3, t3, a, b, n3, BLOCK)
    if COUNT > 4:
        _copy(s4, t4, a, b, n4, BLOCK)
    if COUNT > 5:
        _copy(s5, t5, a, b, n5, BLOCK)
    if COUNT > 6:
        _copy(s6, t6, a, b, n6, BLOCK)
    if COUNT > 7:
        _copy(s7, t7, a, b, n7, BLOCK)


def _words(table: torch.Tensor) -> torch.Tensor:
    """View rows as the widest integers that divide their bytes."""
    rows = table.view(len(table), -1).view(torch.uint8)
    return rows.view(next(dtype for dtype in WIDTHS if rows.shape[1] % dtype.itemsize == 0))


def _launch(
    rows: torch.Tensor, sources: list[torch.Tensor], targets: list[torch.Tensor], writes: bool
) -> None:
    both = zip(sources, targets, strict=True)
    used = [pair for pair in both if pair[0].numel() and pair[1].numel()]  # a table may have no columns
    if not used or not len(rows):
        return
    pairs = [tuple(_words(table) for table in pair) for pair in used]
    sizes = [source.shape[1] for source, _ in pairs]
    padded = [*pairs, *[pairs[0]] * (MAX_TABLES - len(pairs))]
    _copy_rows[(len(rows), triton.cdiv(max(sizes), BLOCK))](
        rows, *(source for source, _ in padded), *(target for _, target in padded),
        *sizes, *[0] * (MAX_TABLES - len(sizes)), COUNT=len(pairs), WRITES=writes, BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )  # fmt: skip


def _gathered(tables: list[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
    return [table.new_empty(len(rows), *table.shape[1:]) for table in tables]


@torch.library.custom_op("eagle_kit::gather_rows", mutates_args=())
def gather_rows(tables: list[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
    """Rows ``rows [B]`` of contiguous tables ``[M, ...]``."""
    out = _gathered(tables, rows)
    _launch(rows, tables, out, writes=False)
    return out


@gather_rows.register_fake
def _(tables, rows):
    return _gathered(tables, rows)


@torch.library.custom_op("eagle_kit::write_rows", mutates_args=("tables",))
def write_rows(tables: list[torch.Tensor], rows: torch.Tensor, values: list[torch.Tensor]) -> None:
    """Write ``values [B, ...]`` to rows ``rows [B]`` of ``tables [M, ...]``, all contiguous."""
    for table, value in zip(tables, values, strict=True):
        assert table.dtype == value.dtype and table.shape[1:] == value.shape[1:], "a value has another type"
    _launch(rows, values, tables, writes=True)


@write_rows.register_fake
def _(tables, rows, values):
    return None


def variants() -> list[Variant]:
    """Kernels to compile ahead of time: the slots of a draft's cycle, gathered, and written back."""
    found = []
    for name, kinds, writes in (
        ("gather", ("i64", "i64", "i64", "i8", "i64", "i64", "i64"), False),
        ("write", ("i64", "i64", "i64", "i64", "i64"), True),
    ):
        padded = [*kinds, *[kinds[0]] * (MAX_TABLES - len(kinds))]
        types = {"rows": "*i64"}
        for letter in "st":
            types |= {f"{letter}{i}": f"*{kind}" for i, kind in enumerate(padded)}
        types |= {f"n{i}": "i32" for i in range(MAX_TABLES)}
        constants = {"COUNT": len(kinds), "WRITES": writes, "BLOCK": BLOCK}
        found.append(Variant(f"rows {name}", _copy_rows, types, constants, num_warps=NUM_WARPS))
    return found
