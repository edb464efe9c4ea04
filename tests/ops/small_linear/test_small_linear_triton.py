"""Kernels of small linear layers against fp64, and their fake implementation."""

from itertools import product

import pytest
import torch
from crossed import crossed, diagonal
from hypothesis import given
from hypothesis import strategies as st
from properties import SWEEP
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_kit.models.blocks.layers import MLP
from eagle_kit.ops.backend import use
from eagle_kit.ops.capability import facts_of
from eagle_kit.ops.fp8 import E4M3, FP8Weight, quantize_fp8
from eagle_kit.ops.linear.backends import use_backends
from eagle_kit.ops.small_linear import fits_triton, small_linear, small_linear_swiglu
from eagle_kit.ops.swiglu import swiglu

EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half the relative distance of neighbouring numbers: the result is rounded once."""


@pytest.fixture
def kernels(triton_device):
    """Kernel module, with uninitialised memory poisoned."""
    from eagle_kit.ops.small_linear import triton

    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield triton
    torch.use_deterministic_algorithms(False)


def make(m, n, k, dtype, device):
    generator = torch.Generator().manual_seed(m * n + k)
    tensors = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    return [x.to(dtype).to(device) for x in (*tensors, torch.randn(n, generator=generator))]


def check_bits(out, expected):
    """Assert equal bits; interpreted, numpy's matmul adds up tiles of another width in another order on some
    CPUs, so that one value in a hundred may be rounded otherwise."""
    different = out != expected
    assert int(different.sum()) <= (0 if out.is_cuda else out.numel() // 100)
    torch.testing.assert_close(out[different], expected[different], rtol=4 * EPSILON[out.dtype], atol=1e-6)


def check(out, x, weight, bias, dtype):
    """Assert an error of one rounding and of the fp32 sums before it; ``weight`` is in fp64."""
    x, bias = x.double(), 0 if bias is None else bias.double()
    expected = x @ weight.T + bias
    summed = x.abs() @ weight.abs().T
    assert out.dtype == dtype and out.shape == expected.shape
    assert ((out.double() - expected).abs() <= expected.abs() * EPSILON[dtype] + summed * 2e-6 + 1e-7).all()


SHAPES = [
    pytest.param(1, 1, 1, id="one number"),
    pytest.param(1, 64, 128, id="one block"),
    pytest.param(16, 65, 129, id="one beyond"),
    pytest.param(17, 127, 500, id="primes and two rows too many"),
    pytest.param(33, 20, 1152, id="few outputs, many inputs"),
    pytest.param(64, 70, 640, id="64 rows"),
]


@diagonal(("dtype", EPSILON), ("m, n, k", SHAPES))
def test_the_product_and_the_bias(triton_device, kernels, m, n, k, dtype):
    x, weight, bias = make(m, n, k, dtype, triton_device)
    for b in (None, bias):
        check(small_linear(x, weight, b, backend="triton"), x, weight.double(), b, dtype)


def in_fp8(weight, block):
    """Weight ``[N, K]`` in e4m3 with random scales of ``block``, or of each row, and what it is in fp64."""
    n, k = weight.shape
    if block is None:
        held = quantize_fp8(weight * torch.logspace(-3, 2, n, device=weight.device)[:, None])
        return held, held.values.double() * held.scales.double()
    generator = torch.Generator().manual_seed(n + k)
    scales = torch.randn(-(-n // block[0]), -(-k // block[1]), generator=generator).exp()
    scales = (scales / 16).to(weight.device)  # products stay within fp16
    values = (weight.float() * 100).clamp(-448, 448).to(E4M3)
    i, j = torch.arange(n)[:, None] // block[0], torch.arange(k)[None] // block[1]
    return FP8Weight(values, scales, block), values.double() * scales.double()[i, j]


ROWS_AND_SIZES = [(1, 1, 1), (1, 64, 128), (5, 65, 129), (16, 127, 500), (33, 130, 390), (64, 70, 640)]
BLOCKS = [
    pytest.param(None, id="scales of rows"),
    pytest.param((128, 128), id="DeepSeek's blocks"),
    pytest.param((1, 128), id="blocks of a row"),
    pytest.param((48, 256), id="other blocks"),
]


@diagonal(("m, n, k", ROWS_AND_SIZES), ("dtype", EPSILON), ("block", BLOCKS))
def test_fp8_weights(triton_device, kernels, m, n, k, block, dtype):
    x, weight, bias = make(m, n, k, dtype, triton_device)
    held, exact = in_fp8(weight, block)
    bias = bias if m % 2 else None
    check(small_linear(x, held, bias, backend="triton"), x, exact, bias, dtype)


@SWEEP
@given(
    m=st.integers(1, 64),
    n=st.integers(1, 150),
    k=st.integers(1, 700),
    block=st.sampled_from(("none", None, (128, 128), (1, 128), (48, 256))),
    dtype=st.sampled_from(list(EPSILON)),
)
def test_products_of_any_size(triton_device, kernels, m, n, k, block, dtype):
    """With weights of ``dtype``, where the block is "none", and of fp8."""
    x, weight, bias = make(m, n, k, dtype, triton_device)
    held, exact = (weight, weight.double()) if block == "none" else in_fp8(weight, block)
    bias = bias if m % 2 else None
    check(small_linear(x, held, bias, backend="triton"), x, exact, bias, dtype)


@crossed(("block", BLOCKS[:2]), ("dtype", EPSILON))
def test_a_gpu_without_e4m3_takes_its_bits(triton_device, kernels, monkeypatch, block, dtype):
    """Every finite number that e4m3 has, subnormal ones and both zeros among them."""
    monkeypatch.setattr(kernels, "device_facts", lambda device: facts_of(80))
    x, weight, _ = make(5, 130, 300, dtype, triton_device)
    held, _ = in_fp8(weight, block)
    numbers = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    values = numbers.repeat(154)[: 130 * 300].view(130, 300).to(triton_device).view(E4M3)
    held = held._replace(values=values)
    check(small_linear(x, held, backend="triton"), x, held.dense(torch.float64), None, dtype)
    with pytest.raises(Exception, match="NoneType"):  # so that it is the bits that were taken
        monkeypatch.setattr(kernels, "widened", None)
        small_linear(x, held, backend="triton")


@crossed(("splits", [1, 2, 3, 5]), ("kind", ["plain", None, (128, 128)]))
def test_every_number_of_runs_and_the_same_bits_twice(triton_device, kernels, monkeypatch, splits, kind):
    """Five tiles: runs of unequal length, and with S = 3 runs of 2, 2 and 1."""
    monkeypatch.setattr(kernels, "choose_splits", lambda *_: splits)
    x, weight, bias = make(3, 70, 600, torch.bfloat16, triton_device)
    held, exact = (weight, weight.double()) if kind == "plain" else in_fp8(weight, kind)
    out = small_linear(x, held, bias, backend="triton")
    check(out, x, exact, bias, torch.bfloat16)
    assert torch.equal(out, small_linear(x, held, bias, backend="triton"))


@crossed(
    ("m, half, k", [(1, 1, 1), (1, 32, 128), (17, 37, 300), (64, 65, 130)]),
    ("splits, dtype", product([1, 3], EPSILON)),
)
def test_swiglu_within_the_matmul_has_the_bits_of_both(
    triton_device, kernels, monkeypatch, m, half, k, dtype, splits
):
    """And is near fp64: gate, up, silu and the result are rounded once each."""
    monkeypatch.setattr(kernels, "choose_splits", lambda *_: splits)
    x, weight, bias = make(m, 2 * half, k, dtype, triton_device)
    weight = weight * k**-0.5
    for b in (None, bias):
        out = small_linear_swiglu(x, weight, b, backend="triton")
        check_bits(out, swiglu(small_linear(x, weight, b, backend="triton"), backend="triton"))
        gate, up = (x.double() @ weight.double().T + (0 if b is None else b.double())).chunk(2, -1)
        exact = gate / (1 + torch.exp(-gate)) * up
        assert ((out.double() - exact).abs() <= 5 * EPSILON[dtype] * (gate.abs() + 1) * (up.abs() + 1)).all()


@crossed(("splits", [1, 3]), ("block", BLOCKS), ("m, half, k", [(1, 32, 128), (33, 200, 300)]))
def test_swiglu_within_the_matmul_of_fp8_weights_has_the_bits_of_both(
    triton_device, kernels, monkeypatch, m, half, k, block, splits
):
    monkeypatch.setattr(kernels, "choose_splits", lambda *_: splits)
    x, weight, bias = make(m, 2 * half, k, torch.bfloat16, triton_device)
    held, _ = in_fp8(weight, block)
    held = held._replace(scales=held.scales * (0.01 * k**-0.5))
    for b in (None, bias):
        out = small_linear_swiglu(x, held, b, backend="triton")
        check_bits(out, swiglu(small_linear(x, held, b, backend="triton"), backend="triton"))
        assert out.isfinite().all() and out.abs().max() > 0


@pytest.mark.parametrize(
    ("form", "names"),
    [("triton", ["small_linear_swiglu", "small_linear"]), ("torch", ["mm", "swiglu", "mm"])],
)
def test_an_mlp_activates_within_its_matmul_where_that_is_triton_s(triton_device, kernels, form, names):
    """As it was measured at warm-up (``engine/measured/linear_backends.py``)."""
    mlp = MLP(48, 40).to(torch.bfloat16).to(triton_device).requires_grad_(False)
    seen = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._schema.name.split("::")[1])
            return func(*args, **(kwargs or {}))

    with use("triton"), use_backends(lambda size: form), Names():
        out = mlp(make(3, 1, 48, torch.bfloat16, triton_device)[0])
    assert out.shape == (3, 48)
    assert [name for name in seen if name in {"mm", "swiglu", "small_linear", "small_linear_swiglu"}] == names


def test_runs_without_tiles_add_nothing(triton_device, kernels, monkeypatch):
    monkeypatch.setattr(kernels, "choose_splits", lambda *_: 4)
    x, weight, _ = make(2, 5, 130, torch.float16, triton_device)  # two tiles
    check(small_linear(x, weight, backend="triton"), x, weight.double(), None, torch.float16)


def test_nothing_beyond_the_operands_is_read(triton_device, kernels):
    """Rows of a wider matrix, with NaN behind each and below the last."""
    around = torch.full((75, 200), float("nan"), dtype=torch.bfloat16, device=triton_device)
    x, weight, _ = make(5, 70, 150, torch.bfloat16, triton_device)
    around[:70, :150] = weight
    check(small_linear(x, around[:70, :150], backend="triton"), x, weight.double(), None, torch.bfloat16)
    around[:5, :150] = x
    strided = around[:5, :150]
    assert not strided.is_contiguous()
    check(small_linear(strided, weight, backend="triton"), x, weight.double(), None, torch.bfloat16)


def test_no_row_and_extreme_values(triton_device, kernels):
    x, weight, _ = make(2, 9, 40, torch.bfloat16, triton_device)
    assert small_linear(x[:0], weight, backend="triton").shape == (0, 9)
    x[0] = float("inf")
    out = small_linear(x, weight.abs(), backend="triton")
    assert (out[0] == float("inf")).all() and out[1].isfinite().all()
    big = torch.full((1, 64), 60000.0, dtype=torch.float16, device=triton_device)
    ones = torch.ones(1, 64, dtype=torch.float16, device=triton_device)
    ones[:, ::2] = -1
    assert small_linear(big, ones, backend="triton").item() == 0  # the sum passes 65504 on its way


def test_too_many_rows_are_refused_when_asked_for(triton_device, kernels):
    x, weight, _ = make(65, 4, 16, torch.bfloat16, triton_device)
    with pytest.raises(AssertionError):
        small_linear(x, weight, backend="triton")
    assert small_linear(x, quantize_fp8(weight)).shape == (65, 4)


def test_fp8_weights_that_do_not_fit(triton_device, kernels):
    x, weight, _ = make(4, 64, 256, torch.bfloat16, triton_device)
    assert fits_triton(x, in_fp8(weight, (128, 128))[0]) and fits_triton(x, in_fp8(weight, None)[0])
    assert not fits_triton(x, in_fp8(weight, (64, 64))[0]), "a tile would have scales of two blocks"
    assert not fits_triton(x.float(), in_fp8(weight, None)[0])
    held = in_fp8(weight, (128, 128))[0]
    with pytest.raises(AssertionError):
        small_linear(x, held._replace(scales=held.scales[:, :1].contiguous()), backend="triton")


def test_the_kernel_takes_few_rows_of_half_types_without_gradients(triton_device):
    x, weight, bias = make(64, 16, 16, torch.bfloat16, triton_device)
    held = quantize_fp8(weight)
    for each in (weight, held):
        assert fits_triton(x, each, bias)
        assert not fits_triton(make(65, 16, 16, torch.bfloat16, triton_device)[0], each)
        assert not fits_triton(x[None], each)
        assert not fits_triton(x.detach().requires_grad_(), each)
        assert not fits_triton(x, each, bias.detach().requires_grad_())
        assert not fits_triton(x.float(), each)
        with torch.autocast(triton_device, torch.bfloat16):
            assert not fits_triton(x, each)
    assert not fits_triton(x, weight.half())
    assert not fits_triton(x, weight.t())
    assert not fits_triton(x, weight.detach().requires_grad_())
    with torch.no_grad():
        assert fits_triton(x.detach().requires_grad_(), weight)


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
def test_equals_the_reference(triton_device, kernels, dtype):
    x, weight, bias = make(7, 48, 320, dtype, triton_device)
    ours, theirs = (small_linear(x, weight, bias, backend=name) for name in ("triton", "reference"))
    torch.testing.assert_close(ours, theirs, rtol=4 * EPSILON[dtype], atol=4 * EPSILON[dtype])
    for held in (quantize_fp8(weight), in_fp8(weight, (128, 128))[0]):
        ours, theirs = (small_linear(x, held, bias, backend=name) for name in ("triton", "reference"))
        atol = theirs.abs().max().item() * 2 * EPSILON[dtype]
        torch.testing.assert_close(ours, theirs, rtol=4 * EPSILON[dtype], atol=atol)


def test_the_operator_is_registered_as_it_behaves(triton_device, kernels):
    x, weight, bias = make(3, 10, 20, torch.bfloat16, triton_device)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernels.small_linear.overload, (x, weight, None, bias, []), test_utils=checks)
    for block in (None, (128, 128)):  # the check of schemas cannot compare fp8
        held, _ = in_fp8(weight, block)
        arguments = (x, held.values, held.scales, None, list(block or ()))
        torch.library.opcheck(kernels.small_linear.overload, arguments, test_utils=checks[1:])
        torch.library.opcheck(kernels.small_linear_swiglu.overload, arguments, test_utils=checks[1:])


def test_fake_tensors_pass():
    pytest.importorskip("triton")
    with FakeTensorMode():
        x, weight = torch.ones(3, 32, dtype=torch.bfloat16), torch.ones(8, 32, dtype=torch.bfloat16)
        for backend in ("triton", "reference"):
            assert small_linear(x, weight, backend=backend).shape == (3, 8)
            out = small_linear(x, quantize_fp8(weight), weight[:, 0], backend=backend)
            assert out.shape == (3, 8) and out.dtype == torch.bfloat16


def test_runs_fill_the_gpu():
    from eagle_kit.ops.small_linear.triton import choose_splits

    assert choose_splits(64, 32, 264) == 4  # 4096 x 4096: 256 of 264 programs
    assert choose_splits(448, 32, 264) == 1  # 28672 x 4096
    assert choose_splits(1, 1, 264) == 1 and choose_splits(1, 1000, 264) == 32


def test_rows_are_computed_in_blocks():
    pytest.importorskip("triton")
    from eagle_kit.ops.small_linear.triton import row_bucket

    assert [row_bucket(m) for m in (0, 1, 16, 17, 32, 33, 64, 65)] == [16, 16, 16, 32, 32, 64, 64, 128]
