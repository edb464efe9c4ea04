"""Rows of several tables at once, by C++ against torch's indexing, table by table."""

import pytest
import torch

from eagle_kit.ops.cpu import cpp
from eagle_kit.ops.rows import append_rows, gather_rows, write_rows

pytestmark = pytest.mark.skipif(not cpp.available(), reason="needs a C++ compiler")


def make_tables(*entries: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        torch.int64: (13,), torch.bool: (), torch.float32: (5,), torch.bfloat16: (3, 71), torch.float16: (0,),
    }  # fmt: skip
    drawn = [
        (torch.randn((9, *entries, *shape), generator=generator) * 9).to(kind)
        for kind, shape in shapes.items()
    ]
    return [*drawn, (torch.arange(9) * 2**40).view(9, *[1] * len(entries)).repeat(1, *entries)]


@pytest.mark.parametrize("rows", [[], [4], [8, 0, 8, 3, 1]])
def test_rows_are_gathered_as_torch_gathers_them(rows):
    tables, rows = make_tables(), torch.tensor(rows, dtype=torch.int64)
    found = gather_rows(tables, rows, backend="cpp")
    for table, got in zip(tables, found, strict=True):
        assert got.dtype == table.dtype and torch.equal(got, table[rows])


@pytest.mark.parametrize("rows", [[4], [8, 0, 3, 1]])
def test_rows_are_written_and_no_others(rows):
    tables, expected, rows = make_tables(), make_tables(), torch.tensor(rows)
    values = [table.flip(0)[: len(rows)] for table in tables]
    write_rows(tables, rows, values, backend="cpp")
    write_rows(expected, rows, values, backend="reference")
    assert all(torch.equal(got, exact) for got, exact in zip(tables, expected, strict=True))


def test_entries_are_written_behind_those_that_a_row_has():
    """A row that is full keeps its number of entries, and has its last one overwritten."""
    both, rows, added = [], torch.tensor([7, 2, 4]), torch.tensor([1, 1, 0])
    for backend in ("cpp", "reference"):
        tables, counts = make_tables(4), torch.tensor([0, 0, 2, 0, 1, 0, 0, 4, 3])
        values = [table.flip(0)[:3, 0] for table in make_tables(4)]
        append_rows(tables, counts, rows, values, added, backend=backend)
        both.append((tables, counts))
    assert all(torch.equal(got, exact) for got, exact in zip(both[0][0], both[1][0], strict=True))
    assert both[0][1].tolist() == both[1][1].tolist() == [0, 0, 3, 0, 1, 0, 0, 5, 3]
    before, after = make_tables(4)[0], both[0][0][0]
    changed = [(r, n) for r in range(9) for n in range(4) if not torch.equal(before[r, n], after[r, n])]
    assert changed == [(2, 2), (4, 1), (7, 3)]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda ops, t, one: ops.gather_rows([t], one + 4), "there is no such row"),
        (lambda ops, t, one: ops.gather_rows([t], -one), "there is no such row"),
        (lambda ops, t, one: ops.write_rows([t], one, [t[:1].double()]), "values do not fit"),
        (lambda ops, t, one: ops.write_rows([t], one, [t[:2]]), "values do not fit"),
        (lambda ops, t, one: ops.write_rows([t], one, []), "values of each table"),
        (
            lambda ops, t, one: ops.append_rows([t[:, :0]], torch.zeros(4).long(), one, [t[:1, 0]], one),
            "all rows",
        ),
        (lambda ops, t, one: ops.append_rows([t], torch.zeros(3).long(), one, [t[:1, 0]], one), "all rows"),
    ],
)
def test_what_does_not_fit_is_refused(run, message):
    with pytest.raises(RuntimeError, match=message):
        run(torch.ops.eagle_kit_cpp, torch.zeros(4, 2), torch.ones(1, dtype=torch.int64))
