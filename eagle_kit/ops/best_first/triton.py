"""Best-first search over candidates of depths: one launch, one program per request.

The frontier, N * K scores, stays in registers, and so do depth and ancestors of every node. Each of the N - 1
rounds takes the largest score (a reduction, the first among equals), reads its node's parent by a masked sum,
and puts the K children into the frontier. Rounds are serial: latency is the cost, N - 1 reductions over 1,024
scores at most, by four warps, and no depth waits for a forward.

Bytes: 4 S P K + 8 S K per request at most, in cache after the first round.

Legend: B requests, S depths, K candidates of a depth, P 1 or K, N nodes of the window with the root. In the
kernel: ``b`` a request, ``i`` entries of the frontier, child c of node n at n K + c, ``n`` nodes.
"""

import torch
import triton
import triton.language as tl

from eagle_kit.ops.custom_operator import custom_operator
from eagle_kit.ops.tree_build import Tree

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _log_probs(scores, offset, mask):
    """Load log-probabilities, NaN and -inf as the lowest number."""
    log_prob = tl.load(scores + offset, mask, 0.0)
    return tl.maximum(tl.where(log_prob == log_prob, log_prob, _LOWEST), _LOWEST)


@triton.jit(do_not_specialize=["steps", "nodes"])
def _best_first(roots, tokens, scores, window_tokens, window_parents, window_depths, window_ancestors, steps,
                nodes, TOPK: tl.constexpr, GIVEN: tl.constexpr, NODES: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Search the tree of one request. Grid ``(B,)``; GIVEN is P."""
    # The frontier has the root's children; the window has the root.
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    n = tl.arange(0, NODES)
    scores += b * steps * GIVEN * TOPK
    tokens += b * steps * TOPK
    first = b * nodes
    frontier = tl.where(i < TOPK, tl.minimum(_log_probs(scores, i, i < TOPK), 0.0), float("-inf"))
    depths = tl.zeros([NODES], tl.int32)
    ancestors = tl.full([NODES], 1, tl.int64)
    zero = tl.zeros((), tl.int64)
    tl.store(window_tokens + first, tl.load(roots + b))
    tl.store(window_parents + first, zero)
    tl.store(window_depths + first, zero)
    tl.store(window_ancestors + first, zero + 1)
    for node in range(1, nodes):
        # Take the best of the frontier, and read its parent's depth and ancestors.
        score, best = tl.max(frontier, 0, return_indices=True)
        parent = best // TOPK
        candidate = best % TOPK
        is_parent = n == parent
        parent_depth = tl.sum(tl.where(is_parent, depths, 0), 0)
        depth = parent_depth + 1
        bits = tl.sum(tl.where(is_parent, ancestors, 0), 0) | (zero + 1 << node)

        # Store it.
        tl.store(window_tokens + first + node, tl.load(tokens + parent_depth * TOPK + candidate))
        tl.store(window_parents + first + node, parent.to(tl.int64))
        tl.store(window_depths + first + node, depth.to(tl.int64))
        tl.store(window_ancestors + first + node, bits)
        depths = tl.where(n == node, depth, depths)
        ancestors = tl.where(n == node, bits, ancestors)

        # Add its children to the frontier, unless it is at the last depth. They are no better than it.
        child = i - node * TOPK
        is_child = (child >= 0) & (child < TOPK) & (depth + tl.zeros_like(i) < steps)
        given = candidate if GIVEN > 1 else 0
        log_prob = _log_probs(scores, (depth * GIVEN + given) * TOPK + child, is_child)
        child_score = tl.minimum(tl.maximum(score + log_prob, _LOWEST), score)
        frontier = tl.where(i == best, float("-inf"), frontier)
        frontier = tl.where(is_child, child_score, frontier)


def _block(nodes: int, topk: int) -> int:
    return triton.next_power_of_2(nodes * topk)


def _num_warps(block: int) -> int:
    """Warps at eight scores per thread."""
    return min(4, max(1, block // 256))


Window = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Fields of a :class:`~eagle_kit.ops.tree_build.Tree`."""


def _empty_window(roots: torch.Tensor, nodes: int) -> Window:
    tokens, parents, depths, ancestors = (roots.new_empty(len(roots), nodes) for _ in range(4))
    return tokens, parents, depths, ancestors


@custom_operator("eagle_kit::best_first")
def _search(roots: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor, nodes: int) -> Window:
    out = _empty_window(roots, nodes)
    b, steps, topk = tokens.shape
    block = _block(nodes, topk)
    if b:
        _best_first[(b,)](
            roots, tokens, scores, *out, steps, nodes, TOPK=topk, GIVEN=scores.shape[2],
            NODES=triton.next_power_of_2(nodes), BLOCK=block, num_warps=_num_warps(block),
        )  # fmt: skip
    return out


@_search.register_fake
def _(roots, tokens, scores, nodes):
    return _empty_window(roots, nodes)


def best_first(roots: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor, nodes: int) -> Tree:
    """Window of the ``nodes`` N best; ``roots [B]``, ``tokens [B, S, K]`` and ``scores`` fp32 ``[B, S, P,
    K]``, all contiguous."""
    assert scores.dtype == torch.float32, "scores must be fp32"
    return Tree(*_search(roots, tokens, scores, nodes))
