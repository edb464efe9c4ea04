"""Kernel of RoPE, qk-norm and store against fp64 and against the reference, and its fake implementation."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from crossed import crossed, diagonal
from hypothesis import given
from hypothesis import strategies as st
from properties import SWEEP
from torch._subclasses import FakeTensorMode

from eagle_kit.models.blocks.layers import Rope
from eagle_kit.ops.rope import Rotation, WindowRows, rope_store

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.5e-2, torch.float16: 3e-3}
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill new memory with NaN, so that elements that are never written are noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(shape, dtype, device, rotated=None, seed=1):
    t, hq, hkv, d = shape
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(t, hq + 2 * hkv, d, generator=generator).to(dtype).to(device)
    positions = torch.randint(0, 131072, (t,), generator=generator)
    rotation = Rope(rotated or d, 1e4, None).at(positions).to(torch.device(device))
    norms = (1 + torch.randn(2, d, generator=generator)).to(dtype).to(device)
    return qkv, rotation, {"q_norm": norms[0], "k_norm": norms[1], "eps": 1e-5}


def expected(qkv, rotation, num_heads, norms=None, interleaved=False):
    x, angle = qkv.double(), (rotation.positions.float()[:, None, None] * rotation.inv_freq).double()
    num_kv_heads, e = (x.shape[1] - num_heads) // 2, 2 * angle.shape[-1]
    q, k, v = x.split((num_heads, num_kv_heads, num_kv_heads), 1)
    if norms:
        q, k = (
            h / (h.square().mean(-1, keepdim=True) + norms["eps"]).sqrt() * norms[name].double()
            for h, name in ((q, "q_norm"), (k, "k_norm"))
        )
    turn = torch.polar(torch.full_like(angle, rotation.magnitude), angle)
    out = []
    for h in (q, k):
        a, b = (h[..., :e:2], h[..., 1:e:2]) if interleaved else (h[..., : e // 2], h[..., e // 2 : e])
        turned = torch.view_as_real(torch.complex(a, b) * turn)
        turned = turned if interleaved else turned.transpose(-1, -2)
        out.append(torch.cat((turned.flatten(-2), h[..., e:]), -1))
    return *out, v


def assert_near(ours, theirs, dtype):
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype and mine.shape == right.shape
        torch.testing.assert_close(mine.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def assert_normed_and_turned(dtype, interleaved, shape, rotated, device):
    qkv, rotation, norms = inputs(shape, dtype, device, rotated)
    wide = {name: norm.float() if name != "eps" else norm for name, norm in norms.items()}
    for chosen in ({}, norms, wide):
        options = {"num_heads": shape[1], "interleaved": interleaved, **chosen}
        ours = rope_store(qkv, rotation, **options, backend="triton")
        assert_near(ours, expected(qkv, rotation, shape[1], chosen, interleaved), dtype)
        assert torch.equal(ours[2], qkv[:, -shape[2] :])
        theirs = rope_store(qkv, rotation, **options, backend="reference")
        if dtype != torch.float32:  # rounded where the reference rounds
            wrong = torch.cat([(a != b).flatten() for a, b in zip(ours, theirs, strict=True)])
            assert wrong.float().mean() < 0.02


@diagonal(
    (
        "shape, rotated",
        [
            ((1, 1, 1, 2), 2),
            ((3, 9, 3, 64), 64),
            ((2, 7, 7, 80), 80),
            ((2, 33, 2, 128), 128),
            ((2, 16, 1, 10), 4),
            ((2, 5, 1, 96), 48),
        ],
    ),
    ("dtype, interleaved", product(TOLERANCE, [False, True])),
)
def test_heads_are_normed_and_turned(triton_device, dtype, interleaved, shape, rotated):
    assert_normed_and_turned(dtype, interleaved, shape, rotated, triton_device)


@pytest.mark.nightly
@SWEEP
@given(
    tokens=st.integers(1, 7),
    heads=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    halves=st.tuples(st.integers(1, 48), st.integers(1, 48)),
    interleaved=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_any_heads_are_normed_and_turned(triton_device, tokens, heads, halves, interleaved, dtype):
    group, kv_heads = heads
    rotated, size = (2 * half for half in sorted(halves))
    shape = (tokens, group * kv_heads, kv_heads, size)
    assert_normed_and_turned(dtype, interleaved, shape, rotated, triton_device)


@crossed(("dtype", TOLERANCE), ("returns_kv", [False, True]))
def test_keys_and_values_are_stored_in_their_rows_and_nowhere_else(triton_device, dtype, returns_kv):
    qkv, rotation, norms = inputs((5, 6, 3, 20), dtype, triton_device, rotated=16)
    rows = torch.tensor([7, 0, 12, 3, 12], device=triton_device)  # 12 is a trash row
    stores = torch.full((2, 3, 13, 20), torch.nan, dtype=dtype, device=triton_device)
    right = expected(qkv, rotation, 6, norms)
    q, k, v = rope_store(
        qkv,
        rotation,
        num_heads=6,
        **norms,
        k_rows=stores[0],
        v_rows=stores[1],
        rows=rows,
        returns_kv=returns_kv,
        backend="triton",
    )
    if returns_kv:
        assert_near((q, k, v), right, dtype)
    else:
        assert_near((q,), right[:1], dtype)
        assert k.shape == v.shape == (0, 3, 20) and k.dtype == v.dtype == dtype
    kept = torch.tensor([0, 1, 3], device=triton_device)
    stored = stores[:, :, rows[kept]].transpose(1, 2)
    assert_near(stored, [part[kept] for part in right[1:]], dtype)
    untouched = [row for row in range(13) if row not in (7, 0, 12, 3)]
    assert stores[:, :, untouched].isnan().all()
    assert not stores[:, :, 12].isnan().any()


def test_cosines_and_sines_are_exact_at_any_position(triton_device):
    """Against fp64, of the angles that fp32 has: 0, near quarter turns, the last positions of long contexts.
    Pairs (1, 0) and (0, 1) show the cosine and the sine themselves."""
    positions = torch.cat(
        (torch.arange(64), torch.arange(131072 - 64, 131072), torch.tensor([710, 103993, 312689, 1 << 20]))
    )
    inv_freq = torch.tensor([1.0, 0.99999994, 0.5, 1e-3, 1e-6, 1.5707964, 0.78539819, 0.0])
    qkv = torch.zeros(len(positions), 3, 16)
    qkv[..., :8] = 1.0
    rotation = Rotation(positions, inv_freq, 0.75).to(torch.device(triton_device))
    q, _, _ = rope_store(qkv.to(triton_device), rotation, num_heads=1, backend="triton")
    angle = (positions.float()[:, None] * inv_freq).double()
    right = 0.75 * torch.cat((angle.cos(), angle.sin()), -1)
    assert (q[:, 0].cpu().double() - right).abs().max() < 2e-7
    table = torch.cat((rotation.table[0][..., :8], rotation.table[1][..., 8:]), -1)
    assert (q - table).abs().max() < 3e-7  # what prompts and other engines have


@pytest.mark.parametrize(("batch", "nodes", "first", "stride"), [(1, 1, 5, 64), (3, 5, 7, 8), (4, 1, 0, 2)])
def test_rows_of_a_window_are_counted_by_the_kernel(triton_device, batch, nodes, first, stride):
    rows = WindowRows(first, stride, batch, nodes, torch.device(triton_device))
    assert rows.tensor.tolist() == [first + b * stride + j for b in range(batch) for j in range(nodes)]
    qkv, rotation, _ = inputs((batch * nodes, 4, 2, 8), torch.float32, triton_device)
    made = []
    for place in (rows, rows.tensor):
        stores = torch.full((2, 2, first + batch * stride, 8), torch.nan, device=triton_device)
        options = {"k_rows": stores[0], "v_rows": stores[1], "rows": place, "returns_kv": False}
        q, _, _ = rope_store(qkv, rotation, num_heads=4, **options, backend="triton")
        made.append((q, stores.nan_to_num(777.0)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*made, strict=True))
    assert (made[0][1] != 777.0).sum() == 2 * 2 * batch * nodes * 8


def needs_fp8(device):
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fp8_stores_hold_the_rounded_values_scaled_and_saturated(triton_device, dtype):
    needs_fp8(triton_device)
    qkv, rotation, norms = inputs((4, 4, 4, 128), dtype, triton_device)
    qkv[0] *= 1e4
    qkv[1, -1, :2] = torch.tensor([torch.inf, -torch.inf])
    qkv[1, -1, 2] = torch.nan
    rows = torch.tensor([5, 2, 0, 3], device=triton_device)
    made = []
    for backend in ("triton", "reference"):
        stores = torch.full((2, 4, 6, 128), torch.nan, device=triton_device).to(FP8)
        rope_store(
            qkv,
            rotation,
            num_heads=4,
            **norms,
            k_rows=stores[0],
            v_rows=stores[1],
            rows=rows,
            k_scale=0.03,
            v_scale=1.7,
            backend=backend,
        )
        made.append(stores)
    ours, theirs = (stores.view(torch.uint8) for stores in made)
    assert torch.equal(ours[1], theirs[1])  # values are only scaled
    assert (ours[0] != theirs[0]).float().mean() < 0.002, (ours[0] != theirs[0]).float().mean()
    k, v = (stores.float() for stores in made[0])
    top = torch.finfo(FP8).max
    assert (v[:, 5].abs() == top).any() and v[-1, 2, :2].tolist() == [top, -top] and v[-1, 2, 2].isnan()
    right = expected(qkv, rotation, 4, norms)[1].transpose(0, 1) / 0.03
    atol = max(0.01, TOLERANCE[dtype] / 0.03)
    torch.testing.assert_close(k[:, rows].double(), right.clamp(-top, top), rtol=0.07, atol=atol)


def test_huge_inputs_are_normed_and_zeros_stay_zero(triton_device):
    qkv, rotation, norms = inputs((2, 3, 1, 16), torch.float32, triton_device)
    qkv[0] *= 1e15
    qkv[1] = 0
    ours = rope_store(qkv, rotation, num_heads=3, **norms, backend="triton")
    assert_near(ours[:2], expected(qkv, rotation, 3, norms)[:2], torch.float32)


def test_no_token_and_strided_inputs(triton_device):
    qkv, rotation, _ = inputs((3, 2, 1, 8), torch.float32, triton_device)
    none = replace(rotation, positions=rotation.positions[:0])
    q, k, v = rope_store(qkv[:0], none, num_heads=2, backend="triton")
    assert q.shape == (0, 2, 8) and k.shape == v.shape == (0, 1, 8)
    strided = qkv.transpose(0, 2).contiguous().transpose(0, 2)
    apart = replace(rotation, positions=rotation.positions.repeat_interleave(2)[::2])
    ours, theirs = (
        rope_store(*args, num_heads=2, backend="triton") for args in ((strided, apart), (qkv, rotation))
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_rows_beyond_two_to_the_31_elements(triton_device):
    needs_fp8(triton_device)
    torch.use_deterministic_algorithms(False)  # most of these stores is never touched, so it costs no memory
    num_rows = 2**31 // 64 + 3
    qkv, rotation, _ = inputs((1, 1, 1, 64), torch.float32, triton_device)
    k_rows, v_rows = (torch.empty(1, num_rows, 64, dtype=FP8, device=triton_device) for _ in range(2))
    stores = {"k_rows": k_rows, "v_rows": v_rows, "rows": torch.tensor([num_rows - 2], device=triton_device)}
    _, k, v = rope_store(qkv, rotation, num_heads=1, **stores, backend="triton")
    for store, right in ((k_rows, k), (v_rows, v)):
        assert torch.equal(store[0, num_rows - 2].float(), right[0, 0].to(FP8).float())


def test_fake_tensors_pass():
    pytest.importorskip("triton")
    with FakeTensorMode():
        qkv = torch.ones(3, 8, 16, dtype=torch.bfloat16)
        rotation = Rotation(torch.ones(3, dtype=torch.int64), torch.ones(8))
        stores = torch.ones(2, 2, 5, 16, dtype=torch.bfloat16)
        q, k, v = rope_store(qkv, rotation, num_heads=4, backend="triton")
        assert q.shape == (3, 4, 16) and k.shape == v.shape == (3, 2, 16) and k.dtype == torch.bfloat16
        q, k, v = rope_store(
            qkv,
            rotation,
            num_heads=4,
            k_rows=stores[0],
            v_rows=stores[1],
            rows=torch.ones(3, dtype=torch.int64),
            returns_kv=False,
            backend="triton",
        )
        assert q.shape == (3, 4, 16) and k.shape == v.shape == (0, 2, 16)


def test_the_operators_declare_what_they_do(triton_device):
    from eagle_kit.ops.rope import triton

    qkv, rotation, _ = inputs((2, 2, 1, 8), torch.float32, triton_device)
    head = (qkv, rotation.positions, rotation.inv_freq, 1.0, 2, None, None, 0.0, False)
    stores = [torch.zeros(1, 4, 8, device=triton_device) for _ in range(2)]
    rows = torch.tensor([1, 3], device=triton_device)
    checks = ("test_schema", "test_faketensor")
    for slots in (
        (None, None, None, [], 1.0, 1.0, True),
        (*stores, rows, [], 1.0, 1.0, False),
        (*stores, None, [0, 2, 1], 1.0, 1.0, False),
    ):
        torch.library.opcheck(triton.rope_store.overload, (*head, *slots), test_utils=checks)
