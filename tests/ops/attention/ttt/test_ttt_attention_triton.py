"""Kernels of TTT attention against fp64 autograd of one dense softmax, forward and backward."""

from contextlib import contextmanager

import pytest
import torch
from crossed import crossed
from torch._subclasses import FakeTensorMode

from eagle_kit.core.errors import UserError
from eagle_kit.ops.attention.ttt import plan_queries, ttt_attention
from eagle_kit.ops.backend import use

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def dense(q, k, v, own_k, own_v, rows, doc_start, scale):
    """One softmax over [all keys, masked | own keys] in plain torch; differentiable in any dtype."""
    group = q.shape[1] // k.shape[1]
    k, v, own_k, own_v = (x.repeat_interleave(group, 1) for x in (k, v, own_k, own_v))
    at = torch.arange(k.shape[0], device=q.device)
    seen = (at[None] <= rows[:, None]) & (at[None] >= doc_start[rows][:, None])
    prefix = torch.einsum("rhd,thd->hrt", q, k).masked_fill(~seen, float("-inf"))
    own = torch.einsum("rhd,rhjd->hrj", q, own_k)
    p = (torch.cat((prefix, own), -1) * scale).softmax(-1)
    on_prefix, on_own = p.split((k.shape[0], own_k.shape[2]), -1)
    return torch.einsum("hrt,thd->rhd", on_prefix, v) + torch.einsum("hrj,rhjd->rhd", on_own, own_v)


@contextmanager
def poisoned_memory():
    """Fill new memory with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def documents(*lengths):
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    return starts.repeat_interleave(torch.tensor(lengths))


def make(doc_start, rows, hq, hkv, own, d, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    r, t = rows.shape[0], doc_start.shape[0]
    shapes = [(r, hq, d), (t, hkv, d), (t, hkv, d), (r, hkv, own, d), (r, hkv, own, d), (r, hq, d)]
    tensors = [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]
    return [x.requires_grad_() for x in tensors[:5]], tensors[5]


def assert_all_close(inputs, dout, doc_start, rows, scale, tolerance):
    with poisoned_memory():
        out = ttt_attention(*inputs, plan_queries(rows, doc_start), scale, backend="triton")
        grads = torch.autograd.grad(out, inputs, dout, materialize_grads=True)
    assert out.dtype == inputs[0].dtype and out.shape == inputs[0].shape
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = dense(*exact_inputs, rows, doc_start, scale)
    wanted = torch.autograd.grad(exact, exact_inputs, dout.double(), materialize_grads=True)
    for name, ours, theirs in zip(
        ("out", "dq", "dk", "dv", "down_k", "down_v"), (out, *grads), (exact, *wanted), strict=True
    ):
        if theirs.numel():
            size = theirs.abs().max().clamp(min=1.0)
            error = ((ours.double() - theirs).abs().max() / size).item()
            assert error <= tolerance, f"{name}: {error}"  # NaN fails too
        assert ours.shape == theirs.shape


@pytest.mark.parametrize(
    ("lengths", "keep", "hq", "hkv", "own", "d"),
    [
        pytest.param((1,), 1.0, 1, 1, 0, 16, id="a single row"),
        pytest.param((1, 1, 1, 2, 1), 1.0, 2, 1, 7, 16, id="documents of one token, seven steps"),
        pytest.param((131,), 1.0, 2, 1, 1, 16, id="one document past a block"),
        pytest.param((37, 1, 64, 29), 0.5, 6, 2, 3, 32, id="half the rows, borders inside of blocks"),
        pytest.param((64, 64, 1), 1.0, 3, 3, 2, 24, id="borders at blocks, no group, odd head size"),
        pytest.param((33, 95), 1.0, 2, 1, 1, 16, id="a document begins one behind a border"),
        pytest.param((90, 40, 3), 0.04, 16, 1, 6, 16, id="rare rows, group of 16"),
        pytest.param((5, 60), 1.0, 5, 1, 2, 80, id="group of 5, head size 80", marks=pytest.mark.nightly),
    ],
)
def test_out_and_gradients_in_fp32(triton_device, lengths, keep, hq, hkv, own, d):
    doc_start = documents(*lengths)
    chosen = torch.rand(doc_start.shape[0], generator=torch.Generator().manual_seed(4)) < keep
    rows = torch.nonzero(chosen)[:, 0].to(triton_device)
    doc_start = doc_start.to(triton_device)
    inputs, dout = make(doc_start, rows, hq, hkv, own, d, torch.float32, triton_device)
    assert_all_close(inputs, dout, doc_start, rows, d**-0.5, TOLERANCE[torch.float32])


@crossed(
    ("dtype", [torch.float16, torch.bfloat16]),
    ("own, d, lengths", [(0, 64, (150, 20)), (7, 128, (70, 75, 1)), (2, 256, (67,))]),
)
def test_out_and_gradients_in_half_types(triton_device, dtype, own, d, lengths):
    doc_start = documents(*lengths).to(triton_device)
    rows = torch.arange(1, doc_start.shape[0], device=triton_device)
    inputs, dout = make(doc_start, rows, 2, 1, own, d, dtype, triton_device)
    assert_all_close(inputs, dout, doc_start, rows, d**-0.5, TOLERANCE[dtype])


def test_an_older_gpu_takes_other_blocks_and_no_branch(triton_device, monkeypatch):
    from eagle_kit.ops.attention.ttt import triton
    from eagle_kit.ops.capability import facts_of

    monkeypatch.setattr(triton, "device_facts", lambda device: facts_of(80))
    doc_start = documents(33, 40, 80).to(triton_device)
    rows = torch.arange(0, 153, 2, device=triton_device)
    inputs, dout = make(doc_start, rows, 2, 1, 2, 32, torch.bfloat16, triton_device)
    assert_all_close(inputs, dout, doc_start, rows, 32**-0.5, TOLERANCE[torch.bfloat16])


def test_it_computes_what_the_reference_does(triton_device):
    doc_start = documents(23, 9).to(triton_device)
    rows = torch.arange(3, 30, 2, device=triton_device)
    inputs, dout = make(doc_start, rows, 4, 2, 3, 16, torch.float32, triton_device)
    plan = plan_queries(rows, doc_start, 5)
    results = []
    for backend in ("triton", "reference"):
        with use(backend):
            out = ttt_attention(*inputs, plan, 0.25, backend=backend)
        results.append((out, *torch.autograd.grad(out, inputs, dout)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradients_are_slopes(triton_device):
    doc_start = documents(6, 1, 4).to(triton_device)
    rows = torch.tensor([0, 2, 3, 6, 9, 10], device=triton_device)
    inputs, dout = make(doc_start, rows, 4, 2, 2, 16, torch.float32, triton_device)
    plan = plan_queries(rows, doc_start)
    grads = torch.autograd.grad(ttt_attention(*inputs, plan, 0.25, backend="triton"), inputs, dout)
    generator, step = torch.Generator().manual_seed(8), 1e-2
    for which, grad in enumerate(grads):
        way = torch.randn(grad.shape, generator=generator).to(triton_device)
        ends = []
        for sign in (1, -1):
            moved = [
                x.detach() + sign * step * way if at == which else x.detach() for at, x in enumerate(inputs)
            ]
            ends.append((ttt_attention(*moved, plan, 0.25, backend="triton").double() * dout).sum())
        slope = (ends[0] - ends[1]) / (2 * step)
        torch.testing.assert_close((grad.double() * way).sum(), slope, rtol=5e-3, atol=5e-3)


def test_keys_that_nobody_sees_are_not_read_and_have_no_gradient(triton_device):
    doc_start = documents(40, 50, 30).to(triton_device)
    rows = torch.arange(41, 71, device=triton_device)
    inputs, dout = make(doc_start, rows, 2, 1, 1, 16, torch.float32, triton_device)
    with torch.no_grad():
        for x in inputs[1:3]:
            x[:40], x[71:] = float("nan"), float("nan")
    out = ttt_attention(*inputs, plan_queries(rows, doc_start), 0.25, backend="triton")
    dq, dk, dv, *own = torch.autograd.grad(out, inputs, dout)
    assert all(x.isfinite().all() for x in (out, dq, dk[40:71], dv, *own))
    assert (dv[:40] == 0).all() and (dv[71:] == 0).all() and (dv[40:71] != 0).any()


def test_large_scores_take_the_largest_key_and_its_own_keys_can_win(triton_device):
    doc_start = documents(70).to(triton_device)
    rows = torch.arange(70, device=triton_device)
    inputs, dout = make(doc_start, rows, 1, 1, 2, 16, torch.float32, triton_device)
    with torch.no_grad():
        inputs[0] *= 100
        inputs[3][::2] *= 10
    assert_all_close(inputs, dout, doc_start, rows, 1.0, 2e-3)  # scores of 1e4 round by 1e-3


def test_the_same_bits_every_time_and_any_strides(triton_device):
    doc_start = documents(17, 20).to(triton_device)
    rows = torch.arange(0, 37, 2, device=triton_device)
    inputs, _ = make(doc_start, rows, 2, 1, 2, 16, torch.float32, triton_device)
    plan = plan_queries(rows, doc_start)
    strided = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in inputs]
    runs = []
    for tensors in (inputs, inputs, strided):
        out = ttt_attention(*tensors, plan, 0.25, backend="triton")
        runs.append((out, *torch.autograd.grad(out.sum(), tensors)))  # the gradient of a sum has no strides
    for first, *others in zip(*runs, strict=True):
        assert all(torch.equal(first, other) for other in others)


def test_no_row(triton_device):
    doc_start = documents(5).to(triton_device)
    rows = torch.empty(0, dtype=torch.int64, device=triton_device)
    inputs, dout = make(doc_start, rows, 2, 1, 3, 16, torch.float32, triton_device)
    out = ttt_attention(*inputs, plan_queries(rows, doc_start), 0.25, backend="triton")
    grads = torch.autograd.grad(out, inputs, dout)
    assert out.shape == (0, 2, 16)
    assert [g.shape for g in grads] == [x.shape for x in inputs] and (grads[1] == 0).all()


def test_autocast_decides_the_type_of_the_arithmetic(triton_device):
    doc_start = documents(20).to(triton_device)
    rows = torch.arange(20, device=triton_device)
    inputs, dout = make(doc_start, rows, 2, 1, 1, 16, torch.float32, triton_device)
    plan = plan_queries(rows, doc_start)
    exact = ttt_attention(*inputs, plan, 0.25, backend="triton")
    with torch.autocast(triton_device, torch.bfloat16):
        out = ttt_attention(*inputs, plan, 0.25, backend="triton")
    assert out.dtype == torch.float32 and not torch.equal(out, exact)
    torch.testing.assert_close(out, exact, rtol=2e-2, atol=2e-2)
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(out, inputs, dout))


def test_heads_that_are_too_large_are_refused(triton_device):
    x = torch.ones(3, 1, 320, device=triton_device)
    own = x.new_empty(3, 1, 0, 320)
    rows = torch.arange(3, device=triton_device)
    plan = plan_queries(rows, torch.zeros_like(rows))
    with pytest.raises(UserError, match="up to 256"):
        ttt_attention(x, x, x, own, own, plan, 1.0, backend="triton")


def test_the_operations_keep_the_rules_of_custom_operations(triton_device):
    from eagle_kit.ops.attention.ttt import triton

    doc_start = documents(4, 3).to(triton_device)
    rows = torch.arange(7, device=triton_device)
    inputs, _ = make(doc_start, rows, 2, 1, 2, 16, torch.float32, triton_device)
    spans = plan_queries(rows, doc_start).spans
    assert spans[0].tolist() == doc_start.tolist() and spans[1].tolist() == (rows + 1).tolist()
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(triton.ttt_attention_op.overload, (*inputs, *spans, 0.25), test_utils=utils)


def test_fake_tensors_pass():
    pytest.importorskip("triton")
    from eagle_kit.ops.attention.ttt import triton

    with FakeTensorMode():
        q, k = torch.ones(5, 4, 16, requires_grad=True), torch.ones(9, 2, 16, requires_grad=True)
        own = torch.ones(5, 2, 3, 16, requires_grad=True)
        spans = torch.zeros(2, 5, dtype=torch.int32)
        out = triton.ttt_attention(q, k, k, own, own, *spans, 0.25)
        assert out.shape == (5, 4, 16)
        grads = torch.autograd.grad(out.sum(), (q, k, own))
        assert [g.shape for g in grads] == [q.shape, k.shape, own.shape]
