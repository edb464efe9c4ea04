"""RMSNorm kernel against fp64, and its fake implementation."""

import pytest
import torch
from crossed import diagonal
from hypothesis import given
from hypothesis import strategies as st
from properties import SWEEP
from torch._subclasses import FakeTensorMode

from eagle_kit.ops.norm import add_rms_norm, rms_norm

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def expected(x, weight, eps):
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def assert_normed(shape, dtype, device):
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(shape, generator=generator).to(dtype).to(device) for _ in range(2))
    weight = torch.randn(shape[-1], generator=generator).to(dtype).to(device)
    out = rms_norm(x, weight, 1e-5, backend="triton")
    assert out.dtype == dtype and out.shape == x.shape
    rtol = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected(x, weight, 1e-5), rtol=rtol, atol=rtol)
    out, total = add_rms_norm(x, residual, weight, 1e-5, backend="triton")
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(out.double(), expected(total, weight, 1e-5), rtol=rtol, atol=rtol)


@diagonal(("dtype", TOLERANCE), ("shape", [(1, 1), (3, 5), (2, 3, 64), (7, 576), (2, 1025)]))
def test_the_kernel_computes_the_norm(triton_device, dtype, shape):
    assert_normed(shape, dtype, triton_device)


@SWEEP
@given(rows=st.integers(1, 9), size=st.integers(1, 1100), dtype=st.sampled_from(list(TOLERANCE)))
def test_the_norm_of_any_size(triton_device, rows, size, dtype):
    assert_normed((rows, size), dtype, triton_device)


@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_round_where_the_reference_rounds(triton_device, dtype, weight_dtype):
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(16, 96, generator=generator), torch.randn(96, generator=generator)
    x, weight = x.to(dtype).to(triton_device), weight.to(weight_dtype or dtype).to(triton_device)
    ours, theirs = (rms_norm(x, weight, 1e-6, backend=name).to(dtype) for name in ("triton", "reference"))
    assert (ours != theirs).float().mean() < 0.02  # a sum in another order may fall on the other side


def test_no_row_and_strided_rows(triton_device):
    weight = torch.ones(8, device=triton_device)
    assert rms_norm(torch.ones(0, 8, device=triton_device), weight, 1e-5, backend="triton").shape == (0, 8)
    x = torch.arange(32.0, device=triton_device).view(8, 4).T
    ours, theirs = (rms_norm(x, weight, 1e-5, backend=name) for name in ("triton", "reference"))
    torch.testing.assert_close(ours, theirs)


def test_fake_tensors_pass():
    pytest.importorskip("triton")
    with FakeTensorMode():
        x, weight = torch.ones(3, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
        out, total = add_rms_norm(x, x, weight, 1e-5, backend="triton")
        assert out.shape == total.shape == (3, 8) and out.dtype == torch.bfloat16
        assert rms_norm(x, weight, 1e-5, backend="triton").shape == (3, 8)
