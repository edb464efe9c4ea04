"""Routed experts whose weights stay in e4m3, against fp64: the Triton kernels and the reference."""

import pytest
import torch
from crossed import crossed, diagonal
from hypothesis import given
from hypothesis import strategies as st
from properties import SWEEP
from tiny_experts import ROUNDINGS, SHAPES, expected, make
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_kit.engine.graphs import cpu_graph
from eagle_kit.engine.graphs.cuda_graph import Lengths
from eagle_kit.ops.capability import facts_of
from eagle_kit.ops.experts import fp8_experts
from eagle_kit.ops.fp8 import E4M3, FP8Weight, quantize_fp8

BLOCKS = [
    pytest.param(None, id="scales of outputs"),
    pytest.param((128, 128), id="DeepSeek's blocks"),
    pytest.param((1, 128), id="blocks of an output"),
    pytest.param((24, 256), id="other blocks"),
]


@pytest.fixture
def poisoned(triton_device):
    """Memory that nobody has written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def in_fp8(weight, block):
    """Weight ``[E, N, K]`` in e4m3 with unequal scales of ``block``, or of each output."""
    held = quantize_fp8(weight)
    if block is None:
        return held
    experts, n, k = weight.shape
    shape = experts, -(-n // block[0]), -(-k // block[1])
    scales = torch.randn(shape, generator=torch.Generator().manual_seed(n + k)).exp() / 448
    return FP8Weight(held.values, scales.to(weight.device) / weight.shape[-1] ** 0.5, block)


def case(shape, dtype, device, block, routing="even"):
    """Inputs of :func:`fp8_experts`, and what the weights are in fp64."""
    x, ids, weights, gate_up, down = make(*shape, dtype, device, routing)
    held = in_fp8(gate_up.float(), block), in_fp8(down.float(), block)
    wide = expected(x, ids, weights, *(each.dense(torch.float64) for each in held))
    return (x, ids, weights, *held), wide


def check(out, wide, dtype):
    """Each output of a layer is rounded once, and an inner state may be larger than what is added up."""
    wanted, sizes = wide
    assert out.dtype == dtype and out.shape == wanted.shape
    assert ((out.double() - wanted).abs() <= 4 * ROUNDINGS[dtype] * sizes + 1e-7).all()
    assert wanted.abs().max() > 0


@diagonal(("dtype", ROUNDINGS), ("block", BLOCKS))
def test_the_sum_over_experts(triton_device, poisoned, block, dtype):
    given, wide = case((6, 4, 2, 300, 140), dtype, triton_device, block)
    check(fp8_experts(*given, backend="triton"), wide, dtype)


@diagonal(("block", BLOCKS[:2]), ("tokens, count, chosen, hidden, size", SHAPES[1:4]))
def test_sizes_beside_those_of_tiles(triton_device, poisoned, tokens, count, chosen, hidden, size, block):
    given, wide = case((tokens, count, chosen, hidden, size), torch.bfloat16, triton_device, block)
    check(fp8_experts(*given, backend="triton"), wide, torch.bfloat16)


@pytest.mark.nightly
@SWEEP
@given(
    tokens=st.integers(1, 70),
    counts=st.tuples(st.integers(1, 9), st.integers(1, 4)),
    hidden=st.integers(1, 300),
    size=st.integers(1, 140),
    block=st.sampled_from((None, (128, 128), (1, 128), (24, 256))),
    dtype=st.sampled_from(list(ROUNDINGS)),
)
def test_any_sizes(triton_device, poisoned, tokens, counts, hidden, size, block, dtype):
    count, chosen = counts
    given, wide = case((tokens, count, min(chosen, count), hidden, size), dtype, triton_device, block)
    check(fp8_experts(*given, backend="triton"), wide, dtype)


@diagonal(("block", BLOCKS[:2]), ("tokens", [40, 200]))
def test_many_rows_of_few_experts(triton_device, poisoned, tokens, block):
    """Blocks of 32 and of 64 rows."""
    given, wide = case((tokens, 2, 1, 140, 70), torch.bfloat16, triton_device, block)
    check(fp8_experts(*given, backend="triton"), wide, torch.bfloat16)


@pytest.mark.parametrize("routing", ["one", "few"])
def test_routing_that_leaves_experts_idle(triton_device, poisoned, routing):
    given, wide = case((50, 6, 2, 32, 24), torch.float32, triton_device, (128, 128), routing)
    out = fp8_experts(*given, backend="triton")
    check(out, wide, torch.float32)
    assert torch.equal(out, fp8_experts(*given, backend="triton"))


@crossed(("block", BLOCKS[:2]), ("dtype", ROUNDINGS))
def test_a_gpu_without_e4m3_takes_its_bits(triton_device, poisoned, monkeypatch, block, dtype):
    """Every finite number that e4m3 has, subnormal ones and both zeros among them."""
    from eagle_kit.ops.experts import triton

    monkeypatch.setattr(triton, "device_facts", lambda device: facts_of(80))
    numbers = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    (x, ids, weights, gate_up, down), _ = case((5, 4, 2, 140, 70), dtype, triton_device, block)
    values = numbers.repeat(309)[: gate_up.values.numel()].view(gate_up.values.shape).to(triton_device)
    gate_up = FP8Weight(values.view(E4M3), gate_up.scales * 0.01, gate_up.block)
    wide = expected(x, ids, weights, gate_up.dense(torch.float64), down.dense(torch.float64))
    out = fp8_experts(x, ids, weights, gate_up, down, backend="triton")
    check(out, wide, dtype)
    with pytest.raises(Exception, match="NoneType"):  # so that it is the bits that were taken
        monkeypatch.setattr(triton, "widened", None)
        fp8_experts(x, ids, weights, gate_up, down, backend="triton")


@pytest.mark.parametrize("block", [*BLOCKS, (16, 16)])
def test_the_reference_widens_what_is_chosen(block):
    """One operation of the host's for each expert that has rows, and the same numbers for them."""
    given, wide = case((7, 8, 2, 50, 37), torch.float32, "cpu", block, "few")
    widened = []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func._schema.name == "aten::_to_copy" and args[0].dtype == torch.int8:
                widened.append(out.shape)
            return out

    with Shapes():
        out = fp8_experts(*given)
    check(out, wide, torch.float32)
    assert sorted(widened) == [(50, 37)] * 2 + [(74, 50)] * 2, "of eight experts two are chosen"


def test_a_token_does_not_depend_on_the_others():
    (x, ids, weights, *held), _ = case((20, 6, 2, 32, 24), torch.float32, "cpu", (128, 128))
    together = fp8_experts(x, ids, weights, *held)
    assert torch.equal(together[7:8], fp8_experts(x[7:8], ids[7:8], weights[7:8], *held))


@pytest.mark.skipif(not cpu_graph.available(), reason="torch without TorchScript's graphs")
def test_a_recording_sends_tokens_where_they_go_now():
    numbers = torch.zeros(1, dtype=torch.int64)
    given, _ = case((3, 6, 2, 32, 24), torch.float32, "cpu", (16, 16))

    def body(inputs):
        return fp8_experts(*inputs, *given[3:])

    with torch.inference_mode():
        recording = cpu_graph.Recording(body, given[:3])
        recording.compile(Lengths(numbers, numbers))
        for routing in ("few", "one"):
            other = make(3, 6, 2, 32, 24, torch.float32, "cpu", routing)[:3]
            assert not torch.equal(other[1], given[1])
            assert torch.equal(recording.replay(other), body(other))


def test_gradients_are_those_of_the_wide_weights(triton_device):
    (x, ids, weights, *held), _ = case((5, 4, 2, 16, 8), torch.float32, triton_device, None)
    x.requires_grad_()
    ours = torch.autograd.grad(fp8_experts(x, ids, weights, *held, backend="triton").square().sum(), x)[0]
    wide = expected(x.double(), ids, weights, *(each.dense(torch.float64) for each in held))[0]
    exact = torch.autograd.grad(wide.square().sum(), x)[0]
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)


def test_scales_that_no_tile_fits_are_widened_one_expert_after_another(triton_device):
    """As on a GPU, where nothing is read on the host; and what a tracer sees."""
    from eagle_kit.ops.experts import reference

    given, wide = case((5, 4, 2, 50, 37), torch.float32, triton_device, (16, 16))
    check(reference.dense_fp8(*given), wide, torch.float32)
    with pytest.raises(AssertionError):
        fp8_experts(*given, backend="triton")
    x, ids, weights, *held = given
    with FakeTensorMode() as mode:
        x, ids, weights = (mode.from_tensor(tensor) for tensor in (x, ids, weights))
        fake = [FP8Weight(*(mode.from_tensor(each) for each in weight[:2]), weight.block) for weight in held]
        out = fp8_experts(x, ids, weights, *fake)
    assert out.shape == x.shape and out.dtype == x.dtype


@pytest.mark.parametrize("block", BLOCKS[:2])
def test_the_operation_is_described_to_tracers(triton_device, block):
    """The check of schemas cannot compare fp8."""
    from eagle_kit.ops.experts.fp8 import _operands
    from eagle_kit.ops.experts.triton import routed_experts

    (x, ids, weights, gate_up, down), _ = case((3, 4, 2, 16, 8), torch.bfloat16, triton_device, block)
    arguments = (x, ids, weights, *_operands(gate_up), *_operands(down))
    torch.library.opcheck(routed_experts.overload, arguments, test_utils=("test_faketensor",))
