"""Expansion of a draft tree and its window: one launch each, one program per request, no sort.

Order: candidate i comes before j if its score is higher, or equal and i < j. A beam needs its K best of K^2
in this order, so a program counts the candidates before each one (K^4 comparisons, 65,536 at most), which
gives its index.

The value of a candidate is capped at those of its ancestors, whose least key is found by pointer doubling:
after r rounds 2^r - 1 of them are included, so log2 S rounds suffice. So parents are selected with their
children, also where scores are NaN.

A window needs its N - 1 best of n in the order of drafting. Their worst score is found bit by bit, from the
top, in 32 counts over the program's candidates; candidates of equal score are kept up to the missing number.
A node's index is then the number of kept ones up to it, its parent's index is read at the parent's candidate,
and its ancestors are joined by pointer doubling again.

Bytes: 40 n per request at most, all in cache: launch and latency are the cost. After EAGLE-2 (arXiv
2406.16858).

Legend: B requests, S steps, K top-k, N nodes with the root, n candidates.
"""

import torch
import triton
import triton.language as tl

from eagle_kit.core.shape import SpecShape
from eagle_kit.ops.tree_build.reference import Beam, Candidates, Tree, num_candidates

_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def _ordered(score):
    """Map fp32 to int32 of the same order, above ``_LOWEST``: zeros are equal, NaN equals -inf."""
    score = tl.where(score == score, score, float("-inf"))
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _HIGHEST)


@triton.jit(do_not_specialize=["n"])
def _start_beam(tokens, scores, all_tokens, all_scores, all_parents, ids, rows, ancestors, n,
                TOPK: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK).to(tl.int64)
    inside = k < TOPK
    at = b * TOPK + k
    tl.store(all_tokens + b * n + k, tl.load(tokens + at, inside), inside)
    tl.store(all_scores + b * n + k, tl.load(scores + at, inside), inside)
    tl.store(all_parents + b * n + k, tl.full([BLOCK], -1, tl.int64), inside)
    tl.store(ids + at, k, inside)
    tl.store(rows + at, tl.zeros_like(k) + b, inside)
    tl.store(ancestors + at, tl.full([BLOCK], 1, tl.int64) << k, inside)


@triton.jit
def _child_scores(scores, next_scores, b, i, TOPK: tl.constexpr):
    inside = i < TOPK * TOPK
    parent = tl.load(scores + b * TOPK + i // TOPK, inside, 0.0)
    return parent + tl.load(next_scores + b * TOPK * TOPK + i, inside, 0.0)


@triton.jit(do_not_specialize=["step", "n"])
def _grow_beam(tokens, scores, ids, ancestors, next_tokens, next_scores, all_tokens, all_scores, all_parents,
               new_tokens, new_scores, new_ids, new_rows, new_ancestors, step, n, TOPK: tl.constexpr,
               BLOCK: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < TOPK * TOPK

    # Values of the K^2 children, and their record.
    token = tl.load(next_tokens + b * TOPK * TOPK + i, inside)
    score = _child_scores(scores, next_scores, b, i, TOPK)
    parent = b * TOPK + i // TOPK
    first = TOPK + (step - 1) * TOPK * TOPK
    record = b * n + first + i
    tl.store(all_tokens + record, token, inside)
    tl.store(all_scores + record, score, inside)
    tl.store(all_parents + record, tl.load(ids + parent, inside), inside)

    # Rank of each child: how many come before it.
    key = _ordered(score)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, BLOCK, CHUNK):
        j = start + tl.arange(0, CHUNK)
        other = tl.where(j < TOPK * TOPK, _ordered(_child_scores(scores, next_scores, b, j, TOPK)), _LOWEST)
        earlier = (other[None, :] == key[:, None]) & (j[None, :] < i[:, None])
        rank += tl.sum(((other[None, :] > key[:, None]) | earlier).to(tl.int32), 1)

    # The K best are the next beam; its nodes attend to their parents' ancestors and to themselves.
    kept = inside & (rank < TOPK)
    at = b * TOPK + rank
    tl.store(new_tokens + at, token, kept)
    tl.store(new_scores + at, score, kept)
    tl.store(new_ids + at, (first + i).to(tl.int64), kept)
    tl.store(new_rows + at, parent, kept)
    own = (step * TOPK + rank).to(tl.int64)
    bit = tl.where(own < 64, tl.full([BLOCK], 1, tl.int64) << tl.minimum(own, 63), 0)
    tl.store(new_ancestors + at, tl.load(ancestors + parent, inside, 0) | bit, kept)


@triton.jit(do_not_specialize=["n", "nodes"])
def _tree_build(roots, tokens, scores, parents, window_tokens, window_parents, window_depths,
                window_ancestors, n, nodes, TOPK: tl.constexpr, ROUNDS: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < n

    # Cap every value at the smallest on its path.
    key = tl.where(inside, _ordered(tl.load(scores + b * n + i, inside, 0.0)), _LOWEST)
    deep = i >= TOPK
    up = tl.where(deep & inside, tl.load(parents + b * n + i, deep & inside, 0).to(tl.int32), i)
    for _ in tl.static_range(ROUNDS):
        key = tl.minimum(key, tl.gather(key, up, 0))
        up = tl.gather(up, up, 0)

    # The worst of the N - 1 best values, bit by bit; of the candidates equal to it, the first ones.
    count = nodes - 1
    worst = tl.where(tl.sum((key >= 0).to(tl.int32), 0) >= count, 0, _LOWEST)
    for round in range(31):
        trial = worst + (1 << (30 - round))
        worst = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= count, trial, worst)
    better = (key > worst).to(tl.int32)
    equal = (key == worst).to(tl.int32)
    missing = count - tl.sum(better, 0)
    kept = better + equal * (tl.cumsum(equal, 0) <= missing).to(tl.int32)
    node = tl.cumsum(kept, 0)

    # The window: token, depth, parent and ancestors of every node.
    is_kept = kept > 0
    depth = tl.where(i < TOPK, 1, 2 + (i - TOPK) // (TOPK * TOPK))
    tl.store(window_depths + b * nodes + node, depth.to(tl.int64), is_kept)
    tl.store(window_tokens + b * nodes + node, tl.load(tokens + b * n + i, is_kept), is_kept)
    up = tl.where(deep & is_kept, tl.load(parents + b * n + i, deep & is_kept, 0).to(tl.int32), i)
    above = tl.where(deep, tl.gather(node - kept, up, 0) + 1, 0)
    tl.store(window_parents + b * nodes + node, above.to(tl.int64), is_kept)
    bits = (tl.full([BLOCK], 1, tl.int64) << node.to(tl.int64)) | 1
    for _ in tl.static_range(ROUNDS):
        bits |= tl.gather(bits, up, 0)
        up = tl.gather(up, up, 0)
    tl.store(window_ancestors + b * nodes + node, bits, is_kept)

    # The root.
    zero = tl.zeros((), tl.int64)
    tl.store(window_tokens + b * nodes, tl.load(roots + b))
    tl.store(window_parents + b * nodes, zero)
    tl.store(window_depths + b * nodes, zero)
    tl.store(window_ancestors + b * nodes, zero + 1)


@triton.jit(do_not_specialize=["steps"])
def _chain_build(roots, tokens, window_tokens, window_parents, window_depths, window_ancestors, steps,
                 BLOCK: tl.constexpr):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK).to(tl.int64)
    inside = j <= steps
    at = b * (steps + 1) + j
    token = tl.load(tokens + b * steps + j - 1, inside & (j > 0), 0)
    tl.store(window_tokens + at, tl.where(j == 0, tl.load(roots + b), token), inside)
    tl.store(window_parents + at, tl.maximum(j - 1, 0), inside)
    tl.store(window_depths + at, j, inside)
    tl.store(window_ancestors + at, (tl.full([BLOCK], 2, tl.int64) << j) - 1, inside)


def _beam_options(topk: int) -> dict[str, int]:
    """Launch options: a child per thread, compared with 32 others at once; K of 17 to 64 works too, with
    fewer at once."""
    block = triton.next_power_of_2(topk**2)
    chunk = min(32, block) if block <= 256 else 4
    return {"BLOCK": block, "CHUNK": chunk, "num_warps": min(16, max(1, block // 32))}


def _num_warps(block: int) -> int:
    """Warps at four candidates per thread, so that a small tree needs no barrier between warps; the largest
    keeps its 4,096 in registers at eight per thread but not at 16."""
    return min(16, max(1, block // 128))


Record = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Window = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _window(roots: torch.Tensor, nodes: int) -> Window:
    tokens, parents, depths, ancestors = (roots.new_empty(len(roots), nodes) for _ in range(4))
    return tokens, parents, depths, ancestors


def _first(tokens: torch.Tensor, scores: torch.Tensor, n: int) -> list[torch.Tensor]:
    """Empty: a record of candidates; ids, rows and ancestors of a beam."""
    b, topk = tokens.shape
    record = [tokens.new_empty(b, n), scores.new_empty(b, n), tokens.new_empty(b, n)]
    return [*record, torch.empty_like(tokens), tokens.new_empty(b * topk), torch.empty_like(tokens)]


@torch.library.custom_op("eagle_kit::start_beam", mutates_args=())
def _start(tokens: torch.Tensor, scores: torch.Tensor, n: int) -> list[torch.Tensor]:
    out = _first(tokens, scores, n)
    b, topk = tokens.shape
    if b:
        _start_beam[(b,)](
            tokens, scores, *out, n, TOPK=topk, BLOCK=triton.next_power_of_2(topk), num_warps=1
        )  # fmt: skip
    return out


@_start.register_fake
def _(tokens, scores, n):
    return _first(tokens, scores, n)


def start_beam(tokens: torch.Tensor, scores: torch.Tensor, shape: SpecShape) -> tuple[Beam, Candidates]:
    """First beam from ``tokens`` int64, ``scores`` fp32 ``[B, K]``, both contiguous."""
    *record, ids, rows, ancestors = _start(tokens, scores, num_candidates(shape))
    return Beam(tokens, scores, ids, rows, ancestors), Candidates(*record)


def _next(tokens: torch.Tensor, scores: torch.Tensor) -> list[torch.Tensor]:
    """An empty beam, in the order of its fields."""
    b, topk = tokens.shape
    ids = torch.empty_like(tokens)
    rows = tokens.new_empty(b * topk)
    ancestors = torch.empty_like(tokens)
    return [torch.empty_like(tokens), torch.empty_like(scores), ids, rows, ancestors]


@torch.library.custom_op("eagle_kit::grow_beam", mutates_args=("all_tokens", "all_scores", "all_parents"))
def _grow(
    tokens: torch.Tensor,
    scores: torch.Tensor,
    ids: torch.Tensor,
    ancestors: torch.Tensor,
    next_tokens: torch.Tensor,
    next_scores: torch.Tensor,
    all_tokens: torch.Tensor,
    all_scores: torch.Tensor,
    all_parents: torch.Tensor,
    step: int,
) -> list[torch.Tensor]:
    out = _next(tokens, scores)
    b, topk = tokens.shape
    if b:
        _grow_beam[(b,)](
            tokens, scores, ids, ancestors, next_tokens, next_scores, all_tokens, all_scores, all_parents,
            *out, step, all_tokens.shape[1], TOPK=topk, **_beam_options(topk),
        )  # fmt: skip
    return out


@_grow.register_fake
def _(tokens, scores, ids, ancestors, next_tokens, next_scores, all_tokens, all_scores, all_parents, step):
    return _next(tokens, scores)


def grow_beam(
    beam: Beam, candidates: Candidates, next_tokens: torch.Tensor, next_scores: torch.Tensor, step: int
) -> Beam:
    """Next beam from ``next_tokens`` int64, ``next_scores`` fp32 ``[B * K, K]``, both contiguous."""
    nodes = (beam.tokens, beam.scores, beam.ids, beam.ancestors)
    return Beam(*_grow(*nodes, next_tokens, next_scores, *candidates, step))


@torch.library.custom_op("eagle_kit::tree_build", mutates_args=())
def _tree(
    roots: torch.Tensor,
    tokens: torch.Tensor,
    scores: torch.Tensor,
    parents: torch.Tensor,
    steps: int,
    topk: int,
    nodes: int,
) -> Window:
    out = _window(roots, nodes)
    b, n = tokens.shape
    block = triton.next_power_of_2(n)
    if b:
        _tree_build[(b,)](
            roots, tokens, scores, parents, *out, n, nodes, TOPK=topk, ROUNDS=(steps - 1).bit_length(),
            BLOCK=block, num_warps=_num_warps(block),
        )  # fmt: skip
    return out


@_tree.register_fake
def _(roots, tokens, scores, parents, steps, topk, nodes):
    return _window(roots, nodes)


def tree_build(
    roots: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor, parents: torch.Tensor, shape: SpecShape
) -> Tree:
    """Window of the best candidates; ``roots [B]``, ``tokens``, ``scores`` fp32 and ``parents [B, n]``, all
    contiguous."""
    assert scores.dtype == torch.float32, "scores must be fp32"
    return Tree(*_tree(roots, tokens, scores, parents, *shape))


@torch.library.custom_op("eagle_kit::chain_build", mutates_args=())
def _chain(roots: torch.Tensor, tokens: torch.Tensor) -> Window:
    b, steps = tokens.shape
    out = _window(roots, steps + 1)
    if b:
        _chain_build[(b,)](
            roots, tokens, *out, steps, BLOCK=triton.next_power_of_2(steps + 1), num_warps=1
        )  # fmt: skip
    return out


@_chain.register_fake
def _(roots, tokens):
    return _window(roots, tokens.shape[1] + 1)


def chain_build(roots: torch.Tensor, tokens: torch.Tensor) -> Tree:
    """Window of a chain: ``roots [B]``, ``tokens [B, S]``, both contiguous."""
    return Tree(*_chain(roots, tokens))
