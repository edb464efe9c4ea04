"""Cases of the kernels between attentions while decoding.

Legend: B requests, N window nodes, T rows, S steps, K top-k, V / Vd vocabularies.
"""

from typing import Any

import torch

from benchmarks.kernels.inputs import Cases, KernelCase, PreparedCase, RandomInputs, Sizes, case
from eagle_kit.core.shape import SpecShape
from eagle_kit.ops.accept import (
    accept_block,
    accept_most_likely,
    accept_rejection_chain,
    accept_rejection_tree,
    accept_relaxed,
    accept_target_only,
)
from eagle_kit.ops.attention.window import ancestor_bits
from eagle_kit.ops.backend import Backend
from eagle_kit.ops.best_first import best_first
from eagle_kit.ops.commit import commit_path
from eagle_kit.ops.draft_inputs import draft_inputs
from eagle_kit.ops.draft_topk import draft_topk
from eagle_kit.ops.experts import experts
from eagle_kit.ops.fp8 import quantize_fp8
from eagle_kit.ops.norm import add_rms_norm, rms_norm
from eagle_kit.ops.recurrence import (
    Inputs,
    Text,
    TextPlan,
    Written,
    commit_recurrent,
    recurrent_texts,
    recurrent_window,
)
from eagle_kit.ops.rope import Rotation, rope_store
from eagle_kit.ops.rows import gather_rows
from eagle_kit.ops.sampling import SamplingBatch, sample, target_distribution
from eagle_kit.ops.small_linear import small_linear
from eagle_kit.ops.swiglu import swiglu
from eagle_kit.ops.tree_build import chain_build, grow_beam, start_beam, tree_build

TREE = SpecShape(5, 4, 8)
WIDE = SpecShape(7, 8, 32)
CHAIN = SpecShape(3, 1, 4)
EPS = 1e-5
CHUNK = 4096
"""Logits of a row that decide a rng, once the sums of the row's chunks are known."""


def rope_cases(sizes: Sizes) -> list[KernelCase]:
    """Norm of heads, rotation and the store of keys and values."""
    loads = [*((t, False) for t in sizes.tokens), (sizes.tokens[1], True)]
    return [
        case(f"{t} rows" + (", qk-norm" if norms else ""), _make_rope, sizes, t, norms) for t, norms in loads
    ]


def _make_rope(sizes: Sizes, t: int, norms: bool, rng: RandomInputs) -> PreparedCase:
    hq, hkv, d = sizes.model.num_heads, sizes.model.num_kv_heads, sizes.model.head_dim
    qkv, inv_freq = rng.normal(t, hq + 2 * hkv, d), rng.normal(d // 2, dtype=torch.float32)
    rotation = Rotation(rng.permutation(max(t, 8192))[:t], inv_freq)
    k_rows, v_rows = (rng.normal(hkv, 2 * t, d) for _ in range(2))
    rows = rng.permutation(2 * t)[:t]
    weights = [rng.normal(d) for _ in range(2 * norms)]
    options: dict[str, Any] = {"num_heads": hq, "k_rows": k_rows, "v_rows": v_rows, "rows": rows}
    if norms:
        options |= {"q_norm": weights[0], "k_norm": weights[1], "eps": EPS}
    return PreparedCase(
        lambda backend: rope_store(qkv, rotation, returns_kv=False, backend=backend, **options),
        3 * t * (hq + 2 * hkv) * d,
        (qkv, rotation.positions, rows, *weights),
        (k_rows[:, :t], v_rows[:, :t]),
    )


def norm_cases(sizes: Sizes) -> list[KernelCase]:
    """RMSNorm behind the addition of a residual, and alone."""
    loads = [*((t, True) for t in sizes.tokens), (sizes.tokens[1], False)]
    return [
        case(f"{'add, ' if adds else ''}{t} rows", _make_norm, sizes.model.hidden_size, t, adds)
        for t, adds in loads
    ]


def _make_norm(h: int, t: int, adds: bool, rng: RandomInputs) -> PreparedCase:
    x, residual, weight = rng.normal(t, h), rng.normal(t, h), rng.normal(h)
    if adds:
        return PreparedCase(
            lambda backend: add_rms_norm(x, residual, weight, EPS, backend=backend),
            5 * t * h,
            (x, residual, weight),
        )
    return PreparedCase(lambda backend: rms_norm(x, weight, EPS, backend=backend), 4 * t * h, (x, weight))


def swiglu_cases(sizes: Sizes) -> list[KernelCase]:
    """silu(gate) * up."""
    return [case(f"{t} rows", _make_swiglu, sizes.model.intermediate_size, t) for t in sizes.tokens]


def _make_swiglu(size: int, t: int, rng: RandomInputs) -> PreparedCase:
    x = rng.normal(t, 2 * size)
    return PreparedCase(lambda backend: swiglu(x, backend=backend), 5 * t * size, (x,))


def rows_cases(sizes: Sizes) -> list[KernelCase]:
    """Rows of a page table and of the roots, as slots gather them: one batch size each."""
    return [case(f"batch {t}", _make_rows, t) for t in sizes.tokens]


def _make_rows(t: int, rng: RandomInputs) -> PreparedCase:
    tables, rows = [rng.permutation(512 * t).view(t, 512), rng.permutation(t)], rng.permutation(t)
    return PreparedCase(lambda backend: gather_rows(tables, rows, backend=backend), 0, (*tables, rows))


def draft_inputs_cases(sizes: Sizes) -> list[KernelCase]:
    """Embedding and feature of a draft step, normed and joined."""
    return [case(f"{t} rows", _make_draft_inputs, sizes.model.hidden_size, t) for t in sizes.tokens]


def _make_draft_inputs(h: int, t: int, rng: RandomInputs) -> PreparedCase:
    features, embedding = rng.normal(t, h), rng.normal(4 * t, h)
    norms, rows, tokens = (rng.normal(h), rng.normal(h)), rng.permutation(t), rng.permutation(4 * t)[:t]
    return PreparedCase(
        lambda backend: draft_inputs(features, rows, tokens, embedding, norms, EPS, backend=backend),
        8 * t * h,
        (features, embedding[:t], *norms, rows, tokens),
    )


def expert_cases(sizes: Sizes) -> list[KernelCase]:
    """Routed experts of one layer; the torch form is the grouped matmul."""
    return [case(f"{t} rows", _make_experts, sizes, t) for t in sizes.tokens]


def _make_experts(sizes: Sizes, t: int, rng: RandomInputs) -> PreparedCase:
    (count, chosen, size), h = sizes.experts, sizes.model.hidden_size
    x, weights = rng.normal(t, h), rng.uniform(t, chosen, dtype=torch.float32)
    gate_up = rng.normal(count, 2 * size, h, scale=h**-0.5)
    down = rng.normal(count, h, size, scale=size**-0.5)
    ids = rng.uniform(t, count).topk(chosen, -1).indices
    read = ids.unique()  # weights of the experts that are chosen
    return PreparedCase(
        lambda backend: experts(x, ids, weights, gate_up, down, backend=backend),
        6 * t * chosen * h * size,
        (x, ids, weights, gate_up[: len(read)], down[: len(read)]),
    )


def draft_topk_cases(sizes: Sizes) -> list[KernelCase]:
    """The draft's output layer with its best K: trees rank probabilities, chains take the best token."""
    loads = [(b * k, k) for b in sizes.batches for k in (1, 4) if b * k <= 64]
    return [case(f"{t} rows, top {topk}", _make_draft_topk, sizes, t, topk) for t, topk in loads]


def _make_draft_topk(sizes: Sizes, t: int, topk: int, rng: RandomInputs) -> PreparedCase:
    h, vd = sizes.model.hidden_size, sizes.draft_vocab_size
    x, weight = rng.normal(t, h), rng.normal(vd, h, scale=h**-0.5)

    def op(backend: Backend) -> Any:
        return draft_topk(x, weight, topk, normalized=topk > 1, backend=backend)

    return PreparedCase(op, 2 * t * vd * h, (x, weight))


def tree_cases(sizes: Sizes) -> list[KernelCase]:
    """Growing a beam, and the window out of all candidates. Latency: the bytes are few."""
    ends, v = (sizes.batches[0], sizes.batches[-1]), sizes.model.vocab_size
    return [
        *(
            case(f"window {shape}, batch {b}", _make_tree, v, shape, b)
            for b in ends
            for shape in (CHAIN, TREE, WIDE)
        ),
        *(case(f"beam of {WIDE.topk}, batch {b}", _make_beam, v, b) for b in ends),
    ]


def _make_tree(v: int, shape: SpecShape, b: int, rng: RandomInputs) -> PreparedCase:
    steps, k, _ = shape
    roots = rng.integers(v, b)
    if k == 1:
        drafted = rng.integers(v, b, steps)
        return PreparedCase(lambda backend: chain_build(roots, drafted, backend=backend), 0, (roots, drafted))
    n = k + (steps - 1) * k * k
    tokens = rng.integers(v, b, n)
    number = torch.arange(n, device=rng.device)
    # A candidate of depth d + 1 has a parent among the k^2 (at first k) of depth d, and a lower score.
    first = ((number - k) // (k * k) - 1).clamp(min=0) * k * k + k
    first = torch.where(number < k + k * k, 0, first)
    above = torch.where(number < k + k * k, k, k * k)
    parents = torch.where(number < k, -1, first + rng.below(above.expand(b, n)))
    depth = torch.where(number < k, 1, 2 + (number - k) // (k * k))
    scores = -(depth + rng.uniform(b, n, dtype=torch.float32))
    return PreparedCase(
        lambda backend: tree_build(roots, tokens, scores, parents, shape, backend=backend),
        reads=(roots, tokens, scores, parents),
    )


def best_first_cases(sizes: Sizes) -> list[KernelCase]:
    """The window of the most likely paths through candidates of depths, alone or given the one before."""
    v = sizes.model.vocab_size
    return [
        case(
            f"window {shape}, batch {b}{', conditional' if given else ''}",
            _make_best_first,
            v,
            shape,
            given,
            b,
        )
        for b in (sizes.batches[0], sizes.batches[-1])
        for shape, given in ((TREE, False), (WIDE, False), (WIDE, True))
    ]


def _make_best_first(v: int, shape: SpecShape, given: bool, b: int, rng: RandomInputs) -> PreparedCase:
    steps, k, _ = shape
    roots, tokens = rng.integers(v, b), rng.integers(v, b, steps, k)
    scores = -rng.uniform(b, steps, k if given else 1, k, dtype=torch.float32)
    return PreparedCase(
        lambda backend: best_first(roots, tokens, scores, shape, backend=backend),
        reads=(roots, tokens, scores),
    )


def _make_beam(v: int, b: int, rng: RandomInputs) -> PreparedCase:
    k = WIDE.topk
    first = rng.integers(v, b, k), -rng.uniform(b, k, dtype=torch.float32)
    made: dict[str, Any] = {}
    tokens = rng.integers(v, b * k, k)
    scores = -rng.uniform(b * k, k, dtype=torch.float32)

    def op(backend: Backend) -> Any:
        if backend not in made:
            made[backend] = start_beam(*first, WIDE, backend=backend)
        beam, record = made[backend]
        return grow_beam(beam, record, tokens, scores, 1, backend=backend)

    beam, record = start_beam(*first, WIDE, backend="reference")
    rows = slice(k, k + k * k)
    return PreparedCase(
        op,
        reads=(tokens, scores, beam.scores, beam.ids, beam.ancestors),
        writes=tuple(part[:, rows] for part in record),
    )


def accept_cases(sizes: Sizes) -> list[KernelCase]:
    """Every verifier; greedy and target-only follow drafts that agree, the others meet refusals."""
    v = sizes.model.vocab_size
    greedy = [
        case(f"greedy {shape}, batch {b}", _make_greedy, v, shape, b)
        for b in sizes.batches
        for shape in (TREE, WIDE)
        if b * shape.tokens <= 512
    ]
    return greedy + [
        case(f"{name.replace('_', ' ')}, batch {b}", _make_sampled, v, name, b)
        for b in sizes.batches[:2]
        for name in ("target_only", "rejection", "rejection_tree", "block", "relaxed")
    ]


def _make_greedy(v: int, shape: SpecShape, b: int, rng: RandomInputs) -> PreparedCase:
    logits, parents = rng.normal(b, shape.tokens, v), rng.parents(b, shape.tokens)
    tokens = logits.argmax(-1).gather(1, parents)  # all drafts agree with the target
    # All logits and the window in; the path, its tokens and their number out.
    moved = logits.nbytes + b * (16 * shape.tokens + 16 * (shape.steps + 1) + 8)
    return PreparedCase(
        lambda backend: accept_most_likely(logits, tokens, parents, shape.steps, backend=backend),
        b * shape.tokens * v,
        moved=moved,
    )


def _make_sampled(v: int, name: str, b: int, rng: RandomInputs) -> PreparedCase:
    steps = TREE.steps
    nodes = steps + 1 if name in ("rejection", "block", "target_only") else TREE.tokens
    logits = rng.normal(b, nodes, v)
    distributions: dict[Backend, Any] = {}
    chain = (torch.arange(nodes, device=rng.device) - 1).clamp(min=0).expand(b, nodes)
    parents = chain if nodes == steps + 1 else rng.parents(b, nodes)
    depths = chain + (torch.arange(nodes, device=rng.device) > 0)
    batch = _plain_batch(b, rng)
    uniforms, bonus = rng.uniform(b, nodes), rng.uniform(b)
    tokens = rng.integers(v, b, nodes)
    q = torch.empty(0)
    if name == "target_only":
        sampled = sample(
            target_distribution(logits, batch, backend="reference"), uniforms, backend="reference"
        )
        tokens = torch.cat((tokens[:, :1], sampled[:, :-1]), 1)
    elif name != "relaxed":
        q = torch.softmax(rng.normal(b, nodes - 1, v, dtype=torch.float32), -1)

    def op(backend: Backend) -> Any:
        if backend not in distributions:
            distributions[backend] = target_distribution(logits, batch, backend=backend)
        distribution = distributions[backend]
        match name:
            case "target_only":
                return accept_target_only(
                    distribution, tokens, parents, depths, uniforms, steps, backend=backend
                )
            case "rejection":
                return accept_rejection_chain(
                    distribution, q, tokens, uniforms[:, 1:], bonus, backend=backend
                )
            case "block":
                return accept_block(distribution, q, tokens, uniforms[:, 1:], bonus, backend=backend)
            case "rejection_tree":
                return accept_rejection_tree(
                    distribution, q, tokens, parents, uniforms, bonus, steps, backend=backend
                )
        at_depth = uniforms[:, : steps + 1]
        return accept_relaxed(
            distribution, tokens, parents, at_depth, bonus, steps, 0.5, 0.5, backend=backend
        )

    # Of the distributions, whose chunks' sums are known: target-only reads a chunk at every node of a full
    # path, rejection p and q (fp32) of one refusal a request, block those of every node, relaxed p once.
    e = logits.element_size()
    per_request = {
        "target_only": (steps + 1) * min(CHUNK, v) * e,
        "rejection": (e + 4) * v,
        "rejection_tree": (e + 4) * v,
        "block": (e + 4) * v * steps,
        "relaxed": e * v,
    }
    return PreparedCase(op, moved=b * per_request[name])


def _plain_batch(b: int, rng: RandomInputs) -> SamplingBatch:
    """Temperature 1 and no filter."""
    ones = torch.ones(b, device=rng.device)
    return SamplingBatch(ones, torch.zeros(b, dtype=torch.int64, device=rng.device))


def commit_cases(sizes: Sizes) -> list[KernelCase]:
    """Three tokens of each request in all layers at once."""
    return [case(f"3 tokens, batch {b}", _make_commit, sizes, b) for b in sizes.batches]


def _make_commit(sizes: Sizes, b: int, rng: RandomInputs) -> PreparedCase:
    layers, heads, d = sizes.model.num_layers, sizes.model.num_kv_heads, sizes.model.head_dim
    page, stride, length = sizes.page_size, 8, 6
    k, v = (rng.normal(layers, heads, b * (page + stride), d) for _ in range(2))
    pages = rng.permutation(b)[:, None]
    nodes = torch.arange(length, device=rng.device).expand(b, length).contiguous()
    first = torch.full((b,), 4, device=rng.device)
    count = torch.full((b,), 3, device=rng.device)

    def op(backend: Backend) -> None:
        commit_path(k, v, pages, page, nodes, first, count, b * page, stride, backend=backend)

    moved = (k[:, :, : 3 * b], v[:, :, : 3 * b])
    return PreparedCase(op, 0, moved, moved, returns=False)


def recurrence_cases(sizes: Sizes) -> list[KernelCase]:
    """Windows of a layer with the gated delta rule, the commit of three tokens, and a text."""
    loads = [(n, b) for n in (sizes.windows[0], 1, sizes.windows[1]) for b in sizes.batches]
    return [
        *(case(f"{n} nodes, batch {b}", _make_recurrent_window, sizes, n, b) for n, b in loads),
        *(case(f"commit of 3, batch {b}", _make_recurrent_commit, sizes, b) for b in sizes.batches),
        case(f"text of {sizes.train_tokens}", _make_recurrent_text, sizes),
    ]


def _recurrent_inputs(sizes: Sizes, rng: RandomInputs, *lead: int) -> Inputs:
    heads, key_heads, key, value = sizes.delta
    q, k = (rng.normal(*lead, key_heads, key, dtype=torch.float32, scale=key**-0.5) for _ in range(2))
    g, beta = (rng.uniform(*lead, heads, dtype=torch.float32) for _ in range(2))
    return Inputs(q, k, rng.normal(*lead, heads, value), -g, beta)


def _make_recurrent_window(sizes: Sizes, n: int, b: int, rng: RandomInputs) -> PreparedCase:
    heads, _, key, value = sizes.delta
    inputs = _recurrent_inputs(sizes, rng, b, n)
    states, slots = rng.normal(b, heads, key, value, dtype=torch.float32), rng.permutation(b)
    bits = ancestor_bits(rng.parents(b, n), n)

    def op(backend: Backend) -> Any:
        out, written = recurrent_window(inputs, states, slots, bits, delta=True, backend=backend)
        return out, written.u, written.decay

    flops = b * heads * n * (4 * key * value + 4 * n * key + 3 * n * value)
    return PreparedCase(op, flops, (*inputs, states, bits))


def _make_recurrent_commit(sizes: Sizes, b: int, rng: RandomInputs) -> PreparedCase:
    heads, _, key, value = sizes.delta
    inputs, n = _recurrent_inputs(sizes, rng, b, TREE.tokens), 3
    states, slots = rng.normal(b, heads, key, value, dtype=torch.float32), rng.permutation(b)
    decay = inputs.g.cumsum(1)
    written = Written(inputs.k, inputs.v.float(), decay)
    path = torch.arange(TREE.steps + 1, device=rng.device).expand(b, -1).contiguous()
    count = torch.full((b,), n, device=rng.device)

    def op(backend: Backend) -> None:
        commit_recurrent(states, slots, written, path, count, backend=backend)

    read = (written.k[:, :n], written.u[:, :n], decay[:, :n], states)
    return PreparedCase(op, 2 * b * heads * n * key * value, read, (states,), returns=False)


def _make_recurrent_text(sizes: Sizes, rng: RandomInputs) -> PreparedCase:
    heads, _, key, value = sizes.delta
    t, n = sizes.train_tokens, 32
    inputs = _recurrent_inputs(sizes, rng, t)
    states = rng.normal(2, heads, key, value, dtype=torch.float32)
    plan = TextPlan([Text(0, t, 0, ((t, 1),))])

    def op(backend: Backend) -> Any:
        return recurrent_texts(inputs, states, plan, delta=True, backend=backend)

    flops = t * heads * (6 * key * value + 4 * n * key + 3 * n * value)
    return PreparedCase(op, flops, (*inputs, states[0]), (states[1],))


def sampling_cases(sizes: Sizes) -> list[KernelCase]:
    """The sampling distribution after every node and a token sampled from it."""
    v, kinds = sizes.model.vocab_size, {"temperature": False, "top-k, top-p, min-p": True}
    return [
        case(f"{kind}, batch {b}", _make_sampling, v, b, filters)
        for b in sizes.batches[:2]
        for kind, filters in kinds.items()
    ]


def _make_sampling(v: int, b: int, filters: bool, rng: RandomInputs) -> PreparedCase:
    n, batch = TREE.tokens, _plain_batch(b, rng)
    logits, uniforms = rng.normal(b, n, v), rng.uniform(b, n)
    if filters:
        ones = torch.ones(b, device=rng.device)
        batch = batch._replace(top_k=ones.long() * 40, top_p=ones * 0.9, min_p=ones * 0.05)

    def op(backend: Backend) -> torch.Tensor:
        return sample(target_distribution(logits, batch, backend=backend), uniforms, backend=backend)

    return PreparedCase(op, 4 * b * n * v, (logits,))


def linear_cases(sizes: Sizes) -> list[KernelCase]:
    """Linear layers of few rows: cuBLAS, and whether the kernel is faster."""
    h, i, d = sizes.model.hidden_size, sizes.model.intermediate_size, sizes.model.head_dim
    qkv = (sizes.model.num_heads + 2 * sizes.model.num_kv_heads) * d
    layers = {"qkv": (qkv, h), "out": (h, sizes.model.num_heads * d), "gate-up": (2 * i, h), "down": (h, i)}
    layers["head"] = (sizes.model.vocab_size, h)
    loads = [(name, m, False) for name in layers for m in (1, 8, 32)]
    loads += [(name, 8, True) for name in ("qkv", "gate-up", "down")]
    return [
        case(f"{name}, {m} rows" + (", fp8" if fp8 else ""), _make_linear, *layers[name], m, fp8)
        for name, m, fp8 in loads
    ]


def _make_linear(n: int, k: int, m: int, fp8: bool, rng: RandomInputs) -> PreparedCase:
    x, weight = rng.normal(m, k), rng.normal(n, k, scale=k**-0.5)
    flops = 2 * m * n * k
    if fp8:
        held = quantize_fp8(weight)
        read = (x, held.values, held.scales)
        return PreparedCase(lambda backend: small_linear(x, held, backend=backend), flops, read)
    return PreparedCase(lambda backend: small_linear(x, weight, backend=backend), flops, (x, weight))


CASES: Cases = {
    "small_linear": linear_cases,
    "draft_topk": draft_topk_cases,
    "rope": rope_cases,
    "norm": norm_cases,
    "swiglu": swiglu_cases,
    "rows": rows_cases,
    "draft_inputs": draft_inputs_cases,
    "experts": expert_cases,
    "tree_build": tree_cases,
    "best_first": best_first_cases,
    "accept": accept_cases,
    "commit": commit_cases,
    "recurrence": recurrence_cases,
    "sampling": sampling_cases,
}
