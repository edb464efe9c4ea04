"""Linear layers: oneDNN and padded rows against torch, their gradients, and oneDNN's independence of the
number of rows."""

import time

import pytest
import torch
from versions import needs

from eagle_kit.ops.fp8 import FP8Weight, quantize_fp8
from eagle_kit.ops.linear import (
    FP8Linear,
    Linear,
    fp8,
    linear,
    onednn,
    pack_merged,
    pack_weights,
    packed_parts,
    padded,
)

needs_onednn = pytest.mark.skipif(not onednn.available(), reason="this torch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("rows", [1, 2, 3, 401])
def test_onednn_equals_torch_forward_and_backward(rows):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 37, generator=generator, requires_grad=True)
    w = torch.randn(71, 37, generator=generator, requires_grad=True)
    b = torch.randn(71, generator=generator, requires_grad=True)
    dy = torch.randn(rows, 71, generator=generator)
    expected = torch.autograd.grad(linear(x, w, b, backend="torch"), (x, w, b), dy)
    y = linear(x, w, b, backend="onednn")
    torch.testing.assert_close(y, x @ w.t() + b, atol=1e-4, rtol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(y, (x, w, b), dy), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [65, 100, 128, 191])
def test_padded_rows_change_no_value_and_no_gradient(rows, with_bias):
    """In fp32, where the only difference is the order of sums; the weight's gradient sums over rows."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 37, generator=generator, requires_grad=True)
    w = torch.randn(71, 37, generator=generator, requires_grad=True)
    b = torch.randn(71, generator=generator, requires_grad=True) if with_bias else None
    inputs = (x, w) if b is None else (x, w, b)
    dy = torch.randn(rows, 71, generator=generator)
    expected = linear(x, w, b, backend="torch")
    y = padded.linear(x, w, b)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    pairs = zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_rows_are_padded_where_a_matmul_is_in_half_precision_on_a_cpu():
    x, w = torch.randn(100, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)
    assert not padded.fits(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert padded.fits(x) and not padded.fits(x[:64]) and not padded.fits(x[:31])
        y = linear(x, w)
    assert y.dtype == torch.bfloat16
    dx, dw = torch.autograd.grad(y.float().square().sum(), (x, w))
    rx, rw = torch.autograd.grad((x.double() @ w.double().t()).square().sum(), (x, w))
    for ours, exact in ((dx, rx), (dw, rw)):
        assert ours.dtype == torch.float32
        assert (ours - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("elements", [1, 200, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_in_fp8_are_widened_in_pieces_with_their_biases(monkeypatch, dtype, elements):
    """Scales of rows and of blocks; gradients of the inputs and of the bias."""
    monkeypatch.setitem(fp8.PIECE, "cpu", elements)
    generator = torch.Generator().manual_seed(elements)
    x = torch.randn(5, 37, generator=generator)
    bias = torch.randn(22, generator=generator)
    by_row = quantize_fp8(torch.randn(22, 37, generator=generator))
    by_block = FP8Weight(by_row.values, torch.rand(8, 3, generator=generator) / 448, (3, 16))

    # Results and gradients are those of the wide weights.
    for weight in (by_row, by_block):
        layer = FP8Linear(weight, bias.to(dtype))
        layer.bias.requires_grad_()
        inputs = x.to(dtype).requires_grad_()
        out = layer(inputs)
        wide = weight.dense(torch.float64)
        exact = inputs.double() @ wide.t() + layer.bias.double()
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
        dx, db = torch.autograd.grad(out.sum(), (inputs, layer.bias))
        torch.testing.assert_close(dx.double(), wide.sum(0).expand(5, -1), rtol=tolerance, atol=tolerance)
        assert (db == 5).all()


@needs_onednn
@torch.no_grad()
@pytest.mark.parametrize("size", [128, 256, 576, 1152, 1536, 1728])
def test_a_packed_row_does_not_depend_on_its_neighbours(size):
    layer = Linear(size, 960, bias=False)
    layer.pack()
    x = torch.randn(64, size, generator=torch.Generator().manual_seed(0))
    together = layer(x)
    for rows in (1, 2, 3, 4, 5, 7, 8, 16, 33):
        assert torch.equal(layer(x[:rows].contiguous()), together[:rows]), f"{rows} rows"


@needs_onednn
@torch.no_grad()
@pytest.mark.parametrize("outputs", [1, 8, 960])
@pytest.mark.parametrize("size", [256, 4096])
def test_a_lone_row_gets_company_only_where_it_is_summed_otherwise(size, outputs):
    weight = torch.randn(outputs, size, generator=torch.Generator().manual_seed(1))
    packed = onednn.pack(weight)
    x = torch.randn(64, size, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([onednn.matmul(row, packed.blocked) for row in x.split(1)])
    assert packed.needs_padding != torch.equal(alone, onednn.matmul(x, packed.blocked))


@needs_onednn
@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_joined_layers_are_what_each_is_and_are_packed_once(rows, bias):
    block = torch.nn.Module()
    block.a, block.b = Linear(96, 40, bias=bias), Linear(96, 9, bias=bias)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(0))
    want = [torch.nn.functional.linear(x, layer.weight, layer.bias) for layer in (block.a, block.b)]
    joined = pack_merged(block.a, block.b)
    pack_weights(block)
    assert not packed_parts(block)
    for got, part in zip(joined.outputs(x), want, strict=True):
        torch.testing.assert_close(got, part, atol=1e-5, rtol=1e-5)


@needs_onednn
def test_layers_of_which_one_has_a_bias_are_not_joined():
    layers = Linear(8, 4, bias=False), Linear(8, 4, bias=True)
    assert pack_merged(*layers) is None
    layers[0].pack()
    assert layers[0]._packed is not None


def test_a_packed_layer_still_trains_on_its_own_weight():
    layer = Linear(8, 4, bias=False)
    layer.pack()
    with torch.no_grad():
        layer.weight.zero_()
    assert layer(torch.ones(3, 8)).abs().max() == 0


def least_seconds(run, repeats: int = 5) -> float:
    """Least CPU time of a run, without the first one, in which oneDNN makes its program."""
    run()
    found = []
    for _ in range(repeats):
        started = time.thread_time()
        run()
        found.append(time.thread_time() - started)
    return min(found)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@needs("torch", "2.13", "fp32 matmuls of a CPU have other last bits by layout before it")
def test_columns_cut_out_of_a_matrix_have_the_same_gradients_as_quickly(one_thread):
    """Latent attention expands a part of each row."""
    rows, weight = torch.randn(512, 160), torch.randn(256, 128, requires_grad=True)
    grad = torch.randn(512, 256)

    def gradients(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(linear(x, weight), (x, weight), grad)

    whole = rows[:, :128].clone()
    cut = rows[:, :128]
    torch.testing.assert_close(gradients(whole), gradients(cut), rtol=0, atol=0)
    assert least_seconds(lambda: gradients(cut)) < 20 * least_seconds(lambda: gradients(whole))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_weights_cut_out_of_a_matrix_are_multiplied_as_quickly(is_transposed, one_thread):
    """Gradients of a loss with a Markov head are products with a part of each row."""
    matrix = torch.randn(300, 640) if is_transposed else torch.randn(512, 364)
    cut = matrix[:, :512].t() if is_transposed else matrix[:, :300]
    x = torch.randn(256, 300)
    whole = cut.contiguous()
    torch.testing.assert_close(linear(x, whole), linear(x, cut), rtol=0, atol=0)
    assert least_seconds(lambda: linear(x, cut)) < 20 * least_seconds(lambda: linear(x, whole))
