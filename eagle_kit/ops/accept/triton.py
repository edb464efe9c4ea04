"""Verification in Triton without materialising probabilities: every program walks one request's window.

Greedy and target-only (deterministic drafts) follow the target's own token from node to node, so only nodes
on the path are looked at: the best of each chunk gives the greedy token, the sums of the chunks and one chunk
of logits give a sampled one. Bytes per node on the path: C values, and 4,096 logits where its token is
sampled.

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

q is read as by ``draft_probs``: the sums of its chunks, one launch and 4 V bytes per row, tell which rows are
distributions.

Legend: B requests, N window nodes, Q of them with a row of q, S steps, V vocabulary, C chunks of a row.
"""

import torch
import triton
import triton.language as tl

from eagle_kit.ops.accept.types import SUM_TOLERANCE
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
    j = tl.arange(0, NPAD)
    is_drafted = (j > 0) & (j < nodes)
    up = tl.load(parents + b * nodes + j, is_drafted, -1)
    return j, up, tl.load(tokens + b * nodes + j, is_drafted, -1)


@triton.jit(do_not_specialize=["nodes", "steps"])
def _follow(rows, stats, last, sums, values, ids, uniforms, tokens, parents, path, emitted, num_accepted,
            nodes, vocab, chunks, steps, GREEDY: tl.constexpr, DENSE: tl.constexpr, CHUNK: tl.constexpr,
            CPAD: tl.constexpr, NPAD: tl.constexpr):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    j, up, drafted = _window(tokens, parents, b, nodes, NPAD)
    out = b * (steps + 1)
    node = tl.full((), 0, tl.int32)
    count = tl.full((), 0, tl.int32)
    alive = b >= 0
    token = tl.full((), 0, tl.int64)
    for step in range(steps + 1):
        if alive:
            m = b * nodes + node
            if GREEDY:
                token = row_argmax(values, ids, m, chunks, CPAD).to(tl.int64)
            else:
                uniform = tl.load(uniforms + out + step)
                token = draw(rows, m, uniform, vocab, chunks, stats, last, sums, DENSE, CHUNK, CPAD).to(
                    tl.int64
                )
        tl.store(path + out + step, node.to(tl.int64))
        tl.store(emitted + out + step, token)
        child = tl.min(tl.where((up == node) & (drafted == token), j, NPAD), 0)
        alive = alive & (child < NPAD) & (step < steps)
        node = tl.where(alive, child, node)
        count += alive.to(tl.int32)
    tl.store(num_accepted + b, count.to(tl.int64))


@triton.jit
def _left(p, q, y, refused, scales, at, number, RELAXED: tl.constexpr):
    """Residuals of p and q at tokens ``y`` after ``number`` rejections, not normalised."""
    for r in range(number):
        token = tl.load(refused + at + r)
        if RELAXED:
            p = tl.where(y == token, 0.0, p)
        else:
            p = tl.maximum(p * tl.load(scales + 2 * (at + r)) - q * tl.load(scales + 2 * (at + r) + 1), 0.0)
            q = tl.where(y == token, 0.0, q)
    return p, q


@triton.jit
def _q_size(q_sums, q_row, inside, vocab, chunks, CPAD: tl.constexpr):
    """Tokens to read of a row of q: none of one that is no distribution, or not ``inside``."""
    c = tl.arange(0, CPAD)
    total = tl.sum(tl.load(q_sums + tl.where(inside, q_row, 0) * chunks + c, c < chunks, 0.0), 0)
    return tl.where(inside & (tl.abs(total - 1) < _TOLERANCE), vocab, 0)


@triton.jit
def _residuals(rows, stats, last, q, y, m, q_row, q_size, vocab, scale, refused, scales, at, number,
          RELAXED: tl.constexpr, DENSE: tl.constexpr):  # fmt: skip
    """Residuals, fp64, of p after node ``m`` and of q for its children (a row of ``q_size`` tokens) at tokens
    ``y``, after ``number`` rejections."""
    p = row_probs(rows, y, m, vocab, stats, last, scale, DENSE).to(tl.float64)
    if RELAXED:
        return _left(p, p, y, refused, scales, at, number, True)
    below = probability(tl.load(q + q_row * vocab + y, y < q_size, 0.0)).to(tl.float64)
    return _left(p, below, y, refused, scales, at, number, False)


@triton.jit
def _sum_left(rows, stats, last, q, m, q_row, q_size, vocab, chunks, scale, refused, scales, at, number,
              parts, RELAXED: tl.constexpr, DENSE: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Sums of the residuals of p and q; those of p over every 128 tokens are written to ``parts``."""
    GROUPS: tl.constexpr = CHUNK // _LANE
    group = tl.arange(0, GROUPS)
    total = tl.zeros([GROUPS], tl.float64)
    rest = tl.zeros([GROUPS], tl.float64)
    for c in range(chunks):
        y = c * CHUNK + group[:, None] * _LANE + tl.arange(0, _LANE)[None, :]
        p, below = _residuals(
            rows, stats, last, q, y, m, q_row, q_size, vocab, scale, refused, scales, at, number, RELAXED,
            DENSE,
        )  # fmt: skip
        part = tl.sum(p, 1)
        tl.store(parts + c * GROUPS + group, part)
        total += part
        rest += tl.sum(below, 1)
    return tl.sum(total, 0), tl.sum(rest, 0)


@triton.jit(do_not_specialize=["nodes", "q_nodes", "uniform_stride", "steps"])
def _walk(rows, stats, last, sums, q, q_sums, tokens, parents, uniforms, bonus_uniforms, refused, scales,
          parts, path, emitted, num_accepted, nodes, q_nodes, uniform_stride, vocab, chunks, steps,
          SINGLE: tl.constexpr, ACC: tl.constexpr, RELAXED: tl.constexpr, DENSE: tl.constexpr,
          CHUNK: tl.constexpr, CPAD: tl.constexpr, NPAD: tl.constexpr):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    j, up, drafted = _window(tokens, parents, b, nodes, NPAD)
    at = b * nodes
    out = b * (steps + 1)
    GROUPS: tl.constexpr = CHUNK // _LANE
    parts += b * chunks * GROUPS
    one = tl.full((), 1.0, tl.float64)
    none = tl.full((), 0, tl.int32)
    node = none
    count = none
    number = none
    mass = one * 0.0
    p_total = one
    q_total = one
    tl.store(path + out, (b * 0).to(tl.int64))
    child = tl.min(tl.where((up == 0) & (drafted >= 0), j, NPAD), 0)
    while child < NPAD:
        x = tl.load(tokens + at + child)
        m = at + node
        q_row = b * q_nodes + node
        q_size = _q_size(q_sums, q_row, node < q_nodes, vocab, chunks, CPAD)
        scale = row_scale(sums, m, chunks, DENSE, CPAD)
        p_x, q_x = _residuals(
            rows, stats, last, q, x, m, q_row, q_size, vocab, scale, refused, scales, at, number, RELAXED,
            DENSE,
        )  # fmt: skip
        p_x = p_x / p_total
        q_x = q_x / q_total
        if RELAXED:
            uniform = tl.load(uniforms + b * uniform_stride + count)
            mass += p_x
            kept = ((uniform < mass / ACC) | (p_x >= SINGLE)) & (p_x > 0)
            refuses = kept == 0
        else:
            uniform = tl.load(uniforms + b * uniform_stride + child)
            kept = (q_x > 0) & (uniform * q_x < p_x)
            refuses = (q_x > 0) & (uniform * q_x >= p_x)
        if refuses:
            # Barriers stand between what other warps read of the last refusals, this one, and its readers.
            tl.debug_barrier()
            tl.store(refused + at + number, x)
            if RELAXED:
                number += 1
                tl.debug_barrier()
            else:
                tl.store(scales + 2 * (at + number), 1.0 / p_total)
                number += 1
                total = one * 0.0
                rest = one * 0.0
                for attempt in range(2):
                    # Distributions that differ by rounding alone may leave no residual: then p is sampled.
                    if total <= 0:
                        tl.debug_barrier()
                        tl.store(scales + 2 * (at + number) - 1, tl.where(attempt == 0, 1.0 / q_total, 0.0))
                        tl.debug_barrier()
                        total, rest = _sum_left(
                            rows, stats, last, q, m, q_row, q_size, vocab, chunks, scale, refused, scales, at,
                            number, parts, RELAXED, DENSE, CHUNK,
                        )  # fmt: skip
                p_total = tl.where(total > 0, total, 1.0)
                q_total = tl.where(rest > 0, rest, 1.0)
        if kept:
            tl.store(emitted + out + count, x, count < steps)
            node = child
            count = count + 1
            number = none
            mass = one * 0.0
            p_total = one
            q_total = one
            tl.store(path + out + count, child.to(tl.int64), count <= steps)
        child = tl.min(tl.where((up == node) & (drafted >= 0) & (j > child), j, NPAD), 0)
    m = at + node
    q_row = b * q_nodes + node
    q_size = _q_size(q_sums, q_row, node < q_nodes, vocab, chunks, CPAD)
    scale = row_scale(sums, m, chunks, DENSE, CPAD)
    if RELAXED and number > 0:
        total, _ = _sum_left(
            rows, stats, last, q, m, q_row, q_size, vocab, chunks, scale, refused, scales, at, number, parts,
            RELAXED, DENSE, CHUNK,
        )  # fmt: skip
        number = tl.where(total > 0, number, 0)
    c = tl.arange(0, CPAD)
    group = tl.arange(0, GROUPS)
    weight = row_sums(sums, m, chunks, CPAD) * scale
    if number > 0:
        tl.debug_barrier()
        fine = tl.load(parts + c[:, None] * GROUPS + group[None, :], (c < chunks)[:, None], 0.0)
        weight = tl.sum(fine, 1)
    chunk, before, aim = pick_chunk(weight, tl.load(bonus_uniforms + b), CPAD)
    y = chunk * CHUNK + tl.arange(0, CHUNK)
    p, _ = _residuals(
        rows, stats, last, q, y, m, q_row, q_size, vocab, scale, refused, scales, at, number, RELAXED, DENSE
    )
    token = pick_token(p, y, before, aim, vocab)
    for step in range(steps + 1):
        if step >= count:
            tl.store(path + out + step, node.to(tl.int64))
            tl.store(emitted + out + step, token.to(tl.int64))
    tl.store(num_accepted + b, count.to(tl.int64))


@triton.jit
def _prefix_weights(rows, stats, last, sums, q, q_sums, tokens, b, steps, vocab, chunks, DENSE: tl.constexpr,
                    CPAD: tl.constexpr, SPAD: tl.constexpr):  # fmt: skip
    """Prefix weights w_0 .. w_S of a chain."""
    k = tl.arange(0, SPAD)
    c = tl.arange(0, CPAD)
    is_draft = k < steps
    m = b * (steps + 1) + tl.where(is_draft, k, 0)
    x = tl.load(tokens + m + 1)
    scale = tl.full([SPAD], 1.0, tl.float64)
    if not DENSE:
        scale = 1.0 / tl.sum(tl.load(sums + m[:, None] * chunks + c[None, :], (c < chunks)[None, :], 0.0), 1)
    p_x = row_probs(rows, x, m, vocab, stats, last, scale, DENSE).to(tl.float64)
    q_row = b * steps + k
    of_q = q_sums + q_row[:, None] * chunks + c[None, :]
    q_total = tl.sum(tl.load(of_q, is_draft[:, None] & (c < chunks)[None, :], 0.0), 1)
    is_read = is_draft & (tl.abs(q_total - 1) < _TOLERANCE)
    q_x = probability(tl.load(q + q_row * vocab + x, is_read, 0.0)).to(tl.float64)
    ratio = tl.where(q_x > 0, p_x / q_x, 0.0)
    weight = tl.full((), 1.0, tl.float64)
    found = tl.where(k == 0, weight, 0.0)
    for i in range(steps):
        weight = tl.minimum(weight * tl.sum(tl.where(k == i, ratio, 0.0), 0), 1.0)
        found = tl.where(k == i + 1, weight, found)
    return found


@triton.jit(do_not_specialize=["steps"])
def _excess(rows, stats, last, sums, q, q_sums, tokens, excess, steps, vocab, chunks, DENSE: tl.constexpr,
            CHUNK: tl.constexpr, CPAD: tl.constexpr, SPAD: tl.constexpr):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    b = r // steps
    i = r % steps
    found = _prefix_weights(
        rows, stats, last, sums, q, q_sums, tokens, b, steps, vocab, chunks, DENSE, CPAD, SPAD
    )
    weight = tl.sum(tl.where(tl.arange(0, SPAD) == i, found, 0.0), 0)
    m = b * (steps + 1) + i
    y = c * CHUNK + tl.arange(0, CHUNK)
    scale = row_scale(sums, m, chunks, DENSE, CPAD)
    p = row_probs(rows, y, m, vocab, stats, last, scale, DENSE).to(tl.float64)
    q_size = _q_size(q_sums, r, r >= 0, vocab, chunks, CPAD)
    below = probability(tl.load(q + r * vocab + y, y < q_size, 0.0)).to(tl.float64)
    tl.store(excess + r * chunks + c, tl.sum(tl.maximum(weight * p - below, 0.0), 0))


@triton.jit(do_not_specialize=["steps"])
def _block(rows, stats, last, sums, q, q_sums, tokens, uniforms, bonus_uniforms, excess, path, emitted,
           num_accepted, steps, vocab, chunks, DENSE: tl.constexpr, CHUNK: tl.constexpr, CPAD: tl.constexpr,
           SPAD: tl.constexpr):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    found = _prefix_weights(
        rows, stats, last, sums, q, q_sums, tokens, b, steps, vocab, chunks, DENSE, CPAD, SPAD
    )
    k = tl.arange(0, SPAD)
    c = tl.arange(0, CPAD)
    places = excess + (b * steps + k)[:, None] * chunks + c[None, :]
    parts = tl.load(places, (k < steps)[:, None] & (c < chunks)[None, :], 0.0)
    total = tl.sum(parts, 1)
    slack = total + 1 - found
    share = tl.where(slack > 0, total / tl.where(slack > 0, slack, 1.0), 1.0)
    share = tl.where(k < steps, share, found)
    is_draft = (k > 0) & (k <= steps)
    uniform = tl.load(uniforms + b * steps + k - 1, is_draft, 1.0)
    count = tl.max(tl.where(is_draft & (uniform < share), k, 0), 0)
    weight = tl.sum(tl.where(k == count, found, 0.0), 0)
    has_left = (count < steps) & (tl.sum(tl.where(k == count, total, 0.0), 0) > 0)
    m = b * (steps + 1) + count
    scale = row_scale(sums, m, chunks, DENSE, CPAD)
    left = tl.sum(tl.where((k == count)[:, None], parts, 0.0), 0)
    left = tl.where(has_left, left, row_sums(sums, m, chunks, CPAD) * scale)
    chunk, before, aim = pick_chunk(left, tl.load(bonus_uniforms + b), CPAD)
    y = chunk * CHUNK + tl.arange(0, CHUNK)
    p = row_probs(rows, y, m, vocab, stats, last, scale, DENSE).to(tl.float64)
    q_row = b * steps + count
    q_size = _q_size(q_sums, q_row, has_left, vocab, chunks, CPAD)
    below = probability(tl.load(q + q_row * vocab + y, y < q_size, 0.0)).to(tl.float64)
    p = tl.where(has_left, tl.maximum(weight * p - below, 0.0), p)
    token = pick_token(p, y, before, aim, vocab).to(tl.int64)
    out = b * (steps + 1)
    drafted = tl.load(tokens + out + k + 1, k < steps, 0)
    tl.store(path + out + k, tl.minimum(k, count).to(tl.int64), k <= steps)
    tl.store(emitted + out + k, tl.where(k < count, drafted, token), k <= steps)
    tl.store(num_accepted + b, count.to(tl.int64))


@triton.jit(do_not_specialize=["nodes", "length"])
def _outcome_of(best, path, tokens, num_accepted, active, seq_lens, num_emitted, finite, roots, new_lens,
                nodes, length, BLOCK: tl.constexpr):  # fmt: skip
    """``best [B, N]``: the largest logit of every node, NaN where a row has one; ``length``: S + 1."""
    b = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < length
    value = tl.load(best + b * nodes + tl.load(path + b * length + k, inside, 0), inside, 0.0).to(tl.float32)
    is_good = (tl.abs(value) < float("inf")) | ~inside
    count = tl.load(num_accepted + b)
    emitted = tl.where(tl.load(active + b) != 0, count + 1, 0)
    tl.store(num_emitted + b, emitted)
    tl.store(finite + b, tl.min(is_good.to(tl.int32), 0).to(tl.uint8))
    tl.store(roots + b, tl.load(tokens + b * length + count))
    tl.store(new_lens + b, tl.load(seq_lens + b) + emitted)


Outcome = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""``path``, ``tokens`` and ``num_accepted`` of ``Accepted``."""


def _outcome(tokens: torch.Tensor, steps: int) -> Outcome:
    b = tokens.shape[0]
    device = tokens.device
    path, emitted = (torch.empty(b, steps + 1, dtype=torch.int64, device=device) for _ in range(2))
    return path, emitted, torch.empty(b, dtype=torch.int64, device=device)


def _walk_warps(chunk: int, is_relaxed: bool) -> int:
    """Warps of ``_walk``, whose program has a multiprocessor to itself: 8 keep 16 KB of loads in flight. The
    compiler allots so few registers for 16, and without q for 8, that it spills."""
    return max(1, min(4 if is_relaxed else 8, chunk // 256))


def _follow_warps(chunk: int) -> int:
    """Warps of ``_follow``; for 8, sm_120 has too few registers."""
    return max(1, min(16, chunk // 256))


def _padded(nodes: int) -> int:
    return triton.next_power_of_2(nodes)


@torch.library.custom_op("eagle_kit::accept_most_likely", mutates_args=())
def accept_most_likely(
    logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, steps: int
) -> Outcome:
    """Greedy verification of ``logits [B, N, V]``, ``tokens``, ``parents [B, N]``, all contiguous: two
    launches."""
    out = _outcome(tokens, steps)
    if tokens.numel():
        values, ids = best_of_chunks(logits)
        b, nodes = tokens.shape
        chunks = values.shape[1]
        _follow[(b,)](
            *[values] * 4, values, ids, values, tokens, parents, *out, nodes, 1, chunks, steps, GREEDY=True,
            DENSE=True, CHUNK=1, CPAD=triton.next_power_of_2(chunks), NPAD=_padded(nodes), num_warps=1,
        )  # fmt: skip
    return out


@torch.library.custom_op("eagle_kit::accept_target_only", mutates_args=())
def accept_target_only(
    parts: list[torch.Tensor],
    tokens: torch.Tensor,
    parents: torch.Tensor,
    uniforms: torch.Tensor,
    steps: int,
) -> Outcome:
    """Target-only verification of a distribution in the form of ``distribution_parts``; ``uniforms`` fp64
    ``[B, S + 1]``; all contiguous. One launch for filtered logits, two for probabilities."""
    out = _outcome(tokens, steps)
    if tokens.numel():
        rows, dense = rows_of(parts)
        b, nodes = tokens.shape
        vocab = parts[0].shape[-1]
        options = sizes(vocab)
        options["num_warps"] = _follow_warps(options["CHUNK"])
        _follow[(b,)](
            *rows, parts[0], parts[0], uniforms, tokens, parents, *out, nodes, vocab, num_chunks(vocab),
            steps, GREEDY=False, DENSE=dense, NPAD=_padded(nodes), **options,
        )  # fmt: skip
    return out


@torch.library.custom_op("eagle_kit::accept_stochastic", mutates_args=())
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
) -> Outcome:
    """Rejection with ``q [B, Q, V]`` and ``uniforms`` fp64 ``[B, N]``, or without q by thresholds with
    ``uniforms [B, S + 1]``; other arguments and launches as for ``accept_target_only``, one more with q."""
    out = _outcome(tokens, steps)
    if tokens.numel():
        rows, dense = rows_of(parts)
        b, nodes = tokens.shape
        vocab = parts[0].shape[-1]
        options = sizes(vocab)
        options["num_warps"] = _walk_warps(options["CHUNK"], q is None)
        refused = torch.empty_like(tokens)
        scales = torch.empty(b, nodes, 2, dtype=torch.float64, device=tokens.device)
        groups = options["CHUNK"] // _LANE.value
        residuals = torch.empty(b, num_chunks(vocab), groups, dtype=torch.float64, device=tokens.device)
        _walk[(b,)](
            *rows, *((parts[0], rows[3]) if q is None else (q, chunk_sums(q))), tokens, parents, uniforms,
            bonus_uniforms, refused, scales, residuals, *out, nodes, 0 if q is None else q.shape[1],
            uniforms.shape[1], vocab, num_chunks(vocab), steps,
            SINGLE=threshold_single, ACC=threshold_acc, RELAXED=q is None, DENSE=dense, NPAD=_padded(nodes),
            **options,
        )  # fmt: skip
    return out


@torch.library.custom_op("eagle_kit::accept_block", mutates_args=())
def accept_block(
    parts: list[torch.Tensor],
    q: torch.Tensor,
    tokens: torch.Tensor,
    uniforms: torch.Tensor,
    bonus_uniforms: torch.Tensor,
) -> Outcome:
    """Block verification with ``q [B, S, V]``, ``tokens [B, S + 1]`` and ``uniforms`` fp64 ``[B, S]``; other
    arguments as for ``accept_target_only``. Three launches for filtered logits, four for probabilities."""
    b, steps, vocab = q.shape
    out = _outcome(tokens, steps)
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


def _after(seq_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    numbers = [torch.empty_like(seq_lens) for _ in range(3)]
    return numbers[0], torch.empty_like(seq_lens, dtype=torch.bool), numbers[1], numbers[2]


@torch.library.custom_op("eagle_kit::accept_outcome", mutates_args=())
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
    num_emitted, finite, roots, new_lens = out = _after(seq_lens)
    if b := len(path):
        length = path.shape[1]
        _outcome_of[(b,)](
            best, path, tokens, num_accepted, active.view(torch.uint8), seq_lens, num_emitted,
            finite.view(torch.uint8), roots, new_lens, best.shape[1], length,
            BLOCK=triton.next_power_of_2(length), num_warps=1,
        )  # fmt: skip
    return out


@outcome.register_fake
def _(best, path, tokens, num_accepted, active, seq_lens):
    return _after(seq_lens)


@accept_most_likely.register_fake
def _(logits, tokens, parents, steps):
    return _outcome(tokens, steps)


@accept_target_only.register_fake
def _(parts, tokens, parents, uniforms, steps):
    return _outcome(tokens, steps)


@accept_stochastic.register_fake
def _(parts, q, tokens, parents, uniforms, bonus_uniforms, steps, single, acc):
    return _outcome(tokens, steps)


@accept_block.register_fake
def _(parts, q, tokens, uniforms, bonus_uniforms):
    return _outcome(tokens, q.shape[1])
