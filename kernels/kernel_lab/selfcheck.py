"""A small check of every operation on this machine, against the same thing written out in fp64.

The tests go further (hostile shapes, gradients of everything); this tells within a second whether the
libraries of this machine compute what they should, and which forms of each operation there are.
"""

import json
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.ops.accept import Accepted, accept_greedy, accept_rejection_chain, most_likely, outcome
from eagle_kit.ops.attention.mla import mla_window_attention
from eagle_kit.ops.attention.packed import packed_attention
from eagle_kit.ops.attention.prefill import PrefillPlan, paged_prefill_attention, prefill_attention
from eagle_kit.ops.attention.ttt import plan_queries, ttt_attention
from eagle_kit.ops.attention.variant import AttentionVariant, Limits
from eagle_kit.ops.attention.window import WindowPlan, ancestor_bits, window_attention
from eagle_kit.ops.backend import Backend, use
from eagle_kit.ops.best_first import best_first
from eagle_kit.ops.commit import commit_path
from eagle_kit.ops.cpu import cpp
from eagle_kit.ops.draft_inputs import draft_inputs
from eagle_kit.ops.draft_loss import linear_draft_loss
from eagle_kit.ops.draft_topk import draft_topk, topk_of_logits
from eagle_kit.ops.experts import experts
from eagle_kit.ops.linear import linear, onednn, panels
from eagle_kit.ops.norm import add_rms_norm, rms_norm
from eagle_kit.ops.recurrence import (
    Inputs,
    Text,
    TextPlan,
    commit_recurrent,
    recurrent_texts,
    recurrent_window,
)
from eagle_kit.ops.rope import Rotation, WindowRows, rope_store
from eagle_kit.ops.rows import append_rows, gather_rows, write_rows
from eagle_kit.ops.sampling import make_sampling_batch, sample, target_probs
from eagle_kit.ops.small_linear import small_linear, small_linear_swiglu
from eagle_kit.ops.soft_cross_entropy import Teacher, linear_soft_cross_entropy
from eagle_kit.ops.swiglu import swiglu
from eagle_kit.ops.tree_build import tree_build
from kernel_lab.aot import kernel_modules, operation_of

TOLERANCE = 2e-5
"""Largest error allowed, relative to the largest value: fp32 sums of a few hundred terms of order one."""

PLAIN = AttentionVariant(16**-0.5)


class Check(NamedTuple):
    """One form of one operation: ``error`` is the largest difference over the largest value."""

    kernel: str
    form: str
    error: float

    @property
    def ok(self) -> bool:
        """True if the error is a rounding error."""
        return self.error <= TOLERANCE


def run_checks() -> list[Check]:
    """Check every operation in fp32 on torch's default device: torch's forms, oneDNN's, and those in C++."""
    with use("reference"):
        return [Check(kernel, form, error()) for kernel, form, error in _checks("reference")]


def run_triton_checks() -> list[Check]:
    """Check the Triton forms: on the GPU, or interpreted where ``TRITON_INTERPRET`` is set. Operations
    without one are left out."""
    from kernel_lab.interpreter import repair

    on_gpu = torch.cuda.is_available()
    kernels = {operation_of(module) for module in kernel_modules()}
    if not on_gpu:
        repair()
        warnings.filterwarnings(
            "ignore", "invalid value encountered in cast", RuntimeWarning
        )  # of lanes unused
    with torch.device("cuda" if on_gpu else "cpu"), use("triton"):
        return [
            Check(kernel, "Triton" if on_gpu else "Triton, interpreted", error())
            for kernel, form, error in _checks("triton")
            if kernel in kernels and "torch" in form
        ]


def _checks(backend: Backend) -> list[tuple[str, str, Callable[[], float]]]:
    checks: list[tuple[str, str, Callable[[], float]]] = [("linear", "torch", lambda: _linear("torch"))]
    if onednn.available():
        checks += [
            ("linear", "oneDNN", lambda: _linear("onednn")),
            ("linear", "oneDNN, packed", lambda: _packed_linear(onednn.pack, onednn.packed_matmul)),
        ]
    if cpp.available() and torch.get_default_device().type == "cpu":
        checks += [
            ("linear", "C++, packed", lambda: _packed_linear(panels.pack, panels.matmul)),
            (
                "linear",
                "C++, packed bfloat16",
                lambda: _packed_linear(panels.pack, panels.matmul, short=True),
            ),
            ("prefill_attention", "C++, paged", partial(_in_cpp, _paged_prefill)),
            ("window_attention", "C++", partial(_in_cpp, _window)),
            ("window_attention", "C++, window, cap, sinks", partial(_in_cpp, lambda: _window(_variant()))),
            ("mla_attention", "C++", partial(_in_cpp, _mla)),
            ("norm", "C++", partial(_in_cpp, _norm)),
            ("swiglu", "C++", partial(_in_cpp, _swiglu)),
            ("rope", "C++", partial(_in_cpp, _rope)),
            ("accept", "C++, most likely", partial(_in_cpp, _most_likely)),
            ("commit", "C++", partial(_in_cpp, _commit)),
            ("draft_topk", "C++, of logits", partial(_in_cpp, _topk_of_logits)),
            ("rows", "C++", partial(_in_cpp, _rows)),
        ]
    return [
        *checks,
        ("prefill_attention", "dense", _prefill),
        ("prefill_attention", "torch, paged", _paged_prefill),
        ("prefill_attention", "torch, window, cap, sinks", lambda: _prefill(_variant())),
        ("window_attention", "torch", _window),
        ("window_attention", "torch, window, cap, sinks", lambda: _window(_variant())),
        ("mla_attention", "torch", _mla),
        ("recurrence", "torch, delta rule over a tree", lambda: _recurrence(True)),
        ("recurrence", "torch, decayed sums over a tree", lambda: _recurrence(False)),
        ("recurrence", "torch, delta rule over texts", _recurrent_texts),
        ("small_linear", "torch", _small_linear),
        ("small_linear", "torch, SwiGLU", _linear_swiglu),
        ("experts", "torch", _experts),
        ("tree_build", "torch", _tree),
        ("best_first", "torch", _best_first),
        ("accept", "torch", _accept),
        ("accept", "torch, sampled chain", _accept_sampled),
        ("accept", "torch, outcome", _outcome),
        ("sampling", "torch, distribution", _distribution),
        ("sampling", "torch, samples", _samples),
        ("packed_attention", "torch", _packed_attention),
        ("packed_attention", "torch, window, cap, sinks", lambda: _packed_attention(_variant())),
        ("ttt_attention", "torch", lambda: _ttt(backend)),
        ("ttt_attention", "CPU flash", lambda: _ttt("cpu")),
        ("soft_cross_entropy", "torch", _soft_cross_entropy),
        ("draft_loss", "torch, acceptance", _draft_loss),
        ("norm", "torch", _norm),
        ("norm", "torch, gradients", _norm_gradients),
        ("rope", "torch", _rope),
        ("rope", "torch, gradients", _rope_gradients),
        ("swiglu", "torch", _swiglu),
        ("commit", "torch", _commit),
        ("draft_topk", "torch", _draft_topk),
        ("rows", "torch", _rows),
        ("draft_inputs", "torch", _draft_inputs),
    ]


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device())


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


def _largest(*errors: float) -> float:
    """The largest error of several results. It is NaN if one of them is; ``max`` may ignore a NaN."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


def _variant() -> AttentionVariant:
    """A sliding window of five tokens, capped scores and sinks of six heads."""
    return AttentionVariant(PLAIN.scale, Limits(window=5), 2.0, _randn(6, seed=9))


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    variant: AttentionVariant = PLAIN,
    places: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """q ``[T, Hq, D]``, k and v ``[C, Hkv, D]``, seen bool ``[T, C]`` -> ``[T, Hq, D]`` in fp64. ``places``
    are the positions of queries and keys; default those of the last of C tokens."""
    group, c = q.shape[1] // k.shape[1], len(k)
    mine, theirs = places or (torch.arange(c - len(q), c), torch.arange(c))
    if variant.limits.window:
        seen = seen & (mine[:, None] - theirs < variant.limits.window)
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,chd->htc", q.double(), k) * variant.scale
    if variant.soft_cap is not None:
        scores = variant.soft_cap * torch.tanh(scores / variant.soft_cap)
    weights = scores.masked_fill(~seen, float("-inf")).exp()
    total = weights.sum(-1, keepdim=True)
    if variant.sinks is not None:
        total = total + variant.sinks.double().exp()[:, None, None]
    return torch.einsum("htc,chd->thd", weights / total, v)


def _linear(backend: str) -> float:
    x, weight = _randn(37, 96), _randn(65, 96, seed=1)
    return _error(linear(x, weight, backend=backend), x.double() @ weight.double().t())


def _packed_linear(
    pack: Callable[..., Any], matmul: Callable[..., torch.Tensor], *, short: bool = False
) -> float:
    x, weight = _randn(5, 96), _randn(65, 96, seed=1)
    weight = weight.bfloat16().float() if short else weight
    return _error(matmul(x, pack(weight)), x.double() @ weight.double().t())


def _in_cpp(check: Callable[[], float]) -> float:
    with use("cpp"):
        return check()


def _norm() -> float:
    x, residual, weight = _randn(5, 96), _randn(5, 96, seed=1), _randn(96, seed=2)
    total = (x + residual).double()
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    normed, added = add_rms_norm(x, residual, weight, 1e-5)
    alone = rms_norm(added, weight, 1e-5)
    return _largest(_error(normed, expected), _error(alone, expected))


def _rope() -> float:
    """Two query heads and a key head of four elements: pairs (0, 2) and (1, 3) turn by the positions' angles,
    late ones too; keys and values of a window go to their rows."""
    qkv, rotation = _randn(4, 4, 4), Rotation(torch.tensor([0, 7, 131071, 2]), torch.tensor([1.0, 0.03]))
    k_rows, v_rows = torch.zeros(2, 1, 9, 4)
    stores = {"k_rows": k_rows, "v_rows": v_rows, "rows": WindowRows(2, 3, 2, 2, qkv.device)}
    q = rope_store(qkv, rotation, num_heads=2, **stores, returns_kv=False)[0]
    written = torch.tensor([2, 3, 5, 6])
    got = torch.cat((q, k_rows[0, written, None], v_rows[0, written, None]), 1)
    angle = (rotation.positions[:, None, None].float() * rotation.inv_freq).double()
    turned = torch.view_as_complex(qkv.double().unflatten(-1, (2, 2)).transpose(-1, -2).contiguous())
    turned = turned * torch.polar(torch.ones(()).double(), angle)
    expected = torch.view_as_real(turned).transpose(-1, -2).flatten(-2)
    expected[:, 3] = qkv[:, 3].double()
    return _error(got, expected)


def _norm_gradients() -> float:
    """Gradients of x and of the weight, with one that flows into the sum."""
    x, residual, weight = (
        each.requires_grad_() for each in (_randn(5, 96), _randn(5, 96, seed=1), _randn(96))
    )
    ups = _randn(5, 96, seed=3), _randn(5, 96, seed=4)
    got = torch.autograd.grad(add_rms_norm(x, residual, weight, 1e-5), (x, weight), ups)
    total = (x + residual).double()
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    wanted = torch.autograd.grad((expected, total), (x, weight), [up.double() for up in ups])
    return _largest(*(_error(*pair) for pair in zip(got, wanted, strict=True)))


def _rope_gradients() -> float:
    """The gradient is rotated by the negative angles: behind the rotation it is what it was."""
    qkv, rotation = (
        _randn(3, 4, 4).requires_grad_(),
        Rotation(torch.tensor([1, 7, 2]), torch.tensor([1.0, 0.3])),
    )
    got = torch.cat(rope_store(qkv, rotation, num_heads=2), 1)
    (gradient,) = torch.autograd.grad(got, qkv, got.detach())
    return _error(gradient, qkv.detach())


def _swiglu() -> float:
    x = _randn(5, 24)
    gate, up = x.double().chunk(2, -1)
    return _error(swiglu(x), gate / (1 + (-gate).exp()) * up)


def _commit() -> float:
    """Nodes 0 and 2 of a window at rows 8.. go to positions 3 and 4, on pages 1 and 0 of two rows each."""
    k, v = _randn(2, 1, 12, 3), _randn(2, 1, 12, 3, seed=1)
    expected = torch.cat((k, v))
    expected[:, :, [3, 0]] = expected[:, :, [8, 10]]
    pages, one = torch.tensor([[2, 1, 0]]), torch.tensor([2])
    commit_path(k, v, pages, 2, torch.tensor([[0, 2, 1]]), one + 1, one, 8, 4)
    return _error(torch.cat((k, v)), expected)


def _draft_inputs() -> float:
    features, table, weights = _randn(3, 24), _randn(9, 24, seed=1), _randn(2, 24, seed=2)
    rows, tokens = torch.tensor([2, 0, 1, 2]), torch.tensor([8, 1, 0, 3])
    got, taken = draft_inputs(features, rows, tokens, table, (weights[0], weights[1]), 1e-5)
    parts = torch.stack((table[tokens], features[rows])).double()
    normed = parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[:, None].double()
    return _largest(_error(got, torch.cat(tuple(normed), -1)), _error(taken, features[rows]))


def _outcome() -> float:
    """Two drafts of one request are accepted; the other is padding, and has NaN on its path."""
    logits, two = _randn(2, 4, 9), torch.tensor([2, 0])
    logits[1, 0, 3] = torch.nan
    tokens, path = torch.tensor([[5, 6, 7], [8, 0, 0]]), torch.tensor([[0, 1, 3], [0, 0, 0]])
    found = outcome(logits.amax(-1), Accepted(path, tokens, two), torch.tensor([True, False]), two + 9)
    exact = torch.tensor([[3, 0], [1, 0], [7, 8], [14, 9]])
    return _error(torch.stack([part.long() for part in found]), exact)


def _rows() -> float:
    """Rows of two tables of different widths, moved to other rows; and an entry behind the two of row 3."""
    tables, at, to = [_randn(6, 5), torch.arange(6) * 7], torch.tensor([4, 1]), torch.tensor([0, 5])
    entries = _randn(6, 4, 3, seed=1)
    counts = torch.full((6,), 2)
    expected = [table.clone() for table in (*tables, entries, counts)]
    for table in expected[:2]:
        table[[0, 5]] = table[[4, 1]]
    expected[2][3, 2] = 7.0
    expected[3][3] = 3
    write_rows(tables, to, gather_rows(tables, at))
    row = torch.tensor([3])
    append_rows([entries], counts, row, [torch.full((1, 3), 7.0)], torch.ones_like(row))
    tables += [entries, counts]
    return _largest(*(_error(got, exact) for got, exact in zip(tables, expected, strict=True)))


def _most_likely() -> float:
    logits = _randn(5, 70)
    best = logits.double().max(-1)
    got = most_likely(logits)
    return _largest(_error(got.values, best.values), _error(got.tokens, best.indices))


def _draft_topk() -> float:
    x, weight = _randn(4, 16), _randn(50, 16, seed=1)
    ids, logprobs = draft_topk(x, weight, 3)
    expected = (x.double() @ weight.double().T).log_softmax(-1).topk(3, -1)
    return _largest(_error(logprobs, expected.values), _error(ids, expected.indices))


def _topk_of_logits() -> float:
    logits = _randn(4, 50)
    ids, logprobs = topk_of_logits(logits, 3)
    expected = logits.double().log_softmax(-1).topk(3, -1)
    return _largest(_error(logprobs, expected.values), _error(ids, expected.indices))


def _prefill(variant: AttentionVariant = PLAIN) -> float:
    q, k, v = _randn(19, 6, 16), _randn(30, 2, 16, seed=1), _randn(30, 2, 16, seed=2)
    seen = torch.ones(19, 30, dtype=torch.bool).tril(11)
    return _error(prefill_attention(q, k, v, variant), _dense(q, k, v, seen, variant))


def _paged_prefill() -> float:
    """Rows 3..7 of one request and 0..1 of another, on shuffled pages of four."""
    k, v, q = _randn(2, 24, 16), _randn(2, 24, 16, seed=1), _randn(7, 6, 16, seed=2)
    tables, ends = torch.tensor([[5, 1], [3, 0]]), torch.tensor([0, 5, 7])
    plan = PrefillPlan(tables, 4, ends, torch.tensor([3, 0]), 0, 5)
    got = paged_prefill_attention(q, k, v, plan, 16**-0.5)
    each = []
    for queries, rows, seen in (
        (q[:5], [20, 21, 22, 23, 4, 5, 6, 7], torch.ones(5, 8, dtype=torch.bool).tril(3)),
        (q[5:], [12, 13], torch.ones(2, 2, dtype=torch.bool).tril()),
    ):
        each.append(_dense(queries, k[:, rows].transpose(0, 1), v[:, rows].transpose(0, 1), seen))
    return _error(got, torch.cat(each))


def _mla() -> float:
    """A chain of three behind five rows of one page; the value is the front of the key."""
    rows, q = _randn(12, 80), _randn(1, 3, 4, 80, seed=1)
    page, three = torch.tensor([[0]]), torch.tensor([[1, 3, 7]])
    plan = WindowPlan(page, 8, torch.tensor([5]), 0, 8, 3, 3, three, 8, 11, torch.float32)
    keys = rows[[0, 1, 2, 3, 4, 8, 9, 10]].double()
    scores = torch.einsum("nhd,cd->hnc", q[0].double(), keys) * 0.2
    scores = scores.masked_fill(~torch.ones(3, 8, dtype=torch.bool).tril(5), float("-inf"))
    expected = torch.einsum("hnc,cl->nhl", scores.softmax(-1), keys[:, :64])
    return _error(mla_window_attention(q, rows, plan, 0.2, latent_dim=64)[0], expected)


def _recurrence(delta: bool) -> float:
    """Five nodes, two of them siblings: the path to the last is read token by token, and committed."""
    nodes, heads, size = 5, 2, 4
    q, k, v = (
        _randn(1, nodes, heads, size),
        _randn(1, nodes, heads, size, seed=1),
        _randn(1, nodes, heads, 3, seed=2),
    )
    g, beta = -_randn(1, nodes, heads, seed=3).abs(), _randn(1, nodes, heads, seed=4).sigmoid()
    state = _randn(1, heads, size, 3, seed=5)
    bits = ancestor_bits(torch.tensor([[0, 0, 0, 1, 3]]), 3)
    slot = torch.zeros(1, dtype=torch.int64)
    out, written = recurrent_window(Inputs(q, k * 0.5, v, g, beta), state, slot, bits, delta=delta)
    path, expected = [0, 1, 3, 4], state[0].double()
    committed = state.clone()
    for node in path:
        expected = expected * g[0, node].double().exp()[:, None, None]
        key = 0.5 * k[0, node].double()
        read = torch.einsum("hkv,hk->hv", expected, key) if delta else 0.0
        u = beta[0, node].double()[:, None] * (v[0, node].double() - read)
        expected = expected + key[:, :, None] * u[:, None]
    last = torch.einsum("hkv,hk->hv", expected, q[0, 4].double())
    commit_recurrent(committed, slot, written, torch.tensor([path]), torch.tensor([4]))
    return _largest(_error(out[0, 4], last), _error(committed[0], expected))


def _recurrent_texts() -> float:
    """Two texts, the second behind a state; the end of the first is saved."""
    heads, size, lengths = 2, 4, (40, 3)
    q, k = (_randn(43, heads, size, seed=seed) * 0.5 for seed in (0, 1))
    v, states = _randn(43, heads, 3, seed=2), _randn(3, heads, size, 3, seed=5)
    g, beta = -_randn(43, heads, seed=3).abs(), _randn(43, heads, seed=4).sigmoid()
    expected, ends = [], []
    for source, start, length in ((None, 0, lengths[0]), (1, lengths[0], lengths[1])):
        state = torch.zeros_like(states[0]).double() if source is None else states[source].double()
        for t in range(start, start + length):
            state = state * g[t].double().exp()[:, None, None]
            read = torch.einsum("hkv,hk->hv", state, k[t].double())
            u = beta[t].double()[:, None] * (v[t].double() - read)
            state = state + k[t].double()[:, :, None] * u[:, None]
            expected.append(torch.einsum("hkv,hk->hv", state, q[t].double()))
        ends.append(state)
    plan = TextPlan([Text(0, lengths[0], None, ((lengths[0], 2),)), Text(lengths[0], 43, 1)])
    out = recurrent_texts(Inputs(q, k, v, g, beta), states, plan, delta=True)
    return _largest(_error(out, torch.stack(expected)), _error(states[2], ends[0]))


def _experts() -> float:
    """Five tokens, two of three experts each."""
    x, gate_up, down = _randn(5, 8), _randn(3, 12, 8, seed=1), _randn(3, 8, 6, seed=2)
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    weights = torch.tensor([0.7, 0.3]).expand(5, 2)
    expected = torch.zeros(5, 8, dtype=torch.float64)
    for t, chosen in enumerate(ids.tolist()):
        for expert, share in zip(chosen, (0.7, 0.3), strict=True):
            gate, up = (gate_up[expert].double() @ x[t].double()).chunk(2)
            expected[t] += share * (down[expert].double() @ (gate * gate.sigmoid() * up))
    return _error(experts(x, ids, weights, gate_up, down), expected)


def _small_linear() -> float:
    """Small whole numbers, whose sums bf16 holds exactly."""
    x, weight = _randn(5, 64).sign(), _randn(24, 64, seed=1).sign()
    got = small_linear(x.bfloat16(), weight.bfloat16())
    return _error(got, x.double() @ weight.double().T)


def _linear_swiglu() -> float:
    """The same, gate above up; the result is rounded to bf16."""
    x, weight = _randn(5, 64).sign(), _randn(24, 64, seed=1).sign()
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    got = small_linear_swiglu(x.bfloat16(), weight.bfloat16()).double()
    silu = (gate / (1 + torch.exp(-gate))).bfloat16().double()
    return _error(got, (silu * up).bfloat16())


def _window(variant: AttentionVariant = PLAIN) -> float:
    """Five nodes, two of them siblings, behind a prefix of seven rows on three shuffled pages of four."""
    pages, parents = torch.tensor([[2, 0, 1]]), torch.tensor([[0, 0, 0, 1, 3]])
    k, v, q = _randn(2, 20, 16), _randn(2, 20, 16, seed=1), _randn(1, 5, 6, 16, seed=2)
    bits = ancestor_bits(parents, 3)
    counters = torch.zeros(2, dtype=torch.int32)
    lens = torch.tensor([7])
    plan = WindowPlan(pages, 4, lens, 0, 12, 7, 5, bits, 16, 19, torch.float32, arrivals=counters)
    rows = torch.tensor([8, 9, 10, 11, 0, 1, 2, *range(12, 17)])
    nodes = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4]]
    seen = torch.zeros(5, 12, dtype=torch.bool)
    for node, ancestors in enumerate(nodes):
        seen[node, [*range(7), *(7 + ancestor for ancestor in ancestors)]] = True
    depths = torch.tensor([7 + len(ancestors) - 1 for ancestors in nodes])
    places = depths, torch.cat((torch.arange(7), depths))
    expected = _dense(q[0], k[:, rows].transpose(0, 1), v[:, rows].transpose(0, 1), seen, variant, places)
    return _error(window_attention(q, k, v, plan, variant)[0], expected)


def _tree() -> float:
    """Two steps of two candidates: the window of four keeps the three best, in the order of drafting."""
    tokens, parents = torch.tensor([[10, 11, 12, 13, 14, 15]]), torch.tensor([[-1, -1, 0, 0, 1, 1]])
    scores = torch.tensor([[-0.1, -2.0, -0.5, -3.0, -2.5, -4.0]])
    tree = tree_build(torch.tensor([9]), tokens, scores, parents, SpecShape(2, 2, 4))
    got = torch.cat((tree.tokens, tree.parents, tree.depths, tree.ancestors))
    return _error(got, torch.tensor([[9, 10, 11, 12], [0, 0, 0, 1], [0, 1, 1, 2], [1, 3, 5, 11]]))


def _best_first() -> float:
    """Two depths of two candidates: the better one's better child (0.42) beats the other (0.4), whose own one
    (0.28) beats the better one's second child (0.18)."""
    tokens, scores = torch.tensor([[[10, 11], [12, 13]]]), torch.tensor([[[[0.6, 0.4]], [[0.7, 0.3]]]]).log()
    tree = best_first(torch.tensor([9]), tokens, scores, SpecShape(2, 2, 5))
    got = torch.cat((tree.tokens, tree.parents, tree.depths, tree.ancestors))
    return _error(
        got, torch.tensor([[9, 10, 12, 11, 12], [0, 0, 1, 0, 3], [0, 1, 2, 1, 2], [1, 3, 7, 9, 25]])
    )


def _accept() -> float:
    """The target agrees with the second child of the root and then with nothing."""
    tokens, parents = torch.tensor([[9, 10, 11, 12]]), torch.tensor([[0, 0, 0, 2]])
    accepted = accept_greedy(torch.tensor([[11, 1, 13, 2]]), tokens, parents, 2)
    got = torch.cat((accepted.num_accepted, accepted.tokens[0, :2], accepted.path[0, :2]))
    return _error(got, torch.tensor([1, 11, 13, 0, 2]))


def _accept_sampled() -> float:
    """Uniform random numbers 0.3 and 0.7 against p / q of 0.5 and 0.5: the first draft is kept, the second is
    replaced."""
    probs = torch.tensor([[[0.2, 0.3, 0.5], [0.4, 0.1, 0.5], [0.1, 0.8, 0.1]]])
    q = torch.tensor([[[0.4, 0.3, 0.3], [0.4, 0.2, 0.4]]])
    tokens = torch.tensor([[9, 0, 1]])
    uniforms = torch.tensor([[0.3, 0.7]], dtype=torch.float64)
    accepted = accept_rejection_chain(probs, q, tokens, uniforms, torch.tensor([0.5], dtype=torch.float64))
    got = torch.cat((accepted.num_accepted, accepted.tokens[0, :2]))
    return _error(got, torch.tensor([1, 0, 2]))


def _distribution() -> float:
    """Temperature 0.5, top-k 3 and top-p 0.9 of four tokens: the two most likely ones stay."""
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9)
    batch = make_sampling_batch([params], [[]], [0], 4, torch.get_default_device())
    logits = torch.tensor([2.0, 1.0, 0.0, 1.5])
    weights = (logits.double() / 0.5).exp() * torch.tensor([1, 0, 0, 1])
    return _error(target_probs(logits.view(1, 1, 4), batch)[0, 0], weights / weights.sum())


def _samples() -> float:
    """Uniform random numbers on a grid of 1,024 draw every token as often as its distribution says."""
    probs = torch.tensor([0.125, 0.0, 0.625, 0.25])
    uniforms = (torch.arange(1024, dtype=torch.float64) + 0.5) / 1024
    counts = torch.bincount(sample(probs.expand(1024, 4), uniforms), minlength=4)
    return _error(counts / 1024, probs)


def _packed_attention(variant: AttentionVariant = PLAIN) -> float:
    q, k, v = _randn(23, 6, 16), _randn(23, 2, 16, seed=1), _randn(23, 2, 16, seed=2)
    document = torch.tensor([0] * 9 + [1] * 14)
    seen = torch.ones(23, 23, dtype=torch.bool).tril() & (document[:, None] == document)
    return _error(packed_attention(q, k, v, [(0, 9), (9, 23)], variant), _dense(q, k, v, seen, variant))


def _ttt(backend: Backend | Literal["cpu"]) -> float:
    """Rows 3..8 of one document of nine, each with two own keys besides its prefix."""
    rows = torch.arange(3, 9)
    q, k, v = _randn(6, 6, 16), _randn(9, 2, 16, seed=1), _randn(9, 2, 16, seed=2)
    own_k, own_v = _randn(6, 2, 2, 16, seed=3), _randn(6, 2, 2, 16, seed=4)
    blocks = plan_queries(rows, torch.zeros(9, dtype=torch.int64))
    got = ttt_attention(q, k, v, own_k, own_v, blocks, 16**-0.5, backend=backend)
    each = [
        _dense(
            q[i : i + 1],
            torch.cat((k[: row + 1], own_k[i].transpose(0, 1))),
            torch.cat((v[: row + 1], own_v[i].transpose(0, 1))),
            torch.ones(1, row + 3, dtype=torch.bool),
        )
        for i, row in enumerate(rows.tolist())
    ]
    return _error(got, torch.cat(each))


def _soft_cross_entropy() -> float:
    """Loss and both gradients, in chunks that do not divide the rows."""
    h, weight = _randn(11, 24).requires_grad_(), _randn(33, 24, seed=1).requires_grad_()
    probs, index = _randn(7, 33, seed=2).softmax(-1), torch.arange(11) % 7
    c = torch.linspace(0.1, 1.0, 11)
    fused = linear_soft_cross_entropy(h, weight, Teacher(probs, index, c), chunk_rows=4, group_rows=8).loss
    fused.backward()
    exact = [x.detach().double().requires_grad_() for x in (h, weight)]
    log_p = (exact[0] @ exact[1].t()).log_softmax(-1)
    loss = -(c.double() * (probs.double()[index] * log_p).sum(-1)).sum()
    loss.backward()
    pairs = [(fused, loss), (h.grad, exact[0].grad), (weight.grad, exact[1].grad)]
    return _largest(*(_error(a.detach(), b.detach()) for a, b in pairs if a is not None and b is not None))


def _draft_loss() -> float:
    """The negative logarithm of the acceptance rate and its gradient, with words the draft cannot say."""
    h, weight = _randn(11, 24).requires_grad_(), _randn(33, 24, seed=1)
    distribution, index = _randn(7, 50, seed=2).softmax(-1), torch.arange(11) % 7
    mass = distribution[:, :33].sum(-1)
    probs, c = distribution[:, :33] / mass[:, None], torch.linspace(0.1, 1.0, 11)
    fused = linear_draft_loss(h, weight, Teacher(probs, index, c, mass), loss="lk-alpha", chunk_rows=4).loss
    fused.backward()
    exact = h.detach().double().requires_grad_()
    q = (exact @ weight.double().t()).softmax(-1)
    loss = -(c.double() * torch.minimum(q, distribution.double()[index, :33]).sum(-1).log()).sum()
    loss.backward()
    assert h.grad is not None and exact.grad is not None
    return _largest(_error(fused.detach(), loss.detach()), _error(h.grad, exact.grad))


if __name__ == "__main__":
    for check in run_triton_checks():
        print(json.dumps(check._asdict()))
