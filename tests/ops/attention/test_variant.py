"""Sliding windows, chunks, soft caps and sinks in every operation, against softmax in fp64."""

import pytest
import torch

from eagle_kit.ops.attention.packed import packed_attention
from eagle_kit.ops.attention.prefill import PrefillPlan, paged_prefill_attention, prefill_attention
from eagle_kit.ops.attention.ttt import plan_queries, ttt_attention
from eagle_kit.ops.attention.variant import AttentionVariant, Limits
from eagle_kit.ops.attention.window import WindowPlan, ancestor_bits, window_attention
from eagle_kit.ops.tree_build.masks import tree_mask

SINKS = torch.tensor([0.3, -1.0, 2.0, 0.5, 1.5, -0.2])
VARIANTS = {
    "window": AttentionVariant(0.3, Limits(window=5)),
    "wide window": AttentionVariant(0.3, Limits(window=70)),
    "chunk": AttentionVariant(0.3, Limits(chunk=8)),
    "wide chunk": AttentionVariant(0.3, Limits(chunk=64)),
    "both": AttentionVariant(0.3, Limits(window=6, chunk=16)),
    "cap": AttentionVariant(0.3, soft_cap=2.0),
    "sinks": AttentionVariant(0.3, sinks=SINKS),
    "all": AttentionVariant(0.3, Limits(window=9), 3.0, SINKS),
}
HEADS, KV_HEADS, SIZE, PAGE = 6, 2, 16, 8
BACKENDS = ("reference", "triton")
WHOLE = {"wide window", "wide chunk", "both", "all"}
"""What has each part of a variant at least once; in Triton the others are nightly."""


def dense(q, k, v, positions, key_positions, seen, variant):
    """Attention of ``q [n, H, D]`` to the keys that are ``seen [n, c]`` and inside of the limits, in fp64."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("nhd,chd->hnc", q, k.repeat_interleave(group, 1)) * variant.scale
    if variant.soft_cap:
        scores = variant.soft_cap * torch.tanh(scores / variant.soft_cap)
    gap = positions[:, None] - key_positions
    if variant.limits.window:
        seen = seen & (gap < variant.limits.window)
    if variant.limits.chunk:
        seen = seen & (positions[:, None] // variant.limits.chunk == key_positions // variant.limits.chunk)
    weights = scores.masked_fill(~seen, float("-inf")).exp()
    total = weights.sum(-1, keepdim=True)
    if variant.sinks is not None:
        total = total + variant.sinks.double().exp()[:, None, None]
    return torch.einsum("hnc,chd->nhd", weights / total, v.repeat_interleave(group, 1))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on(variant, device):
    sinks = None if variant.sinks is None else variant.sinks.to(device)
    return AttentionVariant(variant.scale, variant.limits, variant.soft_cap, sinks)


FORMS = [*((name, "trees") for name in VARIANTS), *((name, "block") for name in ("window", "all", "sinks"))]


def on_backends(*cases):
    """Cases, of which the first value is the name of a variant, on every backend."""
    found = []
    for backend in BACKENDS:
        for name, *form in cases:
            is_slow = backend == "triton" and name not in WHOLE
            found.append(pytest.param(backend, name, *form, marks=[pytest.mark.nightly] * is_slow))
    return found


@pytest.mark.parametrize(("backend", "name", "form"), on_backends(*FORMS))
def test_windows(triton_device, backend, name, form):
    """Trees, and blocks whose nodes attend to each other both ways."""
    variant, prefixes, nodes, keys = VARIANTS[name], (3, 0, 131, 64, 300), 6, 9
    generator = torch.Generator().manual_seed(1)
    pages = -(-(max(prefixes) + keys) // PAGE)
    count = len(prefixes)
    table = torch.randperm(pages * count, generator=generator).view(count, pages)
    start = pages * count * PAGE
    parents = torch.zeros(count, keys, dtype=torch.int64)
    for node in range(1, keys):
        last = max(0, node - 3) if form == "trees" else node - 1
        parents[:, node] = torch.randint(last, node, (count,), generator=generator)
    bits = ancestor_bits(parents, keys)
    depths = tree_mask(bits, "window").sum(-1) - 1
    if form == "block":
        bits[:, keys - nodes :] = (1 << keys) - 1
    k, v = normal(2, KV_HEADS, start + count * 16 + 1, SIZE)
    q = normal(count, nodes, HEADS, SIZE, seed=2)
    plan = WindowPlan(
        page_table=table.to(triton_device),
        page_size=PAGE,
        prefix_lens=torch.tensor(prefixes).to(triton_device),
        first_position=0,
        scratch_start=start,
        scratch_stride=16,
        num_keys=keys,
        ancestors=bits[:, keys - nodes :].to(triton_device),
        num_columns=max(prefixes) + keys,
        dummy_row=start + count * 16,
        dtype=torch.float32,
    )
    inputs = (x.to(triton_device) for x in (q, k, v))
    out = window_attention(*inputs, plan, on(variant, triton_device), backend=backend).cpu()
    by_length = window_attention(q, k, v, plan, variant) if triton_device == "cpu" else out
    for b, prefix in enumerate(prefixes):
        slots = torch.arange(prefix)
        rows = torch.cat((table[b, slots // PAGE] * PAGE + slots % PAGE, start + b * 16 + torch.arange(keys)))
        seen = tree_mask(bits[b : b + 1, keys - nodes :], "full", [prefix], num_keys=keys).view(nodes, -1)
        places = torch.cat((slots, prefix + depths[b]))
        k_mine, v_mine = (x[:, rows].transpose(0, 1) for x in (k, v))
        exact = dense(q[b], k_mine, v_mine, places[-nodes:], places, seen, variant)
        torch.testing.assert_close(out[b].double(), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(by_length[b].double(), exact, rtol=1e-5, atol=1e-5)


def causal(q, k, v, variant):
    """Attention of one text, its last tokens being the queries."""
    places = torch.arange(len(k))
    mine = places[-len(q) :]
    return dense(q, k, v, mine, places, places <= mine[:, None], variant)


@pytest.mark.parametrize(("backend", "name"), on_backends(*((name,) for name in VARIANTS)))
def test_prompts(triton_device, backend, name):
    variant, chunks = VARIANTS[name], ((0, 40), (150, 33), (7, 1), (64, 64))
    starts, counts = (torch.tensor(x) for x in zip(*chunks, strict=True))
    pages = -(-int((starts + counts).max()) // PAGE)
    table = torch.randperm(pages * 4, generator=torch.Generator().manual_seed(1)).view(4, pages)
    k, v = normal(2, KV_HEADS, pages * 4 * PAGE, SIZE)
    q = normal(int(counts.sum()), HEADS, SIZE, seed=2)
    borders = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    arrays = (x.to(triton_device) for x in (table, borders, starts))
    tables, cu_rows, firsts = arrays
    plan = PrefillPlan(tables, PAGE, cu_rows, firsts, 0, int(counts.max()))
    inputs = (x.to(triton_device) for x in (q, k, v))
    out = paged_prefill_attention(*inputs, plan, on(variant, triton_device), backend=backend).cpu()
    for b, (start, count) in enumerate(chunks):
        slots = torch.arange(start + count)
        rows = table[b, slots // PAGE] * PAGE + slots % PAGE
        mine = slice(int(borders[b]), int(borders[b + 1]))
        exact = causal(q[mine], k[:, rows].transpose(0, 1), v[:, rows].transpose(0, 1), variant)
        torch.testing.assert_close(out[mine].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("backend", "name"), on_backends(*((name,) for name in VARIANTS)))
def test_packed_texts(triton_device, backend, name):
    variant, spans = VARIANTS[name], [(0, 3), (3, 90), (90, 130)]
    q, k, v = normal(130, HEADS, SIZE), *normal(2, 130, KV_HEADS, SIZE, seed=1)
    inputs = (x.to(triton_device) for x in (q, k, v))
    out = packed_attention(*inputs, spans, on(variant, triton_device), backend=backend).cpu()
    exact = torch.cat([causal(q[a:b], k[a:b], v[a:b], variant) for a, b in spans])
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in WHOLE)) for name in VARIANTS]
)
def test_packed_texts_are_differentiable(triton_device, name):
    variant, spans = on(VARIANTS[name], triton_device), [(0, 3), (3, 40)]
    tensors = [normal(40, HEADS, SIZE), *normal(2, 40, KV_HEADS, SIZE, seed=1)]
    ours = [x.to(triton_device).requires_grad_() for x in tensors]
    exact = [x.double().requires_grad_() for x in tensors]
    dout = normal(40, HEADS, SIZE, seed=3)
    out = packed_attention(*ours, spans, variant, backend="triton")
    mine = torch.autograd.grad(out, ours, dout.to(triton_device))
    wanted = torch.cat([causal(*(x[a:b] for x in exact), VARIANTS[name]) for a, b in spans])
    for a, b in zip(mine, torch.autograd.grad(wanted, exact, dout.double()), strict=True):
        torch.testing.assert_close(a.double().cpu(), b, rtol=1e-4, atol=1e-4)


def test_a_long_text_in_blocks():
    variant = VARIANTS["all"]
    q, k, v = normal(600, HEADS, SIZE), *normal(2, 620, KV_HEADS, SIZE, seed=1)
    out = prefill_attention(q, k, v, variant)
    torch.testing.assert_close(out.double(), causal(q, k, v, variant), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("step", "backend"),
    [
        (0, "reference"),
        pytest.param(0, "triton", marks=pytest.mark.nightly),
        (0, "cpu"),
        *((2, backend) for backend in ("reference", "triton", "cpu")),
    ],
)
def test_training_time_test_with_a_window(triton_device, backend, step):
    if backend == "cpu" and triton_device != "cpu":
        pytest.skip("the CPU's own operation")
    tokens, window, rows = 90, 12, torch.arange(5, 88, 2)
    doc_start = torch.zeros(tokens, dtype=torch.int64)
    doc_start[40:] = 40
    plan = plan_queries(rows.to(triton_device), doc_start.to(triton_device), 16).with_window(window, step)
    q, k, v = normal(len(rows), HEADS, SIZE), *normal(2, tokens, KV_HEADS, SIZE, seed=1)
    own_k, own_v = normal(2, len(rows), KV_HEADS, step, SIZE, seed=2)
    tensors = [x.to(triton_device).requires_grad_() for x in (q, k, v, own_k, own_v)]
    out = ttt_attention(*tensors, plan, 0.3, backend=backend)
    exact = [x.double().requires_grad_() for x in (q, k, v, own_k, own_v)]
    variant, wanted = AttentionVariant(0.3, Limits(window=window)), []
    for i, row in enumerate(rows.tolist()):
        first = int(doc_start[row])
        keys = torch.cat((exact[1][first : row + 1], exact[3][i].transpose(0, 1)))
        values = torch.cat((exact[2][first : row + 1], exact[4][i].transpose(0, 1)))
        wanted.append(causal(exact[0][i : i + 1], keys, values, variant))
    torch.testing.assert_close(out.double().cpu(), torch.cat(wanted), rtol=1e-5, atol=1e-5)
    dout = normal(len(rows), HEADS, SIZE, seed=4)
    mine = torch.autograd.grad(out, tensors, dout.to(triton_device))
    for a, b in zip(mine, torch.autograd.grad(torch.cat(wanted), exact, dout.double()), strict=True):
        torch.testing.assert_close(a.double().cpu(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["window", "wide window", "wide chunk", "all"])
def test_a_token_has_the_same_bits_in_a_chain_of_any_length(name):
    """Columns before the window are left out in runs that do not change the order of sums."""
    variant = VARIANTS[name]
    k, v = normal(2, KV_HEADS, 1400 + 3 * 16 + 1, SIZE)
    q = normal(4, HEADS, SIZE, seed=2)

    def attend(prefix, nodes):
        """Attention of the last of ``nodes`` nodes of a chain behind ``prefix`` slots."""
        table = torch.arange(175)[None]
        keys, values = k.clone(), v.clone()
        keys[:, 1400 : 1400 + nodes], values[:, 1400 : 1400 + nodes] = (
            x[:, prefix : prefix + nodes] for x in (k, v)
        )
        bits = ancestor_bits(torch.arange(-1, nodes - 1).clamp(min=0)[None], nodes)
        plan = WindowPlan(
            page_table=table,
            page_size=PAGE,
            prefix_lens=torch.tensor([prefix]),
            first_position=0,
            scratch_start=1400,
            scratch_stride=16,
            num_keys=nodes,
            ancestors=bits,
            num_columns=prefix + nodes,
            dummy_row=1448,
            dtype=torch.float32,
        )
        return window_attention(q[None, 4 - nodes :], keys, values, plan, variant)[0, -1]

    for position in (*range(370, 400), 500, 767, 768, 769, 830, *range(1150, 1160)):
        alone = attend(position, 1)
        assert all(attend(position - nodes + 1, nodes).equal(alone) for nodes in (2, 4)), position
