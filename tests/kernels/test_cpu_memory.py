"""Memory that is taken when it is used."""

import resource
import sys

import pytest
import torch

from eagle_kit.kernels.cpu_memory import zeros_when_used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("shape", [(3,), (3, 5000, 7), (0, 4)])
def test_zeros_that_can_be_written(shape, dtype):
    zeros = zeros_when_used(shape, dtype)
    assert zeros.shape == shape and zeros.dtype == dtype and zeros.is_contiguous()
    assert not zeros.float().any()
    ones = torch.ones(shape, dtype=dtype)
    zeros.copy_(ones)
    assert torch.equal(zeros.float(), ones.float())


@pytest.mark.skipif(sys.platform != "linux", reason="counts pages as Linux does")
def test_pages_take_memory_when_they_are_used():
    def pages_faulted():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    size, before = 1 << 26, pages_faulted()
    zeros = zeros_when_used((size,), torch.uint8)
    untouched = pages_faulted() - before
    zeros.fill_(1)
    assert untouched < 100 < pages_faulted() - before
