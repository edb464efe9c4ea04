"""Rows of several tables at once: the kernel against torch's indexing, table by table."""

import pytest
import torch

from eagle_kit.ops.rows import gather_rows, write_rows


def _tables(device):
    generator = torch.Generator().manual_seed(3)
    shapes = {
        torch.int64: (9, 13), torch.bool: (9,), torch.float32: (9, 5), torch.bfloat16: (9, 3, 701),
        torch.float16: (9, 0),
    }  # fmt: skip
    drawn = [(torch.randn(shape, generator=generator) * 9).to(kind) for kind, shape in shapes.items()]
    return [table.to(device) for table in (*drawn, torch.arange(9) * 2**40)]


@pytest.mark.parametrize("rows", [[4], [8, 0, 8, 3, 1]])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_rows_are_gathered_as_torch_gathers_them(rows, count, triton_device):
    tables = _tables(triton_device)[:count]
    rows = torch.tensor(rows, device=triton_device)
    found = gather_rows(tables, rows, backend="triton")
    for table, got, expected in zip(tables, found, gather_rows(tables, rows), strict=True):
        assert got.dtype == table.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize("rows", [[4], [8, 0, 3, 1]])
def test_rows_are_written_and_no_others(rows, triton_device):
    tables, expected = _tables(triton_device), _tables(triton_device)
    rows = torch.tensor(rows, device=triton_device)
    values = [table.flip(0)[: len(rows)] for table in tables]
    write_rows(tables, rows, values, backend="triton")
    write_rows(expected, rows, values, backend="reference")
    for got, exact in zip(tables, expected, strict=True):
        assert torch.equal(got, exact)


def test_a_value_of_another_dtype_is_refused(triton_device):
    table, rows = torch.zeros(4, 2, device=triton_device), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(AssertionError, match="another type"):
        write_rows([table], rows.to(triton_device), [table[:1].double()], backend="triton")
