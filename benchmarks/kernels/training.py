"""Cases of training: attention of training-time test, of packed sequences, and the loss.

Legend: T packed tokens, J own keys of a row, M rows, Vd draft vocabulary.
"""

from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.kernels.inputs import Cases, KernelCase, PreparedCase, RandomInputs, Sizes, case
from eagle_kit.ops.attention.packed import packed_attention
from eagle_kit.ops.attention.ttt import plan_queries, ttt_attention
from eagle_kit.ops.backend import Backend
from eagle_kit.ops.soft_cross_entropy import Teacher, linear_soft_cross_entropy


def ttt_cases(sizes: Sizes) -> list[KernelCase]:
    """One document, every row supervised; J own keys at step J."""
    t, directions = sizes.train_tokens, {"forward": False, "forward and backward": True}
    return [
        case(f"{words}, {t} rows, {j} own keys", _make_ttt, sizes, j, backward, trains=backward)
        for words, backward in directions.items()
        for j in (0, 3, 6)
    ]


def _make_ttt(sizes: Sizes, j: int, backward: bool, rng: RandomInputs) -> PreparedCase:
    t, hq, hkv, d = sizes.train_tokens, sizes.model.num_heads, sizes.model.num_kv_heads, sizes.model.head_dim
    q, grad = rng.normal(t, hq, d), rng.normal(t, hq, d)
    k, v = (rng.normal(t, hkv, d) for _ in range(2))
    own_k, own_v = (rng.normal(t, hkv, j, d) for _ in range(2))
    inputs = tuple(x.requires_grad_(backward) for x in (q, k, v, own_k, own_v))
    rows = torch.arange(t, device=rng.device)
    plan = plan_queries(rows, torch.zeros_like(rows))

    def op(backend: Backend) -> Any:
        out = ttt_attention(q, k, v, own_k, own_v, plan, d**-0.5, backend=backend)
        return (out, *torch.autograd.grad(out, inputs, grad)) if backward else out

    forward = 4 * hq * d * (t * (t + 1) // 2 + t * j)
    if not backward:
        return PreparedCase(op, forward, inputs)
    # The backward reads the inputs again, the result, and the result's gradient, and has five products beside
    # the forward's two.
    return PreparedCase(op, forward * 7 // 2, (*inputs, *inputs, q, grad))


def packed_cases(sizes: Sizes) -> list[KernelCase]:
    """Causal attention of a packed sequence: one document, and four."""
    t = sizes.train_tokens
    loads = {"1 document": 1, "4 documents": 4}
    return [case(f"forward, {t} tokens, {words}", _make_packed, sizes, n) for words, n in loads.items()]


def _make_packed(sizes: Sizes, documents: int, rng: RandomInputs) -> PreparedCase:
    t, hq, hkv, d = sizes.train_tokens, sizes.model.num_heads, sizes.model.num_kv_heads, sizes.model.head_dim
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

    pairs = documents * size * (size + 1) // 2
    return PreparedCase(op, 4 * hq * d * pairs, (q, k, v), rivals={"sdpa": sdpa}, eager=("triton",))


def loss_cases(sizes: Sizes) -> list[KernelCase]:
    """Linear layer and soft cross-entropy with both gradients."""
    m = sizes.train_tokens
    size = sizes.model.hidden_size, sizes.draft_vocab_size
    return [case(f"forward and backward, {m} rows", _make_loss, m, *size, trains=True)]


def _make_loss(m: int, h: int, vd: int, rng: RandomInputs) -> PreparedCase:
    x = rng.normal(m, h).requires_grad_()
    weight = rng.normal(vd, h, scale=h**-0.5).requires_grad_()
    probs = rng.normal(m, vd, dtype=torch.float32).softmax(-1)
    index, weights = rng.permutation(m), torch.full((m,), 1 / m, device=rng.device)

    def op(backend: Backend) -> Any:
        loss, row_losses, best, *_ = linear_soft_cross_entropy(
            x, weight, Teacher(probs, index, weights), backend=backend
        )
        return (row_losses, best, *torch.autograd.grad(loss, (x, weight)))

    return PreparedCase(op, 6 * m * h * vd, (x, weight, probs, index, weights))


CASES: Cases = {
    "ttt_attention": ttt_cases,
    "packed_attention": packed_cases,
    "soft_cross_entropy": loss_cases,
}
