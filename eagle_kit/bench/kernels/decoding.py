"""Cases of what stands between attentions while decoding.

Legend: B requests, N window nodes, T rows, S steps, K top-k, V / Vd vocabularies.
"""

from functools import partial
from typing import Any

import torch

from eagle_kit.bench.kernels import cost
from eagle_kit.bench.kernels.case import Case, PreparedCase, RandomInputs, Sizes
from eagle_kit.core.shape import SpecShape
from eagle_kit.kernels.accept import (
    accept_block,
    accept_most_likely,
    accept_rejection_chain,
    accept_rejection_tree,
    accept_relaxed,
    accept_target_only,
)
from eagle_kit.kernels.backend import Backend
from eagle_kit.kernels.commit import commit_path
from eagle_kit.kernels.draft_head import draft_topk
from eagle_kit.kernels.norm import add_rms_norm, rms_norm
from eagle_kit.kernels.rope import rope_store
from eagle_kit.kernels.sampling import SamplingBatch, sample, target_distribution
from eagle_kit.kernels.small_linear import quantize_fp8, small_linear, small_linear_fp8
from eagle_kit.kernels.swiglu import swiglu
from eagle_kit.kernels.tree_build import chain_build, grow_beam, start_beam, tree_build

TREE = SpecShape(5, 4, 8)
WIDE = SpecShape(7, 8, 32)
CHAIN = SpecShape(3, 1, 4)
EPS = 1e-5


def rope_cases(sizes: Sizes) -> list[Case]:
    """Norm of heads, rotation and the store of keys and values."""
    heads = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    return [
        Case(
            f"{t} rows" + (", qk-norm" if norms else ""),
            partial(cost.rope_store, t, *heads, norms=norms),
            partial(_make_rope, sizes, t, norms),
            {"rows": t},
        )
        for t, norms in [*((t, False) for t in sizes.tokens), (sizes.tokens[1], True)]
    ]


def _make_rope(sizes: Sizes, t: int, norms: bool, rng: RandomInputs) -> PreparedCase:
    hq, hkv, d = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    qkv, angle = rng.normal(t, hq + 2 * hkv, d), rng.normal(t, 1, d // 2, dtype=torch.float32)
    cos, sin = angle.cos(), angle.sin()
    table = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    k_rows, v_rows = (rng.normal(hkv, 2 * t, d) for _ in range(2))
    rows = rng.permutation(2 * t)[:t]
    weights = [rng.normal(d) for _ in range(2 * norms)]
    options: dict[str, Any] = {"num_heads": hq, "k_rows": k_rows, "v_rows": v_rows, "rows": rows}
    if norms:
        options |= {"q_norm": weights[0], "k_norm": weights[1], "eps": EPS}
    return PreparedCase(
        lambda backend: rope_store(qkv, table, returns_kv=False, backend=backend, **options),
        reads=(qkv, cos, sin, rows, *weights),
        writes=(k_rows[:, :t], v_rows[:, :t]),
    )


def norm_cases(sizes: Sizes) -> list[Case]:
    """RMSNorm behind the addition of a residual, and alone."""
    h = sizes.hidden_size
    return [
        Case(
            f"{'add, ' if adds else ''}{t} rows",
            partial(cost.rms_norm, t, h, adds=adds),
            partial(_make_norm, h, t, adds),
            {"rows": t},
        )
        for t, adds in [*((t, True) for t in sizes.tokens), (sizes.tokens[1], False)]
    ]


def _make_norm(h: int, t: int, adds: bool, rng: RandomInputs) -> PreparedCase:
    x, residual, weight = rng.normal(t, h), rng.normal(t, h), rng.normal(h)
    if adds:
        return PreparedCase(
            lambda backend: add_rms_norm(x, residual, weight, EPS, backend=backend),
            reads=(x, residual, weight),
        )
    return PreparedCase(lambda backend: rms_norm(x, weight, EPS, backend=backend), reads=(x, weight))


def swiglu_cases(sizes: Sizes) -> list[Case]:
    """silu(gate) * up."""

    def make(t: int, rng: RandomInputs) -> PreparedCase:
        x = rng.normal(t, 2 * sizes.intermediate_size)
        return PreparedCase(lambda backend: swiglu(x, backend=backend), reads=(x,))

    return [
        Case(f"{t} rows", partial(cost.swiglu, t, sizes.intermediate_size), partial(make, t), {"rows": t})
        for t in sizes.tokens
    ]


def draft_head_cases(sizes: Sizes) -> list[Case]:
    """The draft's output layer with its best K: trees rank probabilities, chains take the best token."""
    h, vd = sizes.hidden_size, sizes.draft_vocab_size

    def make(t: int, topk: int, rng: RandomInputs) -> PreparedCase:
        x, weight = rng.normal(t, h), rng.normal(vd, h, scale=h**-0.5)

        def op(backend: Backend) -> Any:
            return draft_topk(x, weight, topk, normalized=topk > 1, backend=backend)

        return PreparedCase(op, reads=(x, weight))

    return [
        Case(
            f"{t} rows, top {topk}",
            partial(cost.draft_head, t, h, vd, topk),
            partial(make, t, topk),
            {"rows": t},
        )
        for t, topk in [(b * k, k) for b in sizes.batches for k in (1, 4) if b * k <= 64]
    ]


def tree_cases(sizes: Sizes) -> list[Case]:
    """Growing a beam, and the window out of all candidates. Latency: the bytes are few."""
    ends = sizes.batches[0], sizes.batches[-1]
    windows = [
        Case(
            f"window {shape}, batch {b}",
            partial(_tree_cost, shape, b),
            partial(_make_tree, sizes, shape, b),
            {"batch": b},
        )
        for b in ends
        for shape in (CHAIN, TREE, WIDE)
    ]
    beams = [
        Case(
            f"beam of {WIDE.topk}, batch {b}",
            partial(_beam_cost, b),
            partial(_make_beam, sizes, b),
            {"batch": b},
        )
        for b in ends
    ]
    return windows + beams


def _tree_cost(shape: SpecShape, b: int, e: int) -> cost.Cost:
    """Ids and scores have one size whatever the model's elements have."""
    steps, k, nodes = shape
    if k == 1:
        return cost.Cost(b * (8 + 8 * steps + 32 * nodes))
    return cost.tree_build(b, k + (steps - 1) * k * k, nodes)


def _beam_cost(b: int, e: int) -> cost.Cost:
    return cost.grow_beam(b, WIDE.topk)


def _make_tree(sizes: Sizes, shape: SpecShape, b: int, rng: RandomInputs) -> PreparedCase:
    steps, k, _ = shape
    roots = rng.integers(sizes.vocab_size, b)
    if k == 1:
        drafted = rng.integers(sizes.vocab_size, b, steps)
        return PreparedCase(
            lambda backend: chain_build(roots, drafted, backend=backend), reads=(roots, drafted)
        )
    n = k + (steps - 1) * k * k
    tokens = rng.integers(sizes.vocab_size, b, n)
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


def _make_beam(sizes: Sizes, b: int, rng: RandomInputs) -> PreparedCase:
    k = WIDE.topk
    first = rng.integers(sizes.vocab_size, b, k), -rng.uniform(b, k, dtype=torch.float32)
    made: dict[str, Any] = {}
    tokens = rng.integers(sizes.vocab_size, b * k, k)
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


def accept_cases(sizes: Sizes) -> list[Case]:
    """Every verifier; greedy and target-only follow drafts that agree, the others meet refusals."""
    v = sizes.vocab_size
    made = [
        Case(
            f"greedy {shape}, batch {b}",
            partial(cost.accept_greedy, b, shape.tokens, shape.steps, v),
            partial(_make_greedy, v, shape, b),
            {"batch": b, "verifier": "greedy"},
        )
        for b in sizes.batches
        for shape in (TREE, WIDE)
        if b * shape.tokens <= 512
    ]
    for b in sizes.batches[:2]:
        for name in ("target_only", "rejection", "rejection_tree", "block", "relaxed"):
            kind = name.removesuffix("_tree")
            made.append(
                Case(
                    f"{name.replace('_', ' ')}, batch {b}",
                    partial(cost.accept_sampled, kind, b, TREE.steps, v),
                    partial(_make_sampled, v, name, b),
                    {"batch": b, "verifier": name},
                )
            )
    return made


def _make_greedy(v: int, shape: SpecShape, b: int, rng: RandomInputs) -> PreparedCase:
    logits, parents = rng.normal(b, shape.tokens, v), rng.parents(b, shape.tokens)
    tokens = logits.argmax(-1).gather(1, parents)  # all drafts agree with the target
    return PreparedCase(
        lambda backend: accept_most_likely(logits, tokens, parents, shape.steps, backend=backend),
        reads=(logits, tokens, parents),
    )


def _make_sampled(v: int, name: str, b: int, rng: RandomInputs) -> PreparedCase:
    steps = TREE.steps
    nodes = steps + 1 if name in ("rejection", "block", "target_only") else TREE.tokens
    logits = rng.normal(b, nodes, v)
    distributions: dict[Backend, Any] = {}
    chain = (torch.arange(nodes, device=rng.device) - 1).clamp(min=0).expand(b, nodes)
    parents = chain if nodes == steps + 1 else rng.parents(b, nodes)
    depths = chain + (torch.arange(nodes, device=rng.device) > 0)
    ones = torch.ones(b, device=rng.device)
    batch = SamplingBatch(ones, torch.zeros(b, dtype=torch.int64, device=rng.device))
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

    return PreparedCase(op)


def commit_cases(sizes: Sizes) -> list[Case]:
    """Three tokens of each request in all layers at once."""
    planes = sizes.num_layers, sizes.num_kv_heads, sizes.head_dim
    return [
        Case(f"3 tokens, batch {b}", partial(cost.commit, *planes, 3 * b), partial(_make_commit, sizes, b))
        for b in sizes.batches
    ]


def _make_commit(sizes: Sizes, b: int, rng: RandomInputs) -> PreparedCase:
    layers, heads, d = sizes.num_layers, sizes.num_kv_heads, sizes.head_dim
    page, stride, length = sizes.page_size, 8, 6
    k, v = (rng.normal(layers, heads, b * (page + stride), d) for _ in range(2))
    pages = rng.permutation(b)[:, None]
    nodes = torch.arange(length, device=rng.device).expand(b, length).contiguous()
    first = torch.full((b,), 4, device=rng.device)
    count = torch.full((b,), 3, device=rng.device)

    def op(backend: Backend) -> None:
        commit_path(k, v, pages, page, nodes, first, count, b * page, stride, backend=backend)

    moved = (k[:, :, : 3 * b], v[:, :, : 3 * b])
    return PreparedCase(op, reads=moved, writes=moved, returns=False)


def sampling_cases(sizes: Sizes) -> list[Case]:
    """The distribution after every node and a token sampled from it."""
    v, n = sizes.vocab_size, TREE.tokens
    return [
        Case(
            f"{'top-k, top-p, min-p' if filters else 'temperature'}, batch {b}",
            partial(cost.sampling, b * n, v),
            partial(_make_sampling, v, n, b, filters),
            {"batch": b},
        )
        for b in sizes.batches[:2]
        for filters in (False, True)
    ]


def _make_sampling(v: int, n: int, b: int, filters: bool, rng: RandomInputs) -> PreparedCase:
    logits, uniforms = rng.normal(b, n, v), rng.uniform(b, n)
    ones = torch.ones(b, device=rng.device)
    batch = SamplingBatch(ones, torch.zeros(b, dtype=torch.int64, device=rng.device))
    if filters:
        batch = batch._replace(top_k=ones.long() * 40, top_p=ones * 0.9, min_p=ones * 0.05)

    def op(backend: Backend) -> torch.Tensor:
        return sample(target_distribution(logits, batch, backend=backend), uniforms, backend=backend)

    return PreparedCase(op, reads=(logits,))


def linear_cases(sizes: Sizes) -> list[Case]:
    """Linear layers of few rows: what cuBLAS does with them, and whether the kernel is faster."""
    h, i, d = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim
    qkv = (sizes.num_heads + 2 * sizes.num_kv_heads) * d
    layers = {"qkv": (qkv, h), "out": (h, sizes.num_heads * d), "gate-up": (2 * i, h), "down": (h, i)}
    layers["head"] = (sizes.vocab_size, h)
    loads = [(name, m, False) for name in layers for m in (1, 8, 32)]
    loads += [(name, 8, True) for name in ("qkv", "gate-up", "down")]
    return [
        Case(
            f"{name}, {m} rows" + (", fp8" if fp8 else ""),
            partial(cost.small_linear, m, *layers[name], fp8=fp8),
            partial(_make_linear, *layers[name], m, fp8),
            {"rows": m, "outputs": layers[name][0], "inputs": layers[name][1], "fp8": fp8},
        )
        for name, m, fp8 in loads
    ]


def _make_linear(n: int, k: int, m: int, fp8: bool, rng: RandomInputs) -> PreparedCase:
    x, weight = rng.normal(m, k), rng.normal(n, k, scale=k**-0.5)
    if fp8:
        packed, scales = quantize_fp8(weight)
        return PreparedCase(
            lambda backend: small_linear_fp8(x, packed, scales, backend=backend), reads=(x, packed, scales)
        )
    return PreparedCase(lambda backend: small_linear(x, weight, backend=backend), reads=(x, weight))
