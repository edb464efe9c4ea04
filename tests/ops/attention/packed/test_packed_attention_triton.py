"""Packed attention by the flash kernel against fp64, document by document."""

from itertools import accumulate

import pytest
import torch
from crossed import diagonal
from hypothesis import given
from hypothesis import strategies as st
from properties import SWEEP
from torch._subclasses import FakeTensorMode

from eagle_kit.ops.attention.packed import packed_attention, reference

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def dense(q, k, v, spans, scale):
    """Softmax of each document in plain torch."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for a, b in spans:
        for head in range(q.shape[1]):
            scores = q[a:b, head] @ k[a:b, head // group].t() * scale
            scores = scores + torch.full_like(scores, float("-inf")).triu(1)
            out[a:b, head] = scores.softmax(-1) @ v[a:b, head // group]
    return out


def make(tokens, hq, hkv, d, dtype, device):
    generator = torch.Generator().manual_seed(tokens + d)
    shapes = [(tokens, hq, d), (tokens, hkv, d), (tokens, hkv, d)]
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]


def assert_equals_softmax(stops, hq, hkv, d, dtype, device):
    spans = list(zip((0, *stops), stops, strict=False))
    q, k, v = make(stops[-1], hq, hkv, d, dtype, device)
    out = packed_attention(q, k, v, spans, d**-0.5, backend="triton")
    exact = dense(q.double(), k.double(), v.double(), spans, d**-0.5)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@diagonal(
    ("dtype", TOLERANCE),
    (
        "stops, hq, hkv, d",
        [
            pytest.param((1,), 1, 1, 64, id="one token"),
            pytest.param((1, 2, 3, 5), 3, 1, 16, id="documents of one token"),
            pytest.param((64, 128, 129), 2, 2, 24, id="borders at blocks, odd head size"),
            pytest.param((61, 62, 211), 4, 2, 80, id="borders inside of blocks"),
            pytest.param((193,), 5, 1, 128, id="one long document, group of 5"),
            pytest.param((30, 70), 1, 1, 256, id="head size 256"),
        ],
    ),
)
def test_out_equals_the_softmax_of_each_document(triton_device, dtype, stops, hq, hkv, d):
    assert_equals_softmax(stops, hq, hkv, d, dtype, triton_device)


@pytest.mark.nightly
@SWEEP
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=5),
    group=st.integers(1, 5),
    hkv=st.integers(1, 3),
    d=st.sampled_from((16, 24, 64, 80, 128)),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_out_equals_the_softmax_of_any_documents(triton_device, lengths, group, hkv, d, dtype):
    assert_equals_softmax(tuple(accumulate(lengths)), group * hkv, hkv, d, dtype, triton_device)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_values_may_be_narrower_than_keys(triton_device, dtype):
    """Latent attention's heads: the columns behind a value are another value's, and must not be read."""
    spans = [(0, 17), (17, 70)]
    q, k, v = make(70, 3, 3, 24, dtype, triton_device)
    v = v[..., :16].contiguous()
    out = packed_attention(q, k, v, spans, 0.2, backend="triton")
    wide = torch.nn.functional.pad(v, (0, 8))
    exact = dense(q.double(), k.double(), wide.double(), spans, 0.2)[..., :16]
    assert out.shape == v.shape and out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("long", [1, 53, 54])
def test_narrow_values_of_long_documents_are_those_of_short_ones(monkeypatch, long):
    """Documents of ``long`` tokens and more take torch's flash attention, with values as wide as keys."""
    spans = [(0, 17), (17, 70)]
    q, k, v = (x.requires_grad_() for x in make(70, 3, 3, 24, torch.float32, "cpu"))
    narrow = v[..., :16]
    found = []
    for limit in (1000, long):
        monkeypatch.setattr(reference, "LONG", limit)
        out = packed_attention(q, k, narrow, spans, 0.2, backend="reference")
        assert out.shape == (70, 3, 16)
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_it_is_differentiable(triton_device):
    spans = [(0, 21), (21, 22), (22, 40)]
    inputs = [x.requires_grad_() for x in make(40, 4, 2, 16, torch.float32, triton_device)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    dout = torch.randn(40, 4, 16, generator=torch.Generator().manual_seed(1)).to(triton_device)
    ours = torch.autograd.grad(packed_attention(*inputs, spans, 0.3, backend="triton"), inputs, dout)
    wanted = torch.autograd.grad(dense(*exact, spans, 0.3), exact, dout.double())
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_large_scores_and_strided_inputs(triton_device):
    q, k, v = (
        x.transpose(0, 1).contiguous().transpose(0, 1)
        for x in make(50, 4, 2, 16, torch.float32, triton_device)
    )
    q = q * 300
    spans = [(0, 20), (20, 50)]
    out = packed_attention(q, k, v, spans, 1.0, backend="triton")
    exact = dense(q.double(), k.double(), v.double(), spans, 1.0)
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)


def test_no_token_and_fake_tensors(triton_device):
    q, k, v = make(0, 4, 2, 16, torch.float32, triton_device)
    assert packed_attention(q, k, v, [], 1.0, backend="triton").shape == (0, 4, 16)
    with FakeTensorMode():
        q, k = torch.ones(7, 4, 16, dtype=torch.bfloat16), torch.ones(7, 2, 16, dtype=torch.bfloat16)
        out = packed_attention(q, k, k, [(0, 3), (3, 7)], 1.0, backend="triton")
        assert out.shape == q.shape and out.dtype == torch.bfloat16
