"""Norms, RoPE with its store, SwiGLU and small linear layers at the sizes of real models, against fp64."""

import pytest
import torch

from eagle_kit.models.blocks.layers import Rope
from eagle_kit.ops.experts import experts, fp8_experts
from eagle_kit.ops.fp8 import FP8Weight, quantize_fp8
from eagle_kit.ops.linear.fp8 import fp8_linear
from eagle_kit.ops.norm import add_rms_norm, rms_norm
from eagle_kit.ops.rope import WindowRows, rope_store
from eagle_kit.ops.small_linear import small_linear, small_linear_swiglu
from eagle_kit.ops.swiglu import swiglu
from tests.gpu.near import NORM, assert_near
from tests.gpu.place import DEVICE, DTYPES, FP8, HALVES, generator, pick, randn

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def norm_of(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", pick([576, 2048, 4096, 8192], [24]))
@pytest.mark.parametrize("rows", pick([1, 64, 8192], [3]))
def test_norms(rows, size, dtype):
    by = generator(10)
    x, residual = (randn(rows, size, dtype=dtype, by=by) for _ in range(2))
    weight = randn(size, dtype=dtype, by=by)
    assert_near("norm", rms_norm(x, weight, 1e-5, backend="triton"), norm_of(x, weight))
    normed, total = add_rms_norm(x, residual, weight, 1e-5, backend="triton")
    assert_near("sum", total, x.double() + residual.double())
    assert_near("norm of the sum", normed, norm_of(total, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", pick([128, 576, 4096, 8192], [24]))
@pytest.mark.parametrize("rows", pick([1, 401, 8192], [3]))
def test_gradients_of_norms(rows, size, dtype):
    by = generator(19)
    x, residual, up, other = (randn(rows, size, dtype=dtype, by=by) for _ in range(4))
    weight = randn(size, by=by)  # as a trainer has it
    inputs, wide = (
        [t.to(kind or t.dtype).requires_grad_() for t in (x, residual, weight)]
        for kind in (None, torch.float64)
    )
    outs = add_rms_norm(*inputs, 1e-5, backend="triton")
    total = wide[0] + wide[1]
    exact = (norm_of(total, wide[2]), total)
    got = torch.autograd.grad(outs, inputs, (up, other))
    wanted = torch.autograd.grad(exact, wide, (up.double(), other.double()))
    for name, ours, theirs in zip(("x", "residual", "weight"), got, wanted, strict=True):
        assert_near(f"gradient of {name}", ours, theirs, dtype, slack=2)


# Query heads, key heads, head size, rotated elements.
HEADS = pick(
    {
        "Llama-3.1-8B": (32, 8, 128, 128),
        "Qwen3-8B": (32, 8, 128, 128),
        "Qwen3-30B": (32, 4, 128, 128),
        "SmolLM2": (9, 3, 64, 64),
        "size 80": (32, 32, 80, 80),
        "partly rotated": (32, 8, 96, 48),
        "size 256": (16, 8, 256, 256),
    },
    {"whole": (4, 2, 16, 16), "partly rotated": (3, 1, 24, 16)},
)


def turned(x: torch.Tensor, positions: torch.Tensor, size: int, interleaved: bool) -> torch.Tensor:
    """The first ``size`` elements of heads ``[T, H, D]`` turned, in fp64. Frequencies are fp32, and so is
    their product with the position, which is part of what the angle is."""
    angle = (positions.float()[:, None] * Rope(size, 1e4, None).inv_freq.to(DEVICE)).double()[:, None]
    head, rest = x[..., :size].double(), x[..., size:].double()
    a, b = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    a, b = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    out = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((out, rest), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_gradients_of_the_rotation(name, dtype, interleaved):
    hq, hkv, size, rotated = HEADS[name]
    by, tokens = generator(20), pick(2048, 5)
    qkv = randn(tokens, hq + 2 * hkv, size, dtype=dtype, by=by).requires_grad_()
    up = randn(*qkv.shape, dtype=dtype, by=by)
    positions = torch.arange(tokens, device=DEVICE) * 7
    rotation = Rope(rotated, 1e4, None).to(DEVICE).at(positions)
    outs = rope_store(qkv, rotation, num_heads=hq, interleaved=interleaved, backend="triton")
    (got,) = torch.autograd.grad(torch.cat(outs, 1), qkv, up)
    wide = qkv.detach().double().requires_grad_()
    both = turned(wide[:, : hq + hkv], positions, rotated, interleaved)
    (wanted,) = torch.autograd.grad(torch.cat((both, wide[:, hq + hkv :]), 1), wide, up.double())
    assert_near("gradient", got, wanted)


@pytest.mark.parametrize(
    ("dtype", "stored"), [*((d, d) for d in DTYPES), *((d, FP8) for d in DTYPES)], ids=str
)
@pytest.mark.parametrize("tokens", pick([1, 96, 8192], [3]))
@pytest.mark.parametrize("name", HEADS)
def test_rope_and_store(name, tokens, dtype, stored):
    (hq, hkv, size, rotated), by = HEADS[name], generator(11)
    with_norm, interleaved = name.startswith(("Qwen", "partly")), name == "Llama-3.1-8B" and tokens == 96
    qkv = randn(tokens, hq + 2 * hkv, size, dtype=dtype, by=by)
    positions = torch.randint(0, 32768, (tokens,), generator=by, device=DEVICE)
    rotation = Rope(rotated, 1e4, None).to(DEVICE).at(positions)
    q, k, v = qkv.split((hq, hkv, hkv), 1)
    norms = {}
    if with_norm:
        weights = randn(2, size, dtype=dtype, by=by)
        norms = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-5}
        q, k = norm_of(q, weights[0]), norm_of(k, weights[1])
    right = [turned(part, positions, rotated, interleaved) for part in (q, k)]
    space = 2 * tokens + 5
    rows = torch.randperm(space, generator=by, device=DEVICE)[:tokens]
    k_rows, v_rows = torch.full((2, hkv, space, size), float("nan"), device=DEVICE).to(stored)
    scales = {"k_scale": 0.2, "v_scale": 0.02} if stored == FP8 else {}
    stores = {"k_rows": k_rows, "v_rows": v_rows, "rows": rows}
    options = {"num_heads": hq, "interleaved": interleaved, "backend": "triton", **norms}
    out = rope_store(qkv, rotation, **options, **stores, **scales, returns_kv=False)
    assert_near("q", out[0], right[0], dtype)
    assert len(out[1]) == len(out[2]) == 0
    for what, store, values, scale in (
        ("k", k_rows, right[1], scales.get("k_scale", 1.0)),
        ("v", v_rows, v.double(), scales.get("v_scale", 1.0)),
    ):
        wide = store.float()
        assert_near(what, wide[:, rows].transpose(0, 1) * scale, values, stored)
        wide[:, rows] = float("nan")
        assert wide.isnan().all(), f"{what}: a row that is nobody's was written"
    if stored == dtype:
        for what, ours, values in zip("qkv", rope_store(qkv, rotation, **options), (*right, v), strict=True):
            assert_near(what, ours, values.double(), dtype)


def test_cosines_and_sines_of_late_positions_and_rows_of_windows():
    """Pairs (1, 0) and (0, 1) show the cosine and the sine themselves; rows are counted in the kernel."""
    batch = pick(40, 4)
    nodes = 8
    half = batch * nodes // 2
    positions = torch.cat((torch.arange(half), torch.arange(131072 - half, 131072))).to(DEVICE)
    rotation = Rope(128, 5e5, None).to(DEVICE).at(positions)
    qkv = torch.zeros(batch * nodes, 3, 128, device=DEVICE)
    qkv[..., :64] = 1.0
    rows = WindowRows(3, 64, batch, nodes, torch.device(DEVICE))
    k_rows, v_rows = torch.full((2, 1, 3 + 64 * batch, 128), float("nan"), device=DEVICE)
    stores = {"k_rows": k_rows, "v_rows": v_rows, "rows": rows, "returns_kv": False}
    q, _, _ = rope_store(qkv, rotation, num_heads=1, backend="triton", **stores)
    angle = (positions.float()[:, None] * rotation.inv_freq).double()
    right = torch.cat((angle.cos(), angle.sin()), -1)
    assert (q[:, 0].double() - right).abs().max() < 2e-7
    assert torch.equal(k_rows[:, rows.tensor], q.transpose(0, 1))
    assert torch.equal(v_rows[:, rows.tensor], qkv[:, 2:].transpose(0, 1))
    assert int(k_rows.isnan().all(-1).sum()) == 3 + 64 * batch - batch * nodes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", pick([1536, 12288, 14336], [40]))
@pytest.mark.parametrize("rows", pick([1, 96, 4096], [3]))
def test_swiglu_forward_and_backward(rows, size, dtype):
    by = generator(12)
    x, upstream = randn(rows, 2 * size, dtype=dtype, by=by), randn(rows, size, dtype=dtype, by=by)
    ours, right = x.clone().requires_grad_(), x.double().requires_grad_()
    out = swiglu(ours, backend="triton")
    gate, up = right.chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) * up
    assert_near("out", out, wanted.detach())
    (gradient,) = torch.autograd.grad(out, ours, upstream)
    (expected,) = torch.autograd.grad(wanted, right, upstream.double())
    assert_near("gradient", gradient, expected)


# Experts, those of a token, hidden and intermediate size.
EXPERTS = pick(
    {
        "Mixtral": (8, 2, 4096, 14336),
        "Qwen3-30B": (128, 8, 2048, 768),
        "DeepSeek-V2-Lite": (64, 6, 2048, 1408),
    },
    {"tiny": (5, 2, 48, 40)},
)


def experts_in_fp64(x, ids, shares, gate_up, down) -> torch.Tensor:
    """Sum over experts whose weights are given one by one."""
    wanted = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
    for expert, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        places, columns = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[places].double() @ first.double().T).chunk(2, -1)
        part = (torch.nn.functional.silu(gate) * up) @ second.double().T
        wanted.index_add_(0, places, part * shares[places, columns, None].double())
    return wanted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", pick([1, 64, 2048], [3]))
@pytest.mark.parametrize("model", EXPERTS)
def test_experts(model, rows, dtype):
    count, chosen, hidden, size = EXPERTS[model]
    by = generator(13)
    x, scores = randn(rows, hidden, dtype=dtype, by=by), randn(rows, count, by=by)
    gate_up = randn(count, 2 * size, hidden, dtype=dtype, by=by, scale=hidden**-0.5)
    down = randn(count, hidden, size, dtype=dtype, by=by, scale=size**-0.5)
    shares, ids = scores.softmax(-1).topk(chosen, -1)
    out = experts(x, ids, shares, gate_up, down, backend="triton")
    assert_near("experts", out, experts_in_fp64(x, ids, shares, gate_up, down), slack=2.0)
    outputs = [quantize_fp8(weight) for weight in (gate_up, down)]
    blocks = []
    for held in outputs:
        (_, n, k), block = held.values.shape, (128, 128)
        scales = randn(count, -(-n // 128), -(-k // 128), by=by).exp() / 448 / k**0.5
        blocks.append(FP8Weight(held.values, scales, block))
    for name, weights in (("outputs", outputs), ("blocks", blocks)):
        wide = ([each.dense(torch.float32) for each in weight.unbind()] for weight in weights)
        out = fp8_experts(x, ids, shares, *weights, backend="triton")
        assert_near(f"fp8 by {name}", out, experts_in_fp64(x, ids, shares, *wide), slack=2.0)


# Outputs and inputs: qkv, output, gate and up, down.
LINEARS = pick(
    {
        "Llama-3.1-8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
        "Qwen3-8B": [(6144, 4096), (24576, 4096), (4096, 12288)],
        "SmolLM2": [(960, 576), (576, 576), (3072, 576), (576, 1536)],
    },
    {"tiny": [(33, 48)]},
)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", pick([1, 5, 16, 33, 64], [5]))
@pytest.mark.parametrize("model", LINEARS)
def test_small_linears(model, rows, dtype):
    by = generator(13)
    for n, k in LINEARS[model]:
        x, weight = randn(rows, k, dtype=dtype, by=by), randn(n, k, dtype=dtype, by=by, scale=k**-0.5)
        bias = randn(n, dtype=dtype, by=by)
        right = x.double() @ weight.double().T
        assert_near("plain", small_linear(x, weight, backend="triton"), right)
        assert_near("biased", small_linear(x, weight, bias, backend="triton"), right + bias.double())
        if n % 2 == 0:
            both = small_linear(x, weight, bias, backend="triton")
            fused = small_linear_swiglu(x, weight, bias, backend="triton")
            assert torch.equal(fused, swiglu(both, backend="triton"))
        held = quantize_fp8(weight)
        exact = x.double() @ held.dense(torch.float64).T
        assert_near("fp8", small_linear(x, held, backend="triton"), exact)
        off = (exact - right).norm() / right.norm()
        assert off < NORM[FP8], "fp8 weights are what they stand for"
        scales = randn(-(-n // 128), -(-k // 128), dtype=torch.float32, by=by).exp()
        blocks = FP8Weight(held.values, scales / 448, (128, 128))
        exact = x.double() @ blocks.dense(torch.float64).T
        assert_near("blocks", small_linear(x, blocks, backend="triton"), exact)
        if n % 2 == 0:
            both = small_linear(x, blocks, backend="triton")
            fused = small_linear_swiglu(x, blocks, backend="triton")
            assert torch.equal(fused, swiglu(both, backend="triton"))


@pytest.mark.parametrize("model", LINEARS)
def test_fp8_layers_of_many_rows(model):
    """By e4m3 throughout where scales are of rows, and by pieces of the weight where they are of blocks."""
    by = generator(14)
    for n, k in LINEARS[model]:
        x, weight = randn(300, k, dtype=torch.bfloat16, by=by), randn(n, k, dtype=torch.float32, by=by)
        held = quantize_fp8(weight * k**-0.5)
        exact = x.double() @ held.dense(torch.float64).T
        assert (fp8_linear(x, held).double() - exact).norm() < NORM[FP8] * exact.norm()
        scales = randn(-(-n // 128), -(-k // 128), dtype=torch.float32, by=by).exp()
        blocks = FP8Weight(held.values, scales / 448, (128, 128))
        assert_near("blocks", fp8_linear(x, blocks), x.double() @ blocks.dense(torch.float64).T)
