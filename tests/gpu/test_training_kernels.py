"""The trainer's kernels at the sizes of real heads: values and gradients against autograd in fp64."""

from itertools import pairwise

import pytest
import torch

from eagle_kit.ops.attention.packed import packed_attention
from eagle_kit.ops.attention.ttt import plan_queries, ttt_attention
from eagle_kit.ops.soft_cross_entropy import Teacher, linear_soft_cross_entropy
from tests.gpu.near import assert_near
from tests.gpu.place import DEVICE, DTYPES, generator, pick, randn

pytestmark = pytest.mark.usefixtures("poisoned_memory")
# Query heads, key heads, head size, documents, share of rows that learn, own keys.
PACKED = pick(
    {
        "Llama-3.1-8B, step 0": ((32, 8, 128), (1500, 548), 0.7, 0),
        "Llama-3.1-8B, step 6": ((32, 8, 128), (1500, 1, 547), 0.7, 6),
        "Qwen3-30B": ((32, 4, 128), (900, 100), 1.0, 3),
        "SmolLM2": ((9, 3, 64), (2048,), 0.5, 6),
        "size 80": ((32, 32, 80), (700, 324), 1.0, 2),
        "size 256": ((16, 8, 256), (600, 424), 1.0, 2),
    },
    {"tiny": ((4, 2, 16), (13, 1, 9), 0.7, 2)},
)


def dense(q, k, v, own_k, own_v, rows, doc_start):
    """One softmax over [all keys, masked | own keys], one key head at a time; differentiable in any dtype."""
    group, scale, out = q.shape[1] // k.shape[1], q.shape[2] ** -0.5, []
    at = torch.arange(k.shape[0], device=q.device)
    seen = (at[None] <= rows[:, None]) & (at[None] >= doc_start[rows][:, None])
    for h in range(k.shape[1]):
        mine = q[:, h * group : (h + 1) * group]
        prefix = torch.einsum("rgd,td->grt", mine, k[:, h]).masked_fill(~seen, float("-inf"))
        own = torch.einsum("rgd,rjd->grj", mine, own_k[:, h])
        p = (torch.cat((prefix, own), -1) * scale).softmax(-1)
        on_prefix, on_own = p.split((k.shape[0], own_k.shape[2]), -1)
        part = torch.einsum("grt,td->rgd", on_prefix, v[:, h])
        out.append(part + torch.einsum("grj,rjd->rgd", on_own, own_v[:, h]))
    return torch.cat(out, 1)


def check(names, run, right, inputs, by, dtype) -> None:
    """``run`` of ``inputs`` against ``right`` of them in fp64, forward and backward."""
    ours, theirs = ([x.detach().to(kind).requires_grad_() for x in inputs] for kind in (dtype, torch.float64))
    out, exact = run(*ours), right(*theirs)
    assert_near("out", out.detach(), exact.detach())
    upstream = randn(*out.shape, dtype=dtype, by=by)
    got = torch.autograd.grad(out, ours, upstream, materialize_grads=True)
    wanted = torch.autograd.grad(exact, theirs, upstream.double(), materialize_grads=True)
    for name, gradient, expected in zip(names, got, wanted, strict=True):
        if expected.numel():
            # Probabilities, their gradients and results are rounded, and what is summed up cancels.
            assert_near(f"gradient of {name}", gradient, expected, slack=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_ttt_attention(name, dtype):
    (hq, hkv, size), lengths, share, own = PACKED[name]
    by = generator(40)
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    doc_start = starts[:-1].repeat_interleave(torch.tensor(lengths, device=DEVICE))
    rows = (torch.rand(len(doc_start), generator=by, device=DEVICE) < share).nonzero()[:, 0]
    r, t = len(rows), len(doc_start)
    shapes = [(r, hq, size), *[(t, hkv, size)] * 2, *[(r, hkv, own, size)] * 2]
    inputs = [randn(*shape, dtype=dtype, by=by) for shape in shapes]
    plan = plan_queries(rows, doc_start)
    check(
        ("q", "k", "v", "own k", "own v"),
        lambda *x: ttt_attention(*x, plan, size**-0.5, backend="triton"),
        lambda *x: dense(*x, rows, doc_start),
        inputs,
        by,
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_packed_attention(name, dtype):
    (hq, hkv, size), lengths, _, _ = PACKED[name]
    by, borders = generator(41), torch.tensor([0, *lengths]).cumsum(0).tolist()
    spans = list(pairwise(borders))
    total = borders[-1]
    doc_start = torch.cat([torch.full((b - a,), a) for a, b in spans]).to(DEVICE)
    inputs = [randn(total, heads, size, dtype=dtype, by=by) for heads in (hq, hkv, hkv)]
    rows, none = torch.arange(total, device=DEVICE), inputs[1].new_empty(total, hkv, 0, size).double()
    check(
        "qkv",
        lambda *x: packed_attention(*x, spans, size**-0.5, backend="triton"),
        lambda *x: dense(*x, none, none, rows, doc_start),
        inputs,
        by,
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab", "size"),
    pick([(4096, 32000, 4096), (3000, 8192, 576), (1024, 128256, 2048)], [(7, 50, 24)]),
)
def test_the_loss(rows, vocab, size, dtype):
    by = generator(42)
    probs = (randn(rows // 2, vocab, by=by) * 3).softmax(-1)
    index = torch.randint(0, rows // 2, (rows,), generator=by, device=DEVICE)
    weights = torch.rand(rows, generator=by, device=DEVICE) / rows
    inputs = randn(rows, size, dtype=dtype, by=by), randn(vocab, size, dtype=dtype, by=by, scale=size**-0.5)
    h, weight = (x.clone().requires_grad_() for x in inputs)
    ours = linear_soft_cross_entropy(h, weight, Teacher(probs, index, weights), backend="triton")
    h64, weight64 = (x.double().requires_grad_() for x in inputs)
    logits = h64 @ weight64.T
    teacher = probs.double()
    losses = logits.logsumexp(-1) - torch.cat(
        [
            (logits[some] * teacher[index[some]]).sum(-1)
            for some in torch.arange(rows, device=DEVICE).split(512)
        ]
    )
    assert_near("losses", ours.row_losses, losses.detach(), dtype)
    best = logits.detach().gather(1, ours.best[:, None])[:, 0]
    assert ((logits.detach().max(-1).values - best) <= 0.02 * best.abs() + 1e-5).all()
    got = torch.autograd.grad(ours.loss * 3, (h, weight))
    wanted = torch.autograd.grad((losses * weights.double()).sum() * 3, (h64, weight64))
    for name, gradient, expected in zip(("h", "weight"), got, wanted, strict=True):
        assert_near(f"gradient of {name}", gradient, expected, dtype, slack=2)
