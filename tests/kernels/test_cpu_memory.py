"""Memory that is taken when it is used."""

import gc
import mmap
import sys
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
import torch
from torch._subclasses import FakeTensorMode

from eagle_kit.core.errors import UserError
from eagle_kit.kernels import cpu_memory
from eagle_kit.kernels.cpu_memory import promised_memory, zeros_when_used
from eagle_kit.kv.keys_values import PagedKV
from eagle_kit.kv.store import PoolLayout
from eagle_kit.serve.memory import free_memory

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
