"""SwiGLU kernels against fp64 and against the reference, forward and backward."""

import pytest
import torch
from crossed import diagonal
from hypothesis import given
from hypothesis import strategies as st
from properties import SWEEP
from torch._subclasses import FakeTensorMode

from eagle_kit.ops.swiglu import swiglu

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill new memory with NaN, so that elements that are never written are noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(shape, dtype, device, scale=1.0):
    generator = torch.Generator().manual_seed(1)
    gate_up = (scale * torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)).to(dtype).to(device)
    return gate_up, torch.randn(shape, generator=generator).to(dtype).to(device)


def expected(gate_up, d_out):
    """Output and gradient in fp64, the gradient by the product rule."""
    gate, up = gate_up.double().chunk(2, -1)
    d, sigmoid = d_out.double(), torch.sigmoid(gate)
    d_gate = d * up * (sigmoid + gate * sigmoid * (1 - sigmoid))
    return gate * sigmoid * up, torch.cat((d_gate, d * gate * sigmoid), -1)


def forward_and_backward(gate_up, d_out, backend):
    gate_up = gate_up.clone().requires_grad_()
    out = swiglu(gate_up, backend=backend)
    (gradient,) = torch.autograd.grad(out, gate_up, d_out)
    return out.detach(), gradient


def assert_computed(shape, dtype, device):
    gate_up, d_out = inputs(shape, dtype, device)
    ours = forward_and_backward(gate_up, d_out, "triton")
    theirs = forward_and_backward(gate_up, d_out, "reference")
    for mine, reference, right in zip(ours, theirs, expected(gate_up, d_out), strict=True):
        assert mine.dtype == dtype and mine.shape == right.shape
        torch.testing.assert_close(mine.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        if dtype != torch.float32:  # rounded where the reference rounds
            assert (mine != reference).float().mean() < 0.01


@diagonal(("dtype", TOLERANCE), ("shape", [(1, 1), (3, 7), (2, 3, 64), (2, 1024), (2, 1271), (1, 2049)]))
def test_the_kernels_compute_output_and_gradient(triton_device, dtype, shape):
    assert_computed(shape, dtype, triton_device)


@SWEEP
@given(rows=st.integers(1, 5), size=st.integers(1, 2100), dtype=st.sampled_from(list(TOLERANCE)))
def test_output_and_gradient_of_any_size(triton_device, rows, size, dtype):
    assert_computed((rows, size), dtype, triton_device)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_large_gates_neither_overflow_nor_turn_into_nan(triton_device, dtype):
    gate = torch.tensor([-1e4, -200.0, -90.0, -88.0, -30.0, -0.0, 0.0, 30.0, 90.0, 1e4])
    gate_up = torch.cat((gate, torch.full_like(gate, 0.5))).to(dtype).to(triton_device)[None]
    d_out = torch.ones(1, 10, dtype=dtype, device=triton_device)
    ours = forward_and_backward(gate_up, d_out, "triton")
    for mine, right in zip(ours, expected(gate_up, d_out), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=TOLERANCE[dtype], atol=1e-7)


def test_no_row_strided_inputs_and_expanded_gradients(triton_device):
    assert swiglu(torch.ones(0, 8, device=triton_device), backend="triton").shape == (0, 4)
    gate_up = torch.linspace(-4, 4, 48, device=triton_device).view(8, 6).T
    d_out = torch.full((1, 1), 0.3, device=triton_device).expand(6, 4)
    ours, theirs = (forward_and_backward(gate_up, d_out, name) for name in ("triton", "reference"))
    torch.testing.assert_close(ours, theirs)


def test_fake_tensors_pass():
    pytest.importorskip("triton")
    with FakeTensorMode():
        gate_up = torch.ones(3, 8, dtype=torch.bfloat16, requires_grad=True)
        out = swiglu(gate_up, backend="triton")
        assert out.shape == (3, 4) and out.dtype == torch.bfloat16
        (gradient,) = torch.autograd.grad(out, gate_up, torch.ones_like(out))
        assert gradient.shape == (3, 8)


def test_the_operators_declare_what_they_do(triton_device):
    from eagle_kit.ops.swiglu import triton

    gate_up, d_out = inputs((2, 4), torch.float32, triton_device)
    torch.library.opcheck(
        triton.swiglu.overload,
        (gate_up.requires_grad_(),),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    torch.library.opcheck(
        triton.swiglu_backward.overload,
        (d_out, gate_up.detach()),
        test_utils=("test_schema", "test_faketensor"),
    )
