"""Recurrent layers over trees and texts, against a recurrence node by node and transformers' own
functions."""

import pytest
import torch

from eagle_kit.kernels.recurrence import (
    commit_recurrent,
    commit_tail,
    convolve_prompts,
    recurrent_prompts,
    recurrent_window,
    window_convolution,
)
from eagle_kit.kernels.window_attention import ancestor_bits

B, N, H, K, V, C, W = 3, 13, 2, 8, 6, 10, 4


def inputs(*lead, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, *lead, H, K, generator=generator)
    k = torch.nn.functional.normalize(k, dim=-1)
    v = torch.randn(*lead, H, V, generator=generator)
    g = -torch.rand(*lead, H, generator=generator) * 2
    beta = torch.rand(*lead, H, generator=generator)
    return q, k, v, g, beta


def step(state, q, k, v, g, beta, delta):
    """One token of one request in fp64: ``state [H, K, V]``."""
    decayed = state * g.double().exp()[:, None, None]
    read = torch.einsum("hkv,hk->hv", decayed, k.double()) if delta else 0.0
    u = beta.double()[:, None] * (v.double() - read)
    state = decayed + k.double()[:, :, None] * u[:, None]
    return state, torch.einsum("hkv,hk->hv", state, q.double())


def random_trees(seed=0):
    generator = torch.Generator().manual_seed(seed)
    parents = torch.zeros(B, N, dtype=torch.int64)
    for node in range(1, N):
        parents[:, node] = torch.randint(max(0, node - 4), node, (B,), generator=generator)
    return parents, ancestor_bits(parents, N)


def paths(bits, b):
    return [[j for j in range(N) if bits[b, i] >> j & 1] for i in range(N)]


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("scale", [1.0, 40.0], ids=["gentle", "strong decay"])
def test_a_tree_is_every_path_by_itself(delta, scale):
    parts = inputs(B, N)
    parts = (*parts[:3], parts[3] * scale, parts[4])
    _, bits = random_trees()
    state = torch.randn(B, H, K, V, generator=torch.Generator().manual_seed(5))
    out, written = recurrent_window(*parts, state, bits, delta=delta)
    for b in range(B):
        for node, path in enumerate(paths(bits, b)):
            mine = state[b].double()
            for j in path:
                mine, exact = step(mine, *(x[b, j] for x in parts), delta)
            torch.testing.assert_close(out[b, node].double(), exact, rtol=1e-4, atol=1e-5)
            chosen = torch.zeros(B, len(path), dtype=torch.int64)
            chosen[b] = torch.tensor(path)
            count = torch.zeros(B, dtype=torch.int64)
            count[b] = len(path)
            new = commit_recurrent(state, written, chosen, count)
            torch.testing.assert_close(new[b].double(), mine, rtol=1e-4, atol=1e-5)
            others = [i for i in range(B) if i != b]
            assert new[others].equal(state[others])


@pytest.mark.parametrize("delta", [True, False])
def test_texts_of_any_length_and_in_any_parts(delta):
    lengths = (1, 64, 65, 150)
    total = sum(lengths)
    parts = inputs(total, seed=2)
    stops = torch.tensor(lengths).cumsum(0).tolist()
    spans = list(zip([0, *stops], stops, strict=False))
    out, ends = recurrent_prompts(*parts, spans, delta=delta)
    for number, (start, stop) in enumerate(spans):
        state = torch.zeros(H, K, V, dtype=torch.float64)
        for t in range(start, stop):
            state, exact = step(state, *(x[t] for x in parts), delta)
            torch.testing.assert_close(out[t].double(), exact, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ends[number].double(), state, rtol=1e-4, atol=1e-4)
    cut = [(a, a + (b - a) // 2) for a, b in spans if b - a > 1]
    rest = [(a + (b - a) // 2, b) for a, b in spans if b - a > 1]
    _, middle = recurrent_prompts(*parts, cut, delta=delta)
    first = rest[0][0]
    shifted = [(a - first, b - first) for a, b in rest]
    again, last = recurrent_prompts(*(x[first:] for x in parts), shifted, middle, delta=delta)
    torch.testing.assert_close(last, ends[1:], rtol=1e-4, atol=1e-4)
    assert again.shape[0] == sum(b - a for a, b in rest)


def test_the_delta_rule_is_that_of_transformers():
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v, g, beta = (x[None] for x in inputs(100, seed=3))
    theirs, state = modeling.torch_chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=False
    )
    out, ends = recurrent_prompts(q[0] * K**-0.5, k[0], v[0], g[0], beta[0], [(0, 100)], delta=True)
    torch.testing.assert_close(out, theirs[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ends, state, rtol=1e-4, atol=1e-4)


def test_texts_are_differentiable():
    parts = [x.double().requires_grad_() for x in inputs(9, seed=4)]
    out, _ = recurrent_prompts(*parts, [(0, 4), (4, 9)], delta=True)
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
    x, tail = torch.randn(B, N, C, generator=generator), torch.randn(B, W - 1, C, generator=generator)
    weight, bias = torch.randn(C, W, generator=generator), torch.randn(C, generator=generator)
    _, bits = random_trees(3)
    out = window_convolution(x, weight, bias, tail, bits)
    for b in range(B):
        for node, path in enumerate(paths(bits, b)):
            columns = torch.cat((tail[b], x[b, path]))
            torch.testing.assert_close(out[b, node], convolve(columns, weight, bias), rtol=1e-5, atol=1e-5)
            for count in range(len(path) + 1):
                every = torch.tensor(path).expand(B, -1)
                kept = commit_tail(tail, x, every, torch.full((B,), count))
                wanted = torch.cat((tail[b], x[b, path[:count]]))[-(W - 1) :]
                assert kept[b].equal(wanted)


def test_convolutions_of_texts():
    generator = torch.Generator().manual_seed(7)
    x, weight, bias = torch.randn(20, C, generator=generator), torch.randn(C, W, generator=generator), None
    spans = [(0, 1), (1, 3), (3, 20)]
    out, tails = convolve_prompts(x, weight, bias, spans)
    for number, (a, b) in enumerate(spans):
        padded = torch.cat((torch.zeros(W - 1, C), x[a:b]))
        exact = torch.nn.functional.conv1d(padded.t()[None], weight[:, None], groups=C)[0].t()
        torch.testing.assert_close(out[a:b], exact, rtol=1e-5, atol=1e-5)
        assert tails[number].equal(padded[-(W - 1) :])
    first, before = convolve_prompts(x[3:11], weight, bias, [(0, 8)])
    second, after = convolve_prompts(x[11:], weight, bias, [(0, 9)], before)
    torch.testing.assert_close(torch.cat((first, second)), out[3:], rtol=1e-5, atol=1e-5)
    assert after[0].equal(tails[2])
