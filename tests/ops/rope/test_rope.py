"""Reference of RoPE, qk-norm and store: bit-identical to attention without the op, and the definition of a
rotation."""

import pytest
import torch
from torch.nn import functional as F

from eagle_kit.models.blocks.layers import Rope
from eagle_kit.ops.rope import rope_store
from eagle_kit.ops.rope.reference import rotate


def attention_without_the_operation(qkv, table, num_heads, norms):
    """Norm, rotation and split in plain torch."""
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
    cos, sin = table
    out = []
    for x, weight in ((q, norms.get("q_norm")), (k, norms.get("k_norm"))):
        if weight is not None and x.dtype == torch.float32:
            x = F.rms_norm(x, weight.shape, weight, norms["eps"])
        elif weight is not None:
            x = F.rms_norm(x.float(), weight.shape, None, norms["eps"]).to(x.dtype) * weight
        out.append(torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype))
    return *out, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_it_is_what_attention_and_a_store_do_bit_for_bit(dtype, normed):
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(7, 15, 10, generator=generator).to(dtype)
    weights = torch.randn(2, 10, generator=generator).to(dtype)
    norms = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-6} if normed else {}
    rotation = Rope(10, 1e4, None).at(torch.arange(7) * 301)
    rows = torch.tensor([4, 11, 0, 2, 9, 10, 7])
    stores = torch.randn(2, 3, 12, 10, generator=generator).to(dtype)
    expected = stores.clone()
    q, k, v = attention_without_the_operation(qkv, rotation.table, 9, norms)
    expected[0].index_copy_(1, rows, k.transpose(0, 1))
    expected[1].index_copy_(1, rows, v.transpose(0, 1))
    ours = rope_store(
        qkv,
        rotation,
        num_heads=9,
        **norms,
        k_rows=stores[0],
        v_rows=stores[1],
        rows=rows,
        backend="reference",
    )
    for mine, theirs in zip((*ours, stores), (q, k, v, expected), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_pair_is_a_complex_number_that_turns(interleaved):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 3, 14, generator=generator)
    positions = torch.tensor([0, 1, 17, 4095, 131071])
    rope = Rope(8, 1e4, None)
    out = rotate(x, rope.at(positions).table, interleaved)
    assert torch.equal(out[..., 8:], x[..., 8:])
    turn = torch.polar(torch.ones(5, 1, 4), positions[:, None, None] * rope.inv_freq)
    pairs = x[..., :8].unflatten(-1, (4, 2) if interleaved else (2, 4))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = turned if interleaved else turned.transpose(-1, -2)
    torch.testing.assert_close(out[..., :8], turned.flatten(-2), atol=1e-5, rtol=1e-5)


def test_an_fp8_store_is_scaled_and_saturates():
    qkv = torch.tensor([1.0, -3e4, 7.5]).repeat(4, 1)[:, :, None].expand(4, 3, 2).contiguous()
    rotation = Rope(2, 1e4, None).at(torch.zeros(4))
    k_rows, v_rows = torch.zeros(2, 1, 4, 2).to(torch.float8_e4m3fn)
    stores = {"k_rows": k_rows, "v_rows": v_rows, "k_scale": 2.0, "v_scale": 0.5}
    q, k, v = rope_store(
        qkv, rotation, num_heads=1, rows=torch.arange(4), **stores, returns_kv=False, backend="reference"
    )
    assert q.shape == (4, 1, 2) and k.shape == v.shape == (0, 1, 2)
    assert (k_rows.float() == -448).all() and (v_rows.float() == 15).all()


def test_gradients_take_the_reference():
    qkv = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(3), requires_grad=True)
    rotation = Rope(6, 1e4, None).at(torch.arange(3))
    q, k, v = rope_store(qkv, rotation, num_heads=2, backend="triton")
    (gradient,) = torch.autograd.grad(q.square().sum() + k.square().sum() + v.square().sum(), qkv)
    torch.testing.assert_close(gradient, 2 * qkv.detach())  # a rotation keeps lengths


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"k_rows": torch.zeros(1, 4, 6)}, "k_rows, v_rows and rows"),
        ({"q_norm": torch.ones(6)}, "given together"),
        ({"returns_kv": False}, "stored or returned"),
        ({"k_scale": 2.0}, "fp8"),
        ({"q_norm": torch.ones(6).half(), "k_norm": torch.ones(6).half()}, "dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_do_not_fit_are_refused(options, reason):
    rotation = Rope(6, 1e4, None).at(torch.arange(3))
    with pytest.raises(AssertionError, match=reason):
        rope_store(torch.zeros(3, 4, 6), rotation, num_heads=2, **options)
