"""Gradients of the rotation kernel against autograd in fp64."""

import pytest
import torch
from crossed import diagonal
from hypothesis import given
from hypothesis import strategies as st
from properties import SWEEP
from torch._subclasses import FakeTensorMode

from eagle_kit.ops.rope import Rotation, rope_store

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}
CASES = [  # tokens, query heads, key heads, head size, rotated, interleaved, norms
    pytest.param(1, 1, 1, 2, 2, False, False, id="smallest"),
    pytest.param(5, 9, 3, 64, 64, False, False, id="SmolLM2"),
    pytest.param(7, 5, 1, 80, 32, False, False, id="group of 5, rotated in part"),
    pytest.param(3, 4, 2, 24, 24, True, False, id="interleaved"),
    pytest.param(3, 2, 2, 12, 8, True, True, id="interleaved in part, with norms"),
    pytest.param(4, 4, 2, 32, 32, False, True, id="Qwen3"),
]


def exact(qkv, rotation, num_heads, interleaved, norms, eps):
    """q, k and v in whatever dtype the inputs have, by complex numbers."""
    others = (qkv.shape[1] - num_heads) // 2
    parts = list(qkv.split((num_heads, others, others), 1))
    angle = (rotation.positions.float()[:, None, None] * rotation.inv_freq).double()
    rotated, c, s = 2 * len(rotation.inv_freq), angle.cos(), angle.sin()
    for i, weight in enumerate(norms):
        parts[i] = parts[i] / (parts[i].square().mean(-1, keepdim=True) + eps).sqrt() * weight
    for i in range(2):
        turning, rest = parts[i][..., :rotated], parts[i][..., rotated:]
        if interleaved:
            a, b = turning[..., ::2], turning[..., 1::2]
        else:
            a, b = turning.chunk(2, -1)
        a, b = (a * c - b * s) * rotation.magnitude, (b * c + a * s) * rotation.magnitude
        turned = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
        parts[i] = torch.cat((turned, rest), -1)
    return parts


def assert_values_and_gradients(tokens, hq, hkv, d, rotated, interleaved, normed, dtype, device):
    by = torch.Generator().manual_seed(6)
    qkv = torch.randn(tokens, hq + 2 * hkv, d, generator=by).to(dtype).to(device).requires_grad_()
    positions = torch.randint(0, 4096, (tokens,), generator=by).to(device)
    rotation = Rotation(positions, torch.rand(rotated // 2, generator=by).to(device), 1.25)
    norms = [(1 + torch.randn(d, generator=by)).to(device).requires_grad_() for _ in range(2 * normed)]
    names = dict(zip(("q_norm", "k_norm"), norms, strict=False))
    outs = rope_store(
        qkv, rotation, num_heads=hq, eps=1e-5, interleaved=interleaved, backend="triton", **names
    )
    inputs = [qkv, *norms]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    wanted_outs = exact(wide[0], rotation, hq, interleaved, wide[1:], 1e-5)
    ups = [torch.randn(out.shape, generator=by).to(dtype).to(device) for out in outs]
    got = torch.autograd.grad(outs, inputs, ups)
    wanted = torch.autograd.grad(wanted_outs, wide, [up.double() for up in ups])
    for ours, theirs in zip((*outs, *got), (*wanted_outs, *wanted), strict=True):
        size = theirs.abs().max().clamp(min=1.0)
        assert ((ours.double() - theirs).abs().max() / size).item() <= TOLERANCE[dtype]
        assert ours.shape == theirs.shape
    assert got[0].dtype == dtype


@diagonal(("dtype", TOLERANCE), ("tokens, hq, hkv, d, rotated, interleaved, normed", CASES))
def test_values_and_gradients(triton_device, tokens, hq, hkv, d, rotated, interleaved, normed, dtype):
    assert_values_and_gradients(tokens, hq, hkv, d, rotated, interleaved, normed, dtype, triton_device)


@SWEEP
@given(
    tokens=st.integers(1, 9),
    group=st.integers(1, 5),
    hkv=st.integers(1, 3),
    halves=st.tuples(st.integers(1, 48), st.integers(1, 48)),
    interleaved=st.booleans(),
    normed=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_values_and_gradients_of_any_heads(
    triton_device, tokens, group, hkv, halves, interleaved, normed, dtype
):
    rotated, d = (2 * half for half in sorted(halves))
    assert_values_and_gradients(
        tokens, group * hkv, hkv, d, rotated, interleaved, normed, dtype, triton_device
    )


def test_the_inverse_undoes_the_rotation(triton_device):
    from eagle_kit.ops.rope.triton_backward import rope_rotate

    x, angle = torch.randn(6, 3, 16, device=triton_device), torch.randn(6, 1, 8, device=triton_device)
    cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)
    there = rope_rotate(x, cos, sin, 2, False, False)
    assert torch.equal(there[:, 2], x[:, 2]) and not torch.equal(there[:, :2], x[:, :2])
    torch.testing.assert_close(rope_rotate(there, cos, sin, 2, False, True), x)
    assert rope_rotate(x[:0], cos[:0], sin[:0], 2, False, False).shape == (0, 3, 16)


def test_the_operation_keeps_the_rules_of_custom_operations(triton_device):
    from eagle_kit.ops.rope.triton_backward import rope_rotate

    x = torch.randn(3, 4, 8, device=triton_device, requires_grad=True)
    cos, sin = torch.randn(2, 3, 1, 8, device=triton_device)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(rope_rotate.overload, (x, cos, sin, 3, True, False), test_utils=utils)


def test_fake_tensors_pass():
    pytest.importorskip("triton")
    with FakeTensorMode():
        qkv = torch.ones(3, 4, 8, requires_grad=True)
        rotation = Rotation(torch.arange(3), torch.ones(4))
        q, k, v = rope_store(qkv, rotation, num_heads=2, backend="triton")
        assert (q.shape, k.shape, v.shape) == ((3, 2, 8), (3, 1, 8), (3, 1, 8))
        assert torch.autograd.grad((q.sum() + k.sum() + v.sum()), qkv)[0].shape == (3, 4, 8)
