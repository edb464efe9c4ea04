"""Gradients of the RMSNorm kernels against autograd in fp64."""

from itertools import product

import pytest
import torch
from crossed import diagonal
from hypothesis import given
from hypothesis import strategies as st
from properties import SWEEP
from torch._subclasses import FakeTensorMode

from eagle_kit.ops.norm import add_rms_norm, rms_norm

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = [(1, 1), (3, 5), (2, 3, 64), (41, 96), (7, 577)]


def expected(x, residual, weight, eps):
    total = x + residual
    return total / (total.square().mean(-1, keepdim=True) + eps).sqrt() * weight, total


def close(name, ours, theirs, tolerance):
    size = theirs.abs().max().clamp(min=1.0)
    error = ((ours.double() - theirs).abs().max() / size).item()
    assert error <= tolerance, f"{name}: {error}"  # NaN fails too


def make(shape, dtype, weight_dtype, device):
    by = torch.Generator().manual_seed(3)
    x, residual, dy, dt = (torch.randn(shape, generator=by).to(dtype).to(device) for _ in range(4))
    weight = (1 + torch.randn(shape[-1], generator=by)).to(weight_dtype).to(device)
    return [t.requires_grad_() for t in (x, residual, weight)], (dy, dt)


def assert_gradients(shape, dtype, weight_dtype, device):
    inputs, ups = make(shape, dtype, weight_dtype or dtype, device)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    outs, wanted_outs = add_rms_norm(*inputs, 1e-5, backend="triton"), expected(*exact, 1e-5)
    got = torch.autograd.grad(outs, inputs, ups)
    wanted = torch.autograd.grad(wanted_outs, exact, [up.double() for up in ups])
    for name, ours, theirs, like in zip(("dx", "dresidual", "dw"), got, wanted, inputs, strict=True):
        close(name, ours, theirs, TOLERANCE[dtype] * (4 if dtype != torch.float32 else 1))
        assert ours.dtype == like.dtype and ours.shape == like.shape
    x, _, weight = inputs
    got = torch.autograd.grad(rms_norm(x, weight, 1e-5, backend="triton"), (x, weight), ups[0])
    alone, _ = expected(exact[0], 0.0, exact[2], 1e-5)
    wanted = torch.autograd.grad(alone, (exact[0], exact[2]), ups[0].double())
    for name, ours, theirs in zip(("dx", "dw"), got, wanted, strict=True):
        close(name, ours, theirs, TOLERANCE[dtype] * (4 if dtype != torch.float32 else 1))


@diagonal(("shape", SHAPES), ("dtype, weight_dtype", product(TOLERANCE, [None, torch.float32])))
def test_gradients(triton_device, shape, dtype, weight_dtype):
    assert_gradients(shape, dtype, weight_dtype, triton_device)


@pytest.mark.nightly
@SWEEP
@given(
    rows=st.integers(1, 140),
    size=st.integers(1, 130),
    dtype=st.sampled_from(list(TOLERANCE)),
    weight_dtype=st.sampled_from((None, torch.float32)),
)
def test_gradients_of_any_size(triton_device, rows, size, dtype, weight_dtype):
    assert_gradients((rows, size), dtype, weight_dtype, triton_device)


def test_rows_of_one_program_add_up_and_the_bits_are_the_same_every_time(triton_device, monkeypatch):
    from eagle_kit.ops.norm import triton_backward

    monkeypatch.setattr(triton_backward, "_num_programs", lambda *args: 3)
    inputs, ups = make((17, 24), torch.float32, torch.float32, triton_device)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    wanted = torch.autograd.grad(expected(*exact, 1e-5), exact, [up.double() for up in ups])
    runs = [torch.autograd.grad(add_rms_norm(*inputs, 1e-5, backend="triton"), inputs, ups) for _ in range(2)]
    for first, second, theirs in zip(*runs, wanted, strict=True):
        assert torch.equal(first, second)
        close("gradient", first, theirs, 3e-6)


def test_it_is_exact_under_autocast(triton_device):
    inputs, ups = make((9, 40), torch.float32, torch.float32, triton_device)
    plain = torch.autograd.grad(add_rms_norm(*inputs, 1e-5, backend="triton"), inputs, ups)
    with torch.autocast(triton_device, torch.bfloat16):
        outs = add_rms_norm(*inputs, 1e-5, backend="triton")
        cast = torch.autograd.grad(outs, inputs, ups)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_a_residual_of_another_dtype(triton_device):
    (x, residual, weight), ups = make((5, 8), torch.float32, torch.float32, triton_device)
    x = x.detach().bfloat16().requires_grad_()
    out, total = add_rms_norm(x, residual, weight, 1e-5, backend="triton")
    wanted, sum_of = add_rms_norm(x, residual, weight, 1e-5, backend="reference")
    torch.testing.assert_close((out, total), (wanted, sum_of))
    got, theirs = (torch.autograd.grad(y, (x, residual, weight), ups[0]) for y in (out, wanted))
    torch.testing.assert_close(got, theirs, rtol=1e-5, atol=1e-5)


def test_no_row_and_a_strided_gradient(triton_device):
    x = torch.ones(0, 8, device=triton_device, requires_grad=True)
    weight = torch.ones(8, device=triton_device, requires_grad=True)
    dx, dw = torch.autograd.grad(rms_norm(x, weight, 1e-5, backend="triton").sum(), (x, weight))
    assert dx.shape == (0, 8) and (dw == 0).all()
    y = torch.arange(24.0, device=triton_device).view(8, 3).T.requires_grad_()
    ours, theirs = (
        torch.autograd.grad(rms_norm(y, weight, 1e-5, backend=name).sum(), (y, weight))
        for name in ("triton", "reference")
    )
    torch.testing.assert_close(ours, theirs)


def test_the_operations_keep_the_rules_of_custom_operations(triton_device):
    from eagle_kit.ops.norm import triton_backward

    (x, residual, weight), _ = make((4, 12), torch.float32, torch.float32, triton_device)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(triton_backward.rms_norm.overload, (x, weight, 1e-5), test_utils=utils)
    torch.library.opcheck(
        triton_backward.add_rms_norm.overload, (x, residual, weight, 1e-5), test_utils=utils
    )


def test_fake_tensors_pass():
    pytest.importorskip("triton")
    with FakeTensorMode():
        x, weight = torch.ones(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
        out, total = add_rms_norm(x, x, weight, 1e-5, backend="triton")
        assert [g.shape for g in torch.autograd.grad((out + total).sum(), (x, weight))] == [(3, 8), (8,)]
