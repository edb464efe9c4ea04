"""Verification in Triton without materialising probabilities: every program walks one request's window.

Greedy and target-only (deterministic drafts) follow the target's own token from node to node, so only nodes
on the path are read: the best of each chunk gives the greedy token, the sums of the chunks and one chunk of
logits give a sampled one. Bytes per node on the path: C values, and 4,096 logits where its token is sampled.

Rejection (arXiv 2211.17192, 2305.09781) reads a row only when a draft is rejected. After r rejections at a
node, of tokens x_1 .. x_r, the residuals of p and q follow a recursion for each token alone,

    u_r(y) = relu(u_{r-1}(y) / P_{r-1} - q_{r-1}(y) / Q_{r-1}),    q_r(y) = q_{r-1}(y) [y != x_r],

with the sums P and Q over the vocabulary. The program keeps these 3 r numbers instead of rows and recomputes
u_r where it is needed; one pass over p and q per rejection gives P_r, Q_r and the sums of the chunks that the
token is sampled from. Bytes: (e + 4) V per rejection, e those of a logit. A chain is a tree without branches.

Block verification (arXiv 2403.10444) needs the sums of relu(w_i p - q) at every node: one launch over all
chunks of all nodes, which are those of the residual row as well, then one walk. Bytes: (e + 4) V S.

Relaxed verification (LOSSY) excludes rejected tokens: one pass over p where any was rejected before the
bonus.

p comes as probabilities or as a ``FilteredLogits``, whose p is rounded to fp32 as by ``filtered_probs``, q as
probabilities. Tokens behind the accepted ones are all the bonus token, so the next root is ``tokens[:, -1]``.

q is read as by ``draft_probs``: a row counts as a distribution if the sums of its chunks, one launch and 4 V
bytes per row, add up to 1.

Legend: B requests, N window nodes, Q of them with a row of q, S steps, V vocabulary, C chunks of a row. In
kernels: ``b`` a request, ``m`` a row of p, ``c`` a chunk, ``y`` token ids of a chunk, ``x`` a draft token,
``k`` a place in a chain.
"""

import torch
import triton
import triton.language as tl

from eagle_kit.ops.accept.types import SUM_TOLERANCE
from eagle_kit.ops.custom_operator import custom_operator
from eagle_kit.ops.sampling.triton import (
    best_of_chunks,
    chunk_sums,
    draw,
    num_chunks,
    pick_chunk,
    pick_token,
    probability,
    row_argmax,
    row_probs,
    row_scale,
    row_sums,
    rows_of,
    sizes,
)

_TOLERANCE = tl.constexpr(SUM_TOLERANCE)
_LANE = tl.constexpr(128)
"""Tokens whose residual is summed within a warp, so that no barrier stands between the loads of a pass."""


@triton.jit
def _window(tokens, parents, b, nodes, NPAD: tl.constexpr):
    """Load the window of request ``b``: node indices, parents and draft tokens ``[NPAD]``, with -1 for the
    root and for padding."""
    index = tl.arange(0, NPAD)
    is_drafted = (index > 0) & (index < nodes)
    node_parents = tl.load(parents + b * nodes + index, is_drafted, -1)
    return index, node_parents, tl.load(tokens + b * nodes + index, is_drafted, -1)


@triton.jit(do_not_specialize=["nodes", "steps"])
def _follow(rows, stats, last, sums, values, ids, uniforms, tokens, parents, path, emitted, num_accepted,
            nodes, vocab, chunks, steps, GREEDY: tl.constexpr, DENSE: tl.constexpr, CHUNK: tl.constexpr,
            CPAD: tl.constexpr, NPAD: tl.constexpr):  # fmt: skip
    """Follow the target's own tokens through the window of one request. Grid ``(B,)``."""
    b = tl.program_id(0).to(tl.int64)
    index, node_parents, draft_tokens = _window(tokens, parents, b, nodes, NPAD)
    first = b * (steps + 1)  # of this request in path, emitted and uniforms
    node = tl.full((), 0, tl.int32)
    depth = tl.full((), 0, tl.int32)
    alive = b >= 0
    token = tl.full((), 0, tl.int64)
    for step in range(steps + 1):
        # The target's token after this node: its best one, or a sample.
        if alive:
            m = b * nodes + node
            if GREEDY:
                token = row_argmax(values, ids, m, chunks, CPAD).to(tl.int64)
            else:
                uniform = tl.load(uniforms + first + step)
                token = draw(rows, m, uniform, vocab, chunks, stats, last, sums, DENSE, CHUNK, CPAD).to(
                    tl.int64
                )
        tl.store(path + first + step, node.to(tl.int64))
        tl.store(emitted + first + step, token)

        # Move to the child that has this token. Without one, the bonus token is repeated up to the end.
        child = tl.min(tl.where((node_parents == node) & (draft_tokens == token), index, NPAD), 0)
        alive = alive & (child < NPAD) & (step < steps)
        node = tl.where(alive, child, node)
        depth += alive.to(tl.int32)
    tl.store(num_accepted + b, depth.to(tl.int64))


@triton.jit
def _left(p, q, y, rejected, scales, first, count, RELAXED: tl.constexpr):
    """Residuals of p and q at tokens ``y`` after ``count`` rejections, not normalised. The rejected tokens
    and their scales begin at ``first``."""
    for r in range(count):
        token = tl.load(rejected + first + r)
        if RELAXED:
            p = tl.where(y == token, 0.0, p)
        else:
            p_scaled = p * tl.load(scales + 2 * (first + r))
            q_scaled = q * tl.load(scales + 2 * (first + r) + 1)
            p = tl.maximum(p_scaled - q_scaled, 0.0)
            q = tl.where(y == token, 0.0, q)
    return p, q


@triton.jit
def _q_size(q_sums, q_row, inside, vocab, chunks, CPAD: tl.constexpr):
    """Number of tokens to read of a row of q: 0 if it is no distribution, or not ``inside``."""
    c = tl.arange(0, CPAD)
    total = tl.sum(tl.load(q_sums + tl.where(inside, q_row, 0) * chunks + c, c < chunks, 0.0), 0)
    return tl.where(inside & (tl.abs(total - 1) < _TOLERANCE), vocab, 0)


@triton.jit
def _residuals(rows, stats, last, q, y, m, q_row, q_size, vocab, scale, rejected, scales, first, count,
               RELAXED: tl.constexpr, DENSE: tl.constexpr):  # fmt: skip
    """Residuals, fp64, at tokens ``y`` after ``count`` rejections: of p after node ``m``, and of q for the
    children of the node, of which ``q_size`` tokens are read."""
    p = row_probs(rows, y, m, vocab, stats, last, scale, DENSE).to(tl.float64)
    if RELAXED:
        return _left(p, p, y, rejected, scales, first, count, True)
    q_y = probability(tl.load(q + q_row * vocab + y, y < q_size, 0.0)).to(tl.float64)
    return _left(p, q_y, y, rejected, scales, first, count, False)


@triton.jit
def _sum_left(rows, stats, last, q, m, q_row, q_size, vocab, chunks, scale, rejected, scales, first, count,
              parts, RELAXED: tl.constexpr, DENSE: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Sums over the vocabulary of the residuals of p and q. The sums of p over every ``_LANE`` tokens are
    written to ``parts [C, CHUNK / _LANE]``."""
    GROUPS: tl.constexpr = CHUNK // _LANE
    group = tl.arange(0, GROUPS)
    p_total = tl.zeros([GROUPS], tl.float64)
    q_total = tl.zeros([GROUPS], tl.float64)
    for c in range(chunks):
        y = c * CHUNK + group[:, None] * _LANE + tl.arange(0, _LANE)[None, :]
        p_left, q_left = _residuals(
            rows, stats, last, q, y, m, q_row, q_size, vocab, scale, rejected, scales, first, count, RELAXED,
            DENSE,
        )  # fmt: skip
        part = tl.sum(p_left, 1)
        tl.store(parts + c * GROUPS + group, part)
        p_total += part
        q_total += tl.sum(q_left, 1)
    return tl.sum(p_total, 0), tl.sum(q_total, 0)


@triton.jit(do_not_specialize=["nodes", "q_nodes", "uniform_stride", "steps"])
def _walk(rows, stats, last, sums, q, q_sums, tokens, parents, uniforms, bonus_uniforms, rejected, scales,
          parts, path, emitted, num_accepted, nodes, q_nodes, uniform_stride, vocab, chunks, steps,
          SINGLE: tl.constexpr, ACC: tl.constexpr, RELAXED: tl.constexpr, DENSE: tl.constexpr,
          CHUNK: tl.constexpr, CPAD: tl.constexpr, NPAD: tl.constexpr):  # fmt: skip
    """Try the children of accepted nodes in the order of the window of one request. Grid ``(B,)``.

    ``rejected [B, N]`` and ``scales [B, N, 2]`` hold the tokens rejected at the current node and the factors
    of the recursion, ``parts [B, C, CHUNK / _LANE]`` the sums of the last residual.
    """
    # The window, and an empty list of rejections at the root.
    b = tl.program_id(0).to(tl.int64)
    index, node_parents, draft_tokens = _window(tokens, parents, b, nodes, NPAD)
    first_node = b * nodes
    first_step = b * (steps + 1)
    GROUPS: tl.constexpr = CHUNK // _LANE
    parts += b * chunks * GROUPS
    one = tl.full((), 1.0, tl.float64)
    none = tl.full((), 0, tl.int32)
    node = none
    depth = none
    num_rejected = none
    tried_mass = one * 0.0
    p_total = one
    q_total = one
    tl.store(path + first_step, (b * 0).to(tl.int64))
    child = tl.min(tl.where((node_parents == 0) & (draft_tokens >= 0), index, NPAD), 0)
    while child < NPAD:
        # Probabilities of the child's token in what is left of p and q.
        x = tl.load(tokens + first_node + child)
        m = first_node + node
        q_row = b * q_nodes + node
        q_size = _q_size(q_sums, q_row, node < q_nodes, vocab, chunks, CPAD)
        scale = row_scale(sums, m, chunks, DENSE, CPAD)
        p_x, q_x = _residuals(
            rows, stats, last, q, x, m, q_row, q_size, vocab, scale, rejected, scales, first_node,
            num_rejected, RELAXED, DENSE,
        )  # fmt: skip
        p_x = p_x / p_total
        q_x = q_x / q_total

        # Accept or reject it. A token with q = 0 was not drafted, and is neither.
        if RELAXED:
            uniform = tl.load(uniforms + b * uniform_stride + depth)
            tried_mass += p_x
            is_accepted = ((uniform < tried_mass / ACC) | (p_x >= SINGLE)) & (p_x > 0)
            is_rejected = is_accepted == 0
        else:
            uniform = tl.load(uniforms + b * uniform_stride + child)
            is_accepted = (q_x > 0) & (uniform * q_x < p_x)
            is_rejected = (q_x > 0) & (uniform * q_x >= p_x)

        # A rejection: record the token, and sum the residuals that are left without it.
        if is_rejected:
            # Barriers stand between other warps' loads of earlier rejections, this store, and its loads.
            tl.debug_barrier()
            tl.store(rejected + first_node + num_rejected, x)
            if RELAXED:
                num_rejected += 1
                tl.debug_barrier()
            else:
                tl.store(scales + 2 * (first_node + num_rejected), 1.0 / p_total)
                num_rejected += 1
                p_sum = one * 0.0
                q_sum = one * 0.0
                for attempt in range(2):
                    # Distributions that differ by rounding alone may leave no residual: then p is sampled.
                    if p_sum <= 0:
                        tl.debug_barrier()
                        q_scale_at = scales + 2 * (first_node + num_rejected) - 1
                        tl.store(q_scale_at, tl.where(attempt == 0, 1.0 / q_total, 0.0))
                        tl.debug_barrier()
                        p_sum, q_sum = _sum_left(
                            rows, stats, last, q, m, q_row, q_size, vocab, chunks, scale, rejected, scales,
                            first_node, num_rejected, parts, RELAXED, DENSE, CHUNK,
                        )  # fmt: skip
                p_total = tl.where(p_sum > 0, p_sum, 1.0)
                q_total = tl.where(q_sum > 0, q_sum, 1.0)

        # An acceptance: move to the child, where nothing has been rejected yet.
        if is_accepted:
            tl.store(emitted + first_step + depth, x, depth < steps)
            node = child
            depth = depth + 1
            num_rejected = none
            tried_mass = one * 0.0
            p_total = one
            q_total = one
            tl.store(path + first_step + depth, child.to(tl.int64), depth <= steps)
        is_next = (node_parents == node) & (draft_tokens >= 0) & (index > child)
        child = tl.min(tl.where(is_next, index, NPAD), 0)

    # The bonus token, from what is left of p at the last node. Its chunk first.
    m = first_node + node
    q_row = b * q_nodes + node
    q_size = _q_size(q_sums, q_row, node < q_nodes, vocab, chunks, CPAD)
    scale = row_scale(sums, m, chunks, DENSE, CPAD)
    if RELAXED and num_rejected > 0:
        p_sum, _ = _sum_left(
            rows, stats, last, q, m, q_row, q_size, vocab, chunks, scale, rejected, scales, first_node,
            num_rejected, parts, RELAXED, DENSE, CHUNK,
        )  # fmt: skip
        num_rejected = tl.where(p_sum > 0, num_rejected, 0)
    c = tl.arange(0, CPAD)
    group = tl.arange(0, GROUPS)
    weight = row_sums(sums, m, chunks, CPAD) * scale
    if num_rejected > 0:
        tl.debug_barrier()
        group_sums = tl.load(parts + c[:, None] * GROUPS + group[None, :], (c < chunks)[:, None], 0.0)
        weight = tl.sum(group_sums, 1)
    chunk, before, aim = pick_chunk(weight, tl.load(bonus_uniforms + b), CPAD)

    # Then the token within the chunk.
    y = chunk * CHUNK + tl.arange(0, CHUNK)
    p_left, _ = _residuals(
        rows, stats, last, q, y, m, q_row, q_size, vocab, scale, rejected, scales, first_node, num_rejected,
        RELAXED, DENSE,
    )  # fmt: skip
    token = pick_token(p_left, y, before, aim, vocab)

    # Store it, repeated up to the end as the last node is.
    for step in range(steps + 1):
        if step >= depth:
            tl.store(path + first_step + step, node.to(tl.int64))
            tl.store(emitted + first_step + step, token.to(tl.int64))
    tl.store(num_accepted + b, depth.to(tl.int64))


@triton.jit
def _prefix_weights(rows, stats, last, sums, q, q_sums, tokens, b, steps, vocab, chunks, DENSE: tl.constexpr,
                    CPAD: tl.constexpr, SPAD: tl.constexpr):  # fmt: skip
    """Prefix weights w_0 .. w_S of the chain of request ``b``, fp64 ``[SPAD]``."""
    k = tl.arange(0, SPAD)
    c = tl.arange(0, CPAD)
    is_draft = k < steps
    m = b * (steps + 1) + tl.where(is_draft, k, 0)
    x = tl.load(tokens + m + 1)

    # p of each draft token.
    scale = tl.full([SPAD], 1.0, tl.float64)
    if not DENSE:
        scale = 1.0 / tl.sum(tl.load(sums + m[:, None] * chunks + c[None, :], (c < chunks)[None, :], 0.0), 1)
    p_x = row_probs(rows, x, m, vocab, stats, last, scale, DENSE).to(tl.float64)

    # q of each draft token; 0 where its row is no distribution.
    q_row = b * steps + k
    q_parts = q_sums + q_row[:, None] * chunks + c[None, :]
    q_total = tl.sum(tl.load(q_parts, is_draft[:, None] & (c < chunks)[None, :], 0.0), 1)
    is_read = is_draft & (tl.abs(q_total - 1) < _TOLERANCE)
    q_x = probability(tl.load(q + q_row * vocab + x, is_read, 0.0)).to(tl.float64)

    # w_i = min(1, w_{i-1} p / q).
    ratio = tl.where(q_x > 0, p_x / q_x, 0.0)
    weight = tl.full((), 1.0, tl.float64)
    weights = tl.where(k == 0, weight, 0.0)
    for i in range(steps):
        weight = tl.minimum(weight * tl.sum(tl.where(k == i, ratio, 0.0), 0), 1.0)
        weights = tl.where(k == i + 1, weight, weights)
    return weights


@triton.jit(do_not_specialize=["steps"])
def _excess(rows, stats, last, sums, q, q_sums, tokens, excess, steps, vocab, chunks, DENSE: tl.constexpr,
            CHUNK: tl.constexpr, CPAD: tl.constexpr, SPAD: tl.constexpr):  # fmt: skip
    """Sum ``relu(w_i p - q)`` over one chunk, for one step i of one request, into ``excess [B, S, C]``. Grid
    ``(B * S, C)``."""
    # The prefix weight of this step.
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    b = r // steps
    i = r % steps
    weights = _prefix_weights(
        rows, stats, last, sums, q, q_sums, tokens, b, steps, vocab, chunks, DENSE, CPAD, SPAD
    )
    weight = tl.sum(tl.where(tl.arange(0, SPAD) == i, weights, 0.0), 0)

    # The chunk of p and q.
    m = b * (steps + 1) + i
    y = c * CHUNK + tl.arange(0, CHUNK)
    scale = row_scale(sums, m, chunks, DENSE, CPAD)
    p = row_probs(rows, y, m, vocab, stats, last, scale, DENSE).to(tl.float64)
    q_size = _q_size(q_sums, r, r >= 0, vocab, chunks, CPAD)
    q_y = probability(tl.load(q + r * vocab + y, y < q_size, 0.0)).to(tl.float64)
    tl.store(excess + r * chunks + c, tl.sum(tl.maximum(weight * p - q_y, 0.0), 0))


@triton.jit(do_not_specialize=["steps"])
def _block(rows, stats, last, sums, q, q_sums, tokens, uniforms, bonus_uniforms, excess, path, emitted,
           num_accepted, steps, vocab, chunks, DENSE: tl.constexpr, CHUNK: tl.constexpr, CPAD: tl.constexpr,
           SPAD: tl.constexpr):  # fmt: skip
    """Verify the chain of one request as a block, from the sums of :func:`_excess`. Grid ``(B,)``."""
    # The prefix weights w, and r_i: the excess of each step over the vocabulary.
    b = tl.program_id(0).to(tl.int64)
    weights = _prefix_weights(
        rows, stats, last, sums, q, q_sums, tokens, b, steps, vocab, chunks, DENSE, CPAD, SPAD
    )
    k = tl.arange(0, SPAD)
    c = tl.arange(0, CPAD)
    chunk_sums_at = excess + (b * steps + k)[:, None] * chunks + c[None, :]
    chunk_excess = tl.load(chunk_sums_at, (k < steps)[:, None] & (c < chunks)[None, :], 0.0)
    total = tl.sum(chunk_excess, 1)

    # h_i = r_i / (r_i + 1 - w_i), and h_S = w_S. The longest prefix whose uniform is below h is accepted.
    slack = total + 1 - weights
    threshold = tl.where(slack > 0, total / tl.where(slack > 0, slack, 1.0), 1.0)
    threshold = tl.where(k < steps, threshold, weights)
    is_draft = (k > 0) & (k <= steps)
    uniform = tl.load(uniforms + b * steps + k - 1, is_draft, 1.0)
    depth = tl.max(tl.where(is_draft & (uniform < threshold), k, 0), 0)

    # The bonus token's chunk: of the residual after the last accepted node, or of p after the whole chain.
    weight = tl.sum(tl.where(k == depth, weights, 0.0), 0)
    has_left = (depth < steps) & (tl.sum(tl.where(k == depth, total, 0.0), 0) > 0)
    m = b * (steps + 1) + depth
    scale = row_scale(sums, m, chunks, DENSE, CPAD)
    left = tl.sum(tl.where((k == depth)[:, None], chunk_excess, 0.0), 0)
    left = tl.where(has_left, left, row_sums(sums, m, chunks, CPAD) * scale)
    chunk, before, aim = pick_chunk(left, tl.load(bonus_uniforms + b), CPAD)

    # Then the token within the chunk.
    y = chunk * CHUNK + tl.arange(0, CHUNK)
    p = row_probs(rows, y, m, vocab, stats, last, scale, DENSE).to(tl.float64)
    q_row = b * steps + depth
    q_size = _q_size(q_sums, q_row, has_left, vocab, chunks, CPAD)
    q_y = probability(tl.load(q + q_row * vocab + y, y < q_size, 0.0)).to(tl.float64)
    p = tl.where(has_left, tl.maximum(weight * p - q_y, 0.0), p)
    token = pick_token(p, y, before, aim, vocab).to(tl.int64)

    # Store the path, the accepted tokens and the bonus token, which is repeated up to the end.
    first = b * (steps + 1)
    drafted = tl.load(tokens + first + k + 1, k < steps, 0)
    tl.store(path + first + k, tl.minimum(k, depth).to(tl.int64), k <= steps)
    tl.store(emitted + first + k, tl.where(k < depth, drafted, token), k <= steps)
    tl.store(num_accepted + b, depth.to(tl.int64))


@triton.jit(do_not_specialize=["nodes", "length"])
def _outcome_of(best, path, tokens, num_accepted, active, seq_lens, num_emitted, finite, roots, new_lens,
                nodes, length, BLOCK: tl.constexpr):  # fmt: skip
    """Outcome of the path of one request. Grid ``(B,)``.

    ``best [B, N]`` is the largest logit of every node, NaN where a row has one; ``length`` is S + 1.
    """
    # Whether the logits of every node on the path were finite.
    b = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < length
    value = tl.load(best + b * nodes + tl.load(path + b * length + k, inside, 0), inside, 0.0).to(tl.float32)
    is_good = (tl.abs(value) < float("inf")) | ~inside

    # What is emitted, and where the request stands then.
    count = tl.load(num_accepted + b)
    emitted = tl.where(tl.load(active + b) != 0, count + 1, 0)
    tl.store(num_emitted + b, emitted)
    tl.store(finite + b, tl.min(is_good.to(tl.int32), 0).to(tl.uint8))
    tl.store(roots + b, tl.load(tokens + b * length + count))
    tl.store(new_lens + b, tl.load(seq_lens + b) + emitted)


AcceptedTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""``path``, ``tokens`` and ``num_accepted`` of ``Accepted``."""


def _empty_accepted(tokens: torch.Tensor, steps: int) -> AcceptedTensors:
    """Uninitialised results for the windows ``tokens [B, N]``."""
    b = tokens.shape[0]
    path = torch.empty(b, steps + 1, dtype=torch.int64, device=tokens.device)
    return path, torch.empty_like(path), torch.empty(b, dtype=torch.int64, device=tokens.device)


def _walk_warps(chunk: int, is_relaxed: bool) -> int:
    """Warps of ``_walk``, whose program has a multiprocessor to itself: 8 keep 16 KB of loads in flight. The
    compiler allots so few registers for 16, and without q for 8, that it spills."""
    return max(1, min(4 if is_relaxed else 8, chunk // 256))


def _follow_warps(chunk: int) -> int:
    """Warps of ``_follow``; for 8, sm_120 has too few registers."""
    return max(1, min(16, chunk // 256))


def _padded(nodes: int) -> int:
    return triton.next_power_of_2(nodes)


@custom_operator("eagle_kit::accept_most_likely")
def accept_most_likely(
    logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, steps: int
) -> AcceptedTensors:
    """Greedy verification of ``logits [B, N, V]``, ``tokens``, ``parents [B, N]``, all contiguous: two
    launches."""
    out = _empty_accepted(tokens, steps)
    if tokens.numel():
        values, ids = best_of_chunks(logits)
        b, nodes = tokens.shape
        chunks = values.shape[1]
        unused = values  # arguments of a sampled walk: rows, stats, last, sums and uniforms
        _follow[(b,)](
            unused, unused, unused, unused, values, ids, unused, tokens, parents, *out, nodes, 1, chunks,
            steps, GREEDY=True, DENSE=True, CHUNK=1, CPAD=triton.next_power_of_2(chunks),
            NPAD=_padded(nodes), num_warps=1,
        )  # fmt: skip
    return out


@custom_operator("eagle_kit::accept_target_only")
def accept_target_only(
    parts: list[torch.Tensor],
    tokens: torch.Tensor,
    parents: torch.Tensor,
    uniforms: torch.Tensor,
    steps: int,
) -> AcceptedTensors:
    """Target-only verification of a distribution in the form of ``distribution_parts``; ``uniforms`` fp64
    ``[B, S + 1]``; all contiguous. One launch for filtered logits, two for probabilities."""
    out = _empty_accepted(tokens, steps)
    if tokens.numel():
        rows, dense = rows_of(parts)
        b, nodes = tokens.shape
        vocab = parts[0].shape[-1]
        options = sizes(vocab)
        options["num_warps"] = _follow_warps(options["CHUNK"])
        unused = parts[0]  # arguments of a greedy walk: values and ids
        _follow[(b,)](
            *rows, unused, unused, uniforms, tokens, parents, *out, nodes, vocab, num_chunks(vocab),
            steps, GREEDY=False, DENSE=dense, NPAD=_padded(nodes), **options,
        )  # fmt: skip
    return out


@custom_operator("eagle_kit::accept_stochastic")
def accept_stochastic(
    parts: list[torch.Tensor],
    q: torch.Tensor | None,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    uniforms: torch.Tensor,
    bonus_uniforms: torch.Tensor,
    steps: int,
    threshold_single: float,
    threshold_acc: float,
) -> AcceptedTensors:
    """Rejection with ``q [B, Q, V]`` and ``uniforms`` fp64 ``[B, N]``, or without q by thresholds with
    ``uniforms [B, S + 1]``; other arguments and launches as for ``accept_target_only``, one more with q."""
    out = _empty_accepted(tokens, steps)
    if tokens.numel():
        rows, dense = rows_of(parts)
        b, nodes = tokens.shape
        vocab = parts[0].shape[-1]
        options = sizes(vocab)
        options["num_warps"] = _walk_warps(options["CHUNK"], q is None)

        # Buffers for the rejected tokens of a node, their scales, and the sums of the last residual.
        rejected = torch.empty_like(tokens)
        scales = torch.empty(b, nodes, 2, dtype=torch.float64, device=tokens.device)
        groups = options["CHUNK"] // _LANE.value
        residuals = torch.empty(b, num_chunks(vocab), groups, dtype=torch.float64, device=tokens.device)

        # Without q the kernel reads neither of these; any tensors of the right types do.
        q_rows = parts[0] if q is None else q
        q_sums = rows[3] if q is None else chunk_sums(q)
        q_nodes = 0 if q is None else q.shape[1]
        _walk[(b,)](
            *rows, q_rows, q_sums, tokens, parents, uniforms, bonus_uniforms, rejected, scales, residuals,
            *out, nodes, q_nodes, uniforms.shape[1], vocab, num_chunks(vocab), steps,
            SINGLE=threshold_single, ACC=threshold_acc, RELAXED=q is None, DENSE=dense, NPAD=_padded(nodes),
            **options,
        )  # fmt: skip
    return out


@custom_operator("eagle_kit::accept_block")
def accept_block(
    parts: list[torch.Tensor],
    q: torch.Tensor,
    tokens: torch.Tensor,
    uniforms: torch.Tensor,
    bonus_uniforms: torch.Tensor,
) -> AcceptedTensors:
    """Block verification with ``q [B, S, V]``, ``tokens [B, S + 1]`` and ``uniforms`` fp64 ``[B, S]``; other
    arguments as for ``accept_target_only``. Three launches for filtered logits, four for probabilities."""
    b, steps, vocab = q.shape
    out = _empty_accepted(tokens, steps)
    if tokens.numel():
        rows, dense = rows_of(parts)
        chunks = num_chunks(vocab)
        excess = torch.empty(b, steps, chunks, dtype=torch.float64, device=q.device)
        options = {**sizes(vocab), "DENSE": dense, "SPAD": triton.next_power_of_2(steps + 1)}
        q_sums = chunk_sums(q)
        _excess[(b * steps, chunks)](*rows, q, q_sums, tokens, excess, steps, vocab, chunks, **options)
        _block[(b,)](
            *rows, q, q_sums, tokens, uniforms, bonus_uniforms, excess, *out, steps, vocab, chunks, **options
        )
    return out


def _empty_outcome(seq_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised ``num_emitted``, ``is_finite``, ``roots`` and ``seq_lens`` of an ``Outcome``."""
    num_emitted = torch.empty_like(seq_lens)
    finite = torch.empty_like(seq_lens, dtype=torch.bool)
    return num_emitted, finite, torch.empty_like(seq_lens), torch.empty_like(seq_lens)


@custom_operator("eagle_kit::accept_outcome")
def outcome(
    best: torch.Tensor,
    path: torch.Tensor,
    tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    active: torch.Tensor,
    seq_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fields of :class:`~eagle_kit.ops.accept.outcome.Outcome` from the largest logits ``best [B, N]``
    and a path, all contiguous."""
    out = _empty_outcome(seq_lens)
    num_emitted, finite, roots, new_lens = out
    b, length = path.shape
    if b:
        _outcome_of[(b,)](
            best, path, tokens, num_accepted, active.view(torch.uint8), seq_lens, num_emitted,
            finite.view(torch.uint8), roots, new_lens, best.shape[1], length,
            BLOCK=triton.next_power_of_2(length), num_warps=1,
        )  # fmt: skip
    return out


@outcome.register_fake
def _(best, path, tokens, num_accepted, active, seq_lens):
    return _empty_outcome(seq_lens)


@accept_most_likely.register_fake
def _(logits, tokens, parents, steps):
    return _empty_accepted(tokens, steps)


@accept_target_only.register_fake
def _(parts, tokens, parents, uniforms, steps):
    return _empty_accepted(tokens, steps)


@accept_stochastic.register_fake
def _(parts, q, tokens, parents, uniforms, bonus_uniforms, steps, single, acc):
    return _empty_accepted(tokens, steps)


@accept_block.register_fake
def _(parts, q, tokens, uniforms, bonus_uniforms):
    return _empty_accepted(tokens, q.shape[1])
