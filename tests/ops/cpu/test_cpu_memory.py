"""Memory that is taken when it is used, and large pages."""

import gc
import mmap
import sys
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet

import pytest
import torch
from torch._subclasses import FakeTensorMode

from eagle_kit.core.errors import UserError
from eagle_kit.engine.memory.engine_memory import free_memory
from eagle_kit.kv.keys_values import PagedKV
from eagle_kit.kv.store import PoolLayout
from eagle_kit.ops.cpu import memory as cpu_memory
from eagle_kit.ops.cpu.memory import in_large_pages, promised_memory, zeros_when_used

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for resident memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("shape", [(3,), (3, 5000, 7), (0, 4)])
def test_zeros_that_can_be_written(shape, dtype):
    zeros = zeros_when_used(shape, dtype)
    assert zeros.shape == shape and zeros.dtype == dtype and zeros.is_contiguous()
    assert not zeros.float().any()
    ones = torch.ones(shape, dtype=dtype)
    zeros.copy_(ones)
    assert torch.equal(zeros.float(), ones.float())


@on_linux
def test_pages_take_memory_when_they_are_used_and_are_promised_until_then(monkeypatch):
    monkeypatch.setattr(cpu_memory, "_addresses", WeakKeyDictionary())  # engines of other tests come and go

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    huge_page = 1 << 21  # which may reach over what was written
    size, before = 1 << 27, resident()
    zeros = zeros_when_used((size,), torch.uint8)
    assert resident() - before < size // 8
    assert promised_memory() == size
    zeros[: size // 2].fill_(1)
    assert resident() - before > size // 4
    assert size // 2 - huge_page <= promised_memory() <= size // 2
    view = zeros[3:5]
    del zeros
    gc.collect()
    assert promised_memory() <= size // 2 and view.tolist() == [1, 1]
    del view
    gc.collect()
    assert promised_memory() == 0


@on_linux
def test_copies_lie_beside_each_other_as_long_as_one_of_them_is_used(monkeypatch):
    monkeypatch.setattr(cpu_memory, "_chunks", WeakSet())
    kinds = {torch.float32: (3, 70_001), torch.bfloat16: (5, 7), torch.int64: (1_000_003,)}
    given = [torch.arange(9 * 10**6).float().view(3, -1)]  # larger than a chunk
    given += [torch.arange(torch.Size(shape).numel()).view(shape).to(dtype) for dtype, shape in kinds.items()]
    copies = [in_large_pages(each) for each in given]
    for copy, each in zip(copies, given, strict=True):
        assert torch.equal(copy, each) and copy.dtype == each.dtype and copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0 and copy.data_ptr() != each.data_ptr()
    assert len(cpu_memory._chunks) == 1  # the first has one of its own
    starts = [copy.data_ptr() for copy in copies]
    assert starts[0] % (2 << 20) == starts[1] % (2 << 20) == 0
    assert 0 <= starts[2] - (starts[1] + given[1].nbytes) < 64
    copies[1].zero_()
    assert torch.equal(copies[2], given[2])
    row = copies[2][1]
    del copies, copy
    gc.collect()
    assert len(cpu_memory._chunks) == 1 and torch.equal(row, given[2][1])
    del row
    gc.collect()
    assert not cpu_memory._chunks


@on_linux
def test_without_large_pages_a_tensor_stays_where_it_is(monkeypatch):
    numbers, nothing = torch.arange(5.0), torch.zeros(0, 3)
    assert in_large_pages(nothing) is nothing
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)  # a kernel that knows no such advice
    monkeypatch.setattr(cpu_memory, "_chunks", WeakSet())
    assert in_large_pages(numbers) is numbers
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert in_large_pages(numbers) is numbers


@on_linux
def test_what_is_promised_is_not_free():
    """Else a second engine would be planned into the first one's pool."""
    size, before = 1 << 32, free_memory(torch.device("cpu"))
    pool = zeros_when_used((size,), torch.uint8)
    assert before - free_memory(torch.device("cpu")) > 0.9 * size
    del pool


def test_fake_zeros_are_fake():
    with FakeTensorMode() as mode:
        assert mode.is_our_fake(zeros_when_used((3, 5000, 7), torch.float32))


@on_linux
def test_a_pool_that_the_system_refuses_is_named():
    with pytest.raises(UserError, match="refuses 9007.*GB of memory for keys and values"):
        PagedKV(1, 1, 128, PoolLayout(1 << 40, 16, 1))
