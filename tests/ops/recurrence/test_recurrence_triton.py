"""Recurrent layers over trees and texts, against a recurrence node by node and transformers' own
functions."""

import pytest
import torch
from crossed import crossed

from eagle_kit.ops.attention.window import ancestor_bits, chain_bits
from eagle_kit.ops.recurrence import (
    Inputs,
    Text,
    TextPlan,
    commit_recurrent,
    convolved_texts,
    moved_tail,
    path_columns,
    recurrent_texts,
    recurrent_window,
    window_convolution,
)
from eagle_kit.ops.tree_build.masks import tree_mask

B, N, H, K, V, C, W = 3, 13, 4, 8, 6, 10, 4
SLOTS = torch.tensor([4, 0, 2])
"""States of the requests in a pool of six."""
KINDS = pytest.mark.parametrize(
    ("delta", "by_channel"),
    [
        pytest.param(True, False, id="delta"),
        pytest.param(False, False, id="sums", marks=pytest.mark.essential),
        pytest.param(True, True, id="channels"),
    ],
)


@pytest.fixture(params=["reference", "triton"])
def place(request):
    """Implementation, and the device that it runs on."""
    return request.param, request.getfixturevalue("triton_device") if request.param == "triton" else "cpu"


def moved(parts, device):
    return type(parts)(*(part.to(device) for part in parts))


def inputs(*lead, seed=0, by_channel=False, key_heads=2):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, *lead, key_heads, K, generator=generator)
    k = torch.nn.functional.normalize(k, dim=-1)
    v = torch.randn(*lead, H, V, generator=generator)
    g = -torch.rand(*lead, H, *[K] * by_channel, generator=generator) * 2
    beta = torch.rand(*lead, H, generator=generator)
    return Inputs(q, k, v, g, beta)


def step(state, q, k, v, g, beta, delta):
    """One token of one request in fp64: ``state [H, K, V]``."""
    q, k = (x.double().repeat_interleave(H // len(x), 0) for x in (q, k))
    decayed = state * (g.double() if g.ndim == 2 else g.double()[:, None]).exp()[..., None]
    read = torch.einsum("hkv,hk->hv", decayed, k) if delta else 0.0
    u = beta.double()[:, None] * (v.double() - read)
    state = decayed + k[:, :, None] * u[:, None]
    return state, torch.einsum("hkv,hk->hv", state, q)


def random_trees(seed=0):
    generator = torch.Generator().manual_seed(seed)
    parents = torch.zeros(B, N, dtype=torch.int64)
    for node in range(1, N):
        parents[:, node] = torch.randint(max(0, node - 4), node, (B,), generator=generator)
    return parents, ancestor_bits(parents, N)


def paths(bits, b):
    return [row.nonzero().flatten().tolist() for row in tree_mask(bits, "window")[b]]


@crossed(
    (
        "delta, by_channel",
        [
            pytest.param(False, False, id="sums"),
            pytest.param(True, False, id="delta", marks=pytest.mark.essential),
            pytest.param(True, True, id="channels"),
        ],
    ),
    ("scale", [pytest.param(40.0, id="strong decay"), pytest.param(1.0, id="gentle")]),
)
def test_a_tree_is_every_path_by_itself(delta, by_channel, scale, place):
    backend, device = place
    parts = inputs(B, N, by_channel=by_channel)
    parts = parts._replace(g=parts.g * scale)
    _, bits = random_trees()
    pool = torch.randn(6, H, K, V, generator=torch.Generator().manual_seed(5))
    slots, held = SLOTS.to(device), pool.to(device)
    out, written = recurrent_window(
        moved(parts, device), held, slots, bits.to(device), delta=delta, backend=backend
    )
    out = out.cpu()
    for b in range(B):
        for node, path in enumerate(paths(bits, b)):
            mine = pool[SLOTS[b]].double()
            for j in path:
                mine, exact = step(mine, *(x[b, j] for x in parts), delta)
            torch.testing.assert_close(out[b, node].double(), exact, rtol=1e-4, atol=1e-5)
            chosen = torch.zeros(B, len(path), dtype=torch.int64)
            chosen[b] = torch.tensor(path)
            count = torch.zeros(B, dtype=torch.int64)
            count[b] = len(path)
            new = held.clone()
            commit_recurrent(new, slots, written, chosen.to(device), count.to(device), backend=backend)
            new = new.cpu()
            torch.testing.assert_close(new[SLOTS[b]].double(), mine, rtol=1e-4, atol=1e-5)
            others = [i for i in range(6) if i != SLOTS[b]]
            assert new[others].equal(pool[others])


@KINDS
def test_texts_of_any_length_and_in_any_parts(delta, by_channel, place):
    backend, device = place
    lengths = (1, 64, 65, 150)
    stops = torch.tensor(lengths).cumsum(0).tolist()
    spans = list(zip([0, *stops], stops, strict=False))
    parts = inputs(sum(lengths), seed=2, by_channel=by_channel)
    pool = torch.randn(9, H, K, V, generator=torch.Generator().manual_seed(1))
    saves = [(), ((0, 1), (64, 2)), ((1, 3), (1, 4)), ((70, 5), (150, 6))]
    texts = [Text(*span, 7 if i == 2 else None, saves[i]) for i, span in enumerate(spans)]
    before, held = pool.clone(), pool.to(device, copy=True)
    out = recurrent_texts(moved(parts, device), held, TextPlan(texts), delta=delta, backend=backend).cpu()
    pool = held.cpu()
    for text in texts:
        state = torch.zeros(H, K, V, dtype=torch.float64)
        if text.source is not None:
            state = before[text.source].double()
        states = [state]
        for t in range(text.start, text.stop):
            state, exact = step(state, *(x[t] for x in parts), delta)
            states.append(state)
            torch.testing.assert_close(out[t].double(), exact, rtol=1e-4, atol=1e-4)
        for count, number in text.saves:
            torch.testing.assert_close(pool[number].double(), states[count], rtol=1e-4, atol=1e-4)
    untouched = [0, 7, 8]
    assert pool[untouched].equal(before[untouched])
    rest = Text(0, 80, 5, ((80, 0),))  # the last text goes on from its own state
    plan, last = TextPlan([rest]), moved(parts.at(slice(200, 280)), device)
    again = recurrent_texts(last, held, plan, delta=delta, backend=backend)
    torch.testing.assert_close(again.cpu(), out[200:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(held[0], held[6], rtol=1e-4, atol=1e-4)


@pytest.mark.essential
def test_texts_that_begin_here_need_no_states(triton_device):
    parts = moved(inputs(70, seed=8), triton_device)
    plan = TextPlan([Text(0, 33), Text(33, 70)])
    exact = recurrent_texts(parts, None, plan, delta=True, backend="reference")
    out = recurrent_texts(parts, None, plan, delta=True, backend="triton")
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("by_channel", [False, True])
def test_the_delta_rule_is_that_of_transformers(by_channel):
    name, function = (
        ("kimi_linear", "chunk_kimi_delta_attention")
        if by_channel
        else ("qwen3_next", "torch_chunk_gated_delta_rule")
    )
    modeling = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    parts = inputs(100, seed=3, by_channel=by_channel, key_heads=H)
    q, k, v, g, beta = (x[None] for x in parts)
    theirs, state = getattr(modeling, function)(
        q, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=False
    )
    pool = torch.zeros(1, H, K, V)
    plan = TextPlan([Text(0, 100, None, ((100, 0),))])
    out = recurrent_texts(parts._replace(q=parts.q * K**-0.5), pool, plan, delta=True)
    torch.testing.assert_close(out, theirs[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pool, state, rtol=1e-4, atol=1e-4)


def test_texts_are_differentiable():
    parts = Inputs(*(x.double().requires_grad_() for x in inputs(9, seed=4)))
    out = recurrent_texts(parts, None, TextPlan([Text(0, 4), Text(4, 9)]), delta=True)
    grads = torch.autograd.grad(out.sum(), parts)
    exact = []
    for start, stop in ((0, 4), (4, 9)):
        state = torch.zeros(H, K, V, dtype=torch.float64)
        for t in range(start, stop):
            state, o = step(state, *(x[t] for x in parts), True)
            exact.append(o)
    wanted = torch.autograd.grad(torch.stack(exact).sum(), parts)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def convolve(path, weight, bias):
    """Convolution at the last of the columns of a path, ``[L, C]`` with L >= W."""
    return (path[-W:] * weight.t()).sum(0) + bias


def test_convolutions_follow_the_paths_of_a_tree():
    generator = torch.Generator().manual_seed(6)
    x, pool = torch.randn(B, N, C, generator=generator), torch.randn(6, W - 1, C, generator=generator)
    weight, bias = torch.randn(C, W, generator=generator), torch.randn(C, generator=generator)
    _, bits = random_trees(3)
    out = window_convolution(x, weight, bias, pool, SLOTS, path_columns(bits, W))
    for b in range(B):
        tail = pool[SLOTS[b]]
        for node, path in enumerate(paths(bits, b)):
            columns = torch.cat((tail, x[b, path]))
            torch.testing.assert_close(out[b, node], convolve(columns, weight, bias), rtol=1e-5, atol=1e-5)
            for count in range(len(path) + 1):
                every, kept = torch.tensor(path).expand(B, -1), pool.clone()
                kept[SLOTS] = moved_tail(kept, SLOTS, x, every, torch.full((B,), count))
                wanted = torch.cat((tail, x[b, path[:count]]))[-(W - 1) :]
                assert kept[SLOTS[b]].equal(wanted)
                assert kept[[1, 3, 5]].equal(pool[[1, 3, 5]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_convolutions_in_half_precision_round_once(dtype):
    generator = torch.Generator().manual_seed(3)
    columns = torch.randn(2, 3 + 5, 37, generator=generator).to(dtype)
    weight = torch.randn(37, 4, generator=generator).to(dtype)
    chain = chain_bits(5, torch.device("cpu")).expand(2, 5)
    x = columns[:, 3:]
    tails = columns[:, :3]
    out = window_convolution(x, weight, None, tails, torch.arange(2), path_columns(chain, 4))
    exact = (columns.double().unfold(1, 4, 1) * weight.double()).sum(-1)
    assert out.dtype == dtype
    assert out.equal(exact.to(dtype))


def test_convolutions_of_texts():
    generator = torch.Generator().manual_seed(7)
    x, weight = torch.randn(20, C, generator=generator), torch.randn(C, W, generator=generator)
    spans, tails = [(0, 1), (1, 3), (3, 20)], torch.zeros(7, W - 1, C)
    texts = [Text(*span, None, ((span[1] - span[0], i),)) for i, span in enumerate(spans)]
    texts[2] = texts[2]._replace(saves=((0, 4), (8, 5), (17, 2)))
    out = convolved_texts(x, weight, None, tails, TextPlan(texts))
    for number, (a, b) in enumerate(spans):
        padded = torch.cat((torch.zeros(W - 1, C), x[a:b]))
        exact = torch.nn.functional.conv1d(padded.t()[None], weight[:, None], groups=C)[0].t()
        torch.testing.assert_close(out[a:b], exact, rtol=1e-5, atol=1e-5)
        assert tails[number].equal(padded[-(W - 1) :])
    assert not tails[4].any() and tails[5].equal(x[8:11]) and not tails[[3, 6]].any()
    again = convolved_texts(x[11:], weight, None, tails, TextPlan([Text(0, 9, 5, ((9, 6),))]))
    torch.testing.assert_close(again, out[11:], rtol=1e-5, atol=1e-5)
    assert tails[6].equal(tails[2])
