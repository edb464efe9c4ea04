"""Expansion of a draft tree and its window: one launch each, one program per request, no sort.

Order: candidate i comes before j if its score is higher, or equal and i < j. A beam needs its K best of K^2
in this order, so a program counts the candidates before each one (K^4 comparisons, 65,536 at most), which
gives its index.

The value of a candidate is capped at those of its ancestors, whose least key is found by pointer doubling:
after r rounds 2^r - 1 of them are included, so log2 S rounds suffice. So parents are selected with their
children, also where scores are NaN.

A window needs its N - 1 best of n in the order of drafting. Their worst score is found bit by bit, from
the top, in 32 counts over the program's candidates; candidates of equal score are kept up to the missing
number. A node's index is then the number of kept ones up to it, its parent's index is read at the parent's
candidate, and its ancestors are joined by pointer doubling again.

Bytes: 40 n per request at most, all in cache: launch and latency are the cost. After EAGLE-2 (arXiv
2406.16858).

Legend: B requests, S steps, K top-k, N nodes with the root, n candidates, W words of bits.
In kernels: ``b`` a request, ``i`` and ``j`` candidates.
"""

import torch
import triton
import triton.language as tl

from eagle_kit.core.shape import SpecShape
from eagle_kit.ops.custom_operator import custom_operator
from eagle_kit.ops.tree_build.reference import Beam, Candidates, Tree, num_candidates, num_words

_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def _ordered(score):
    """Key of a score: fp32 as int32 of the same order, above ``_LOWEST``; 0 equals -0, NaN equals -inf."""
    score = tl.where(score == score, score, float("-inf"))
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _HIGHEST)


@triton.jit(do_not_specialize=["n"])
def _start_beam(tokens, scores, all_tokens, all_scores, all_parents, ids, rows, ancestors, n,
                TOPK: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Record the candidates of depth 1 of one request, which are its first beam. Grid ``(B,)``."""
    b = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK).to(tl.int64)
    inside = k < TOPK
    beam_at = b * TOPK + k
    tl.store(all_tokens + b * n + k, tl.load(tokens + beam_at, inside), inside)
    tl.store(all_scores + b * n + k, tl.load(scores + beam_at, inside), inside)
    tl.store(all_parents + b * n + k, tl.full([BLOCK], -1, tl.int64), inside)
    tl.store(ids + beam_at, k, inside)
    tl.store(rows + beam_at, tl.zeros_like(k) + b, inside)
    tl.store(ancestors + beam_at * WORDS, tl.full([BLOCK], 1, tl.int64) << k, inside)  # K is below 64
    for w in tl.static_range(1, WORDS):
        tl.store(ancestors + beam_at * WORDS + w, tl.zeros_like(k), inside)


@triton.jit
def _child_scores(scores, next_scores, b, i, TOPK: tl.constexpr):
    """Log-probabilities of the paths to the children ``i`` of a beam, of ``TOPK * TOPK``."""
    inside = i < TOPK * TOPK
    parent = tl.load(scores + b * TOPK + i // TOPK, inside, 0.0)
    return parent + tl.load(next_scores + b * TOPK * TOPK + i, inside, 0.0)


@triton.jit(do_not_specialize=["step", "n"])
def _grow_beam(tokens, scores, ids, ancestors, next_tokens, next_scores, all_tokens, all_scores, all_parents,
               new_tokens, new_scores, new_ids, new_rows, new_ancestors, step, n, TOPK: tl.constexpr,
               WORDS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Record the children of a beam of one request, and keep the best as the next beam. Grid ``(B,)``."""
    # Record the children.
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < TOPK * TOPK
    token = tl.load(next_tokens + b * TOPK * TOPK + i, inside)
    score = _child_scores(scores, next_scores, b, i, TOPK)
    parent = b * TOPK + i // TOPK
    first = TOPK + (step - 1) * TOPK * TOPK
    record = b * n + first + i
    tl.store(all_tokens + record, token, inside)
    tl.store(all_scores + record, score, inside)
    tl.store(all_parents + record, tl.load(ids + parent, inside), inside)

    # Rank each child: the number of children before it.
    key = _ordered(score)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, BLOCK, CHUNK):
        j = start + tl.arange(0, CHUNK)
        other = tl.where(j < TOPK * TOPK, _ordered(_child_scores(scores, next_scores, b, j, TOPK)), _LOWEST)
        earlier = (other[None, :] == key[:, None]) & (j[None, :] < i[:, None])
        rank += tl.sum(((other[None, :] > key[:, None]) | earlier).to(tl.int32), 1)

    # The first K are the next beam, at their rank.
    in_beam = inside & (rank < TOPK)
    beam_at = b * TOPK + rank
    tl.store(new_tokens + beam_at, token, in_beam)
    tl.store(new_scores + beam_at, score, in_beam)
    tl.store(new_ids + beam_at, (first + i).to(tl.int64), in_beam)
    tl.store(new_rows + beam_at, parent, in_beam)

    # Ancestors: those of the parent, and the node itself. A node of the last depth may lie behind all words.
    own_key = (step * TOPK + rank).to(tl.int64)
    bit = tl.full([BLOCK], 1, tl.int64) << own_key % 64
    for w in tl.static_range(WORDS):
        word = tl.load(ancestors + parent * WORDS + w, inside, 0) | tl.where(own_key // 64 == w, bit, 0)
        tl.store(new_ancestors + beam_at * WORDS + w, word, in_beam)


@triton.jit(do_not_specialize=["n", "nodes"])
def _tree_build(roots, tokens, scores, parents, window_tokens, window_parents, window_depths,
                window_ancestors, n, nodes, TOPK: tl.constexpr, ROUNDS: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Select the best candidates of one request as its window. Grid ``(B,)``."""
    # Keys of the candidates, no better than those of their ancestors.
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < n
    key = tl.where(inside, _ordered(tl.load(scores + b * n + i, inside, 0.0)), _LOWEST)
    has_parent = i >= TOPK
    up = tl.where(has_parent & inside, tl.load(parents + b * n + i, has_parent & inside, 0).to(tl.int32), i)
    for _ in tl.static_range(ROUNDS):
        key = tl.minimum(key, tl.gather(key, up, 0))
        up = tl.gather(up, up, 0)

    # The worst key that is selected, bit by bit.
    count = nodes - 1
    worst = tl.where(tl.sum((key >= 0).to(tl.int32), 0) >= count, 0, _LOWEST)
    for round in range(31):
        trial = worst + (1 << (30 - round))
        worst = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= count, trial, worst)

    # Select all better ones, and the first of the equal ones. Their places are their nodes.
    better = (key > worst).to(tl.int32)
    equal = (key == worst).to(tl.int32)
    missing = count - tl.sum(better, 0)
    selected = better + equal * (tl.cumsum(equal, 0) <= missing).to(tl.int32)
    node = tl.cumsum(selected, 0)

    # Store depths and tokens.
    is_selected = selected > 0
    depth = tl.where(i < TOPK, 1, 2 + (i - TOPK) // (TOPK * TOPK))
    tl.store(window_depths + b * nodes + node, depth.to(tl.int64), is_selected)
    tl.store(window_tokens + b * nodes + node, tl.load(tokens + b * n + i, is_selected), is_selected)

    # Store parents: the node of the candidate's parent.
    is_child = has_parent & is_selected
    up = tl.where(is_child, tl.load(parents + b * n + i, is_child, 0).to(tl.int32), i)
    parent_node = tl.where(has_parent, tl.gather(node - selected, up, 0) + 1, 0)
    tl.store(window_parents + b * nodes + node, parent_node.to(tl.int64), is_selected)

    # Store ancestors: the bits of all above.
    bits = (tl.full([BLOCK], 1, tl.int64) << node.to(tl.int64)) | 1
    for _ in tl.static_range(ROUNDS):
        bits |= tl.gather(bits, up, 0)
        up = tl.gather(up, up, 0)
    tl.store(window_ancestors + b * nodes + node, bits, is_selected)
    zero = tl.zeros((), tl.int64)
    tl.store(window_tokens + b * nodes, tl.load(roots + b))
    tl.store(window_parents + b * nodes, zero)
    tl.store(window_depths + b * nodes, zero)
    tl.store(window_ancestors + b * nodes, zero + 1)


@triton.jit(do_not_specialize=["steps"])
def _chain_build(roots, tokens, window_tokens, window_parents, window_depths, window_ancestors, steps,
                 BLOCK: tl.constexpr):  # fmt: skip
    """The window of the chain of one request, of nodes ``j``. Grid ``(B,)``."""
    b = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK).to(tl.int64)
    inside = j <= steps
    window_at = b * (steps + 1) + j
    token = tl.load(tokens + b * steps + j - 1, inside & (j > 0), 0)
    tl.store(window_tokens + window_at, tl.where(j == 0, tl.load(roots + b), token), inside)
    tl.store(window_parents + window_at, tl.maximum(j - 1, 0), inside)
    tl.store(window_depths + window_at, j, inside)
    tl.store(window_ancestors + window_at, (tl.full([BLOCK], 2, tl.int64) << j) - 1, inside)


def _beam_options(topk: int) -> dict[str, int]:
    """Launch options: a child per thread, compared with 32 others at once; K of 17 to 64 works too, with
    fewer at once."""
    block = triton.next_power_of_2(topk**2)
    chunk = min(32, block) if block <= 256 else 4
    return {"BLOCK": block, "CHUNK": chunk, "num_warps": min(16, max(1, block // 32))}


def _num_warps(block: int) -> int:
    """Warps at four candidates per thread, so that a small tree needs no barrier between warps; 4,096 stay in
    registers at eight per thread but not at 16. Larger trees, with K from 46 on, spill some."""
    return min(16, max(1, block // 128))


Window = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Fields of a :class:`Tree`."""


def _empty_window(roots: torch.Tensor, nodes: int) -> Window:
    tokens, parents, depths, ancestors = (roots.new_empty(len(roots), nodes) for _ in range(4))
    return tokens, parents, depths, ancestors


def _empty_record_and_beam(
    tokens: torch.Tensor, scores: torch.Tensor, n: int, words: int
) -> list[torch.Tensor]:
    """Uninitialised fields of :class:`Candidates`; then ids, rows and ancestors of a :class:`Beam`."""
    b, topk = tokens.shape
    record = [tokens.new_empty(b, n), scores.new_empty(b, n), tokens.new_empty(b, n)]
    ancestors = tokens.new_empty(b, topk, words)
    return [*record, torch.empty_like(tokens), tokens.new_empty(b * topk), ancestors]


@custom_operator("eagle_kit::start_beam")
def _start(tokens: torch.Tensor, scores: torch.Tensor, n: int, words: int) -> list[torch.Tensor]:
    out = _empty_record_and_beam(tokens, scores, n, words)
    b, topk = tokens.shape
    if b:
        block = triton.next_power_of_2(topk)
        _start_beam[(b,)](tokens, scores, *out, n, TOPK=topk, WORDS=words, BLOCK=block, num_warps=1)
    return out


@_start.register_fake
def _(tokens, scores, n, words):
    return _empty_record_and_beam(tokens, scores, n, words)


def start_beam(tokens: torch.Tensor, scores: torch.Tensor, shape: SpecShape) -> tuple[Beam, Candidates]:
    """First beam from ``tokens`` int64, ``scores`` fp32 ``[B, K]``, both contiguous."""
    *record, ids, rows, ancestors = _start(tokens, scores, num_candidates(shape), num_words(shape))
    return Beam(tokens, scores, ids, rows, ancestors), Candidates(*record)


def _empty_beam(tokens: torch.Tensor, scores: torch.Tensor, ancestors: torch.Tensor) -> list[torch.Tensor]:
    """Uninitialised fields of a :class:`Beam`, each like that of the beam before."""
    b, topk = tokens.shape
    ids = torch.empty_like(tokens)
    rows = tokens.new_empty(b * topk)
    return [torch.empty_like(tokens), torch.empty_like(scores), ids, rows, torch.empty_like(ancestors)]


@custom_operator("eagle_kit::grow_beam", mutates_args=("all_tokens", "all_scores", "all_parents"))
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
    out = _empty_beam(tokens, scores, ancestors)
    b, topk = tokens.shape
    if b:
        _grow_beam[(b,)](
            tokens, scores, ids, ancestors, next_tokens, next_scores, all_tokens, all_scores, all_parents,
            *out, step, all_tokens.shape[1], TOPK=topk, WORDS=ancestors.shape[2], **_beam_options(topk),
        )  # fmt: skip
    return out


@_grow.register_fake
def _(tokens, scores, ids, ancestors, next_tokens, next_scores, all_tokens, all_scores, all_parents, step):
    return _empty_beam(tokens, scores, ancestors)


def grow_beam(
    beam: Beam, candidates: Candidates, next_tokens: torch.Tensor, next_scores: torch.Tensor, step: int
) -> Beam:
    """Next beam from ``next_tokens`` int64, ``next_scores`` fp32 ``[B * K, K]``, both contiguous."""
    next_beam = _grow(
        beam.tokens,
        beam.scores,
        beam.ids,
        beam.ancestors,
        next_tokens,
        next_scores,
        candidates.tokens,
        candidates.scores,
        candidates.parents,
        step,
    )
    return Beam(*next_beam)


@custom_operator("eagle_kit::tree_build")
def _tree(
    roots: torch.Tensor,
    tokens: torch.Tensor,
    scores: torch.Tensor,
    parents: torch.Tensor,
    steps: int,
    topk: int,
    nodes: int,
) -> Window:
    out = _empty_window(roots, nodes)
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
    return _empty_window(roots, nodes)


def tree_build(
    roots: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor, parents: torch.Tensor, shape: SpecShape
) -> Tree:
    """Window of the best candidates; ``roots [B]``, ``tokens``, ``scores`` fp32 and ``parents [B, n]``, all
    contiguous."""
    assert scores.dtype == torch.float32, "scores must be fp32"
    return Tree(*_tree(roots, tokens, scores, parents, *shape))


@custom_operator("eagle_kit::chain_build")
def _chain(roots: torch.Tensor, tokens: torch.Tensor) -> Window:
    b, steps = tokens.shape
    out = _empty_window(roots, steps + 1)
    if b:
        _chain_build[(b,)](
            roots, tokens, *out, steps, BLOCK=triton.next_power_of_2(steps + 1), num_warps=1
        )  # fmt: skip
    return out


@_chain.register_fake
def _(roots, tokens):
    return _empty_window(roots, tokens.shape[1] + 1)


def chain_build(roots: torch.Tensor, tokens: torch.Tensor) -> Tree:
    """Window of a chain: ``roots [B]``, ``tokens [B, S]``, both contiguous."""
    return Tree(*_chain(roots, tokens))
