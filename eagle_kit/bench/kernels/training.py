"""Cases of training: attention of training-time test, of packed rows, and the loss.

Legend: T packed tokens, J own keys of a row, M rows, Vd draft vocabulary.
"""

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from eagle_kit.bench.kernels import cost
from eagle_kit.bench.kernels.case import Case, PreparedCase, RandomInputs, Sizes
from eagle_kit.kernels.backend import Backend
from eagle_kit.kernels.packed_attention import packed_attention
from eagle_kit.kernels.soft_cross_entropy import Teacher, linear_soft_cross_entropy
from eagle_kit.kernels.ttt_attention import plan_rows, ttt_attention


def ttt_cases(sizes: Sizes) -> list[Case]:
    """One document, every row supervised; J own keys at step J."""
    t = sizes.train_tokens
    heads = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    pairs = t * (t + 1) // 2
    return [
        Case(
            f"{'forward and backward' if backward else 'forward'}, {t} rows, {j} own keys",
            partial(cost.ttt_attention, t, t, j, pairs, *heads, backward=backward),
            partial(_make_ttt, sizes, j, backward),
            {"rows": t, "own_keys": j, "backward": backward},
            trains=backward,
        )
        for backward in (False, True)
        for j in (0, 3, 6)
    ]


def _make_ttt(sizes: Sizes, j: int, backward: bool, rng: RandomInputs) -> PreparedCase:
    t, hq, hkv, d = sizes.train_tokens, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    q, grad = rng.normal(t, hq, d), rng.normal(t, hq, d)
    k, v = (rng.normal(t, hkv, d) for _ in range(2))
    own_k, own_v = (rng.normal(t, hkv, j, d) for _ in range(2))
    inputs = tuple(x.requires_grad_(backward) for x in (q, k, v, own_k, own_v))
    rows = torch.arange(t, device=rng.device)
    plan = plan_rows(rows, torch.zeros_like(rows))

    def op(backend: Backend) -> Any:
        out = ttt_attention(q, k, v, own_k, own_v, plan, d**-0.5, backend=backend)
        return (out, *torch.autograd.grad(out, inputs, grad)) if backward else out

    # The backward reads the inputs again, the result, and the result's gradient.
    reads = (*inputs, *inputs, q, grad) if backward else inputs
    return PreparedCase(op, reads=reads)


def packed_cases(sizes: Sizes) -> list[Case]:
    """Causal attention of a packed row: one document, and four."""
    t = sizes.train_tokens
    heads = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim

    def cost_of(documents: int, e: int) -> cost.Cost:
        n = t // documents
        return cost.ttt_attention(t, t, 0, documents * n * (n + 1) // 2, *heads, e)

    return [
        Case(
            f"forward, {t} tokens, {documents} document{'s' * (documents > 1)}",
            partial(cost_of, documents),
            partial(_make_packed, sizes, documents),
            {"rows": t, "documents": documents},
        )
        for documents in (1, 4)
    ]


def _make_packed(sizes: Sizes, documents: int, rng: RandomInputs) -> PreparedCase:
    t, hq, hkv, d = sizes.train_tokens, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    q, k, v = rng.normal(t, hq, d), rng.normal(t, hkv, d), rng.normal(t, hkv, d)
    size = t // documents
    spans = [(i * size, (i + 1) * size) for i in range(documents)]

    def sdpa() -> Any:
        keys, values = (x.repeat_interleave(hq // hkv, 1) for x in (k, v))
        queries, keys, values = (
            x.unflatten(0, (documents, size)).transpose(1, 2).contiguous() for x in (q, keys, values)
        )
        return lambda: F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=d**-0.5)

    def op(backend: Backend) -> torch.Tensor:
        return packed_attention(q, k, v, spans, d**-0.5, backend=backend)

    return PreparedCase(op, {"sdpa": sdpa}, (q, k, v), eager=("triton",))


def loss_cases(sizes: Sizes) -> list[Case]:
    """Linear layer and soft cross-entropy with both gradients."""
    m, h, vd = sizes.train_tokens, sizes.hidden_size, sizes.draft_vocab_size
    return [
        Case(
            f"forward and backward, {m} rows",
            partial(cost.soft_cross_entropy, m, h, vd, m),
            partial(_make_loss, m, h, vd),
            {"rows": m},
            trains=True,
        )
    ]


def _make_loss(m: int, h: int, vd: int, rng: RandomInputs) -> PreparedCase:
    x = rng.normal(m, h).requires_grad_()
    weight = rng.normal(vd, h, scale=h**-0.5).requires_grad_()
    probs = rng.normal(m, vd, dtype=torch.float32).softmax(-1)
    index, weights = rng.permutation(m), torch.full((m,), 1 / m, device=rng.device)

    def op(backend: Backend) -> Any:
        loss, row_losses, best = linear_soft_cross_entropy(
            x, weight, Teacher(probs, index, weights), backend=backend
        )
        return (row_losses, best, *torch.autograd.grad(loss, (x, weight)))

    return PreparedCase(op, reads=(x, weight, probs, index, weights))
