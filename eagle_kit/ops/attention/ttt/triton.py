"""Attention of training-time test by flash attention, forward and backward.

Row i of a packed sequence attends to the step-0 keys ``starts[i] .. stops[i] - 1`` and its own keys of steps
1..J, in one softmax. The forward takes the own keys first, one row-wise dot each, then the prefix in blocks;
both feed the same running maximum and sum. With scores S = q k^T and s_j = q . own_k_j, before the scale, and
L the log-sum-exp of all scaled scores over the scale,

    P = exp(scale (S - L)),     p_j = exp(scale (s_j - L)),     out = P v + sum_j p_j own_v_j.

The gradient of a softmax needs the probabilities and d = sum(dout * out) only, so the merged L and out serve
both parts:

    dS = P * (dout v^T - d),            ds_j = p_j (dout . own_v_j - d),
    dq = scale (dS k + sum_j ds_j own_k_j),
    dk = scale dS^T q,                  d own_k_j = scale sum_g ds_j q_g,
    dv = P^T dout,                      d own_v_j = sum_g p_j dout_g,

with g over the query heads that share the key head. The backward has three launches: d, the gradients of own
keys and their part of dq; the prefix's part of dq; dk and dv, whose programs go over the rows that attend to
their keys. Rows ascend and documents are contiguous, so those rows are a range, found by two searches. Each
element is written by one program at a time in a fixed order: no atomics, the same bits every time. Heads are
the fastest axis of a grid, and blocks go from those with most pairs to those with least: by heads the last
long programs would start late (at T = 4096, 8 key heads and 132 multiprocessors, dk and dv in 1.6 times the
time of their work; this way in 1.02 times).

Own keys are row-wise dots and take no matrix products. The prefix takes seven for each pair of blocks, two of
them because the launches for dq and for dk and dv both compute S and dout v^T. Three ways to save these two
were estimated at R = T = 4096, Hq = 32, D = 128, where a product is 69 GFLOP, with bf16 at 600 TFLOP/s (115
microseconds a product, so 229 to save) and 3.35 TB/s:

    The launch for dk and dv writes dq of each block of 128 keys in fp32, and another adds the blocks up in
        their order: 1.1 GB written and read, 661 microseconds.
    It writes dS in bf16, and the launch for dq reads it: 0.5 GB written, behind the products, and read. This
        saves 184 of 802 microseconds, but needs memory for R T Hq entries (1.1 GB; 4.3 GB at T = 8192).
    Its programs add to dq one after another. A row must begin at its last keys, or all programs wait for the
        first one; so the programs with least work start first, which takes 1.5 times the time of their work
        (1.26 at 8192, 1.13 at 16384). 5 x 1.5 > 7, before any waiting, and 2.2 GB go to and from L2.

So it stays seven, without memory that grows with R x T.

Keys of another document inside a block count with probability 0, so they must be finite. scale > 0.

Memory, elements of e bytes: a query row keeps out and L, e Hq D + 4 Hq bytes; the backward adds 4 Hq bytes
for d, and the gradients. Nothing has R x T entries. Bytes moved forward, keys reread out of L2 aside:
e D (2 R Hq + 2 T Hkv + 2 R Hkv J); backward, with e D (9 R Hq + 6 T Hkv + 4 R Hkv J), about three times that.

After FlashAttention-2 (arXiv 2307.08691) and EAGLE-3 (arXiv 2503.01840, section 3).

Legend: R query rows, T packed tokens, J own keys, Hq / Hkv heads, G = Hq / Hkv, D head size. In kernels:
``i`` query rows, ``m`` rows of a block, ``n`` keys of a block, ``d`` elements of a head, ``g`` query heads of
a key head; ``delta`` is d of the formulas.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from eagle_kit.core.errors import UserError
from eagle_kit.ops.attention.online_softmax import LOG2_E, score_factors, tanh
from eagle_kit.ops.capability import DeviceFacts, device_facts
from eagle_kit.ops.custom_operator import custom_operator

MAX_HEAD_SIZE = 256


@triton.jit
def _attend(
    acc, row_max, row_sum, queries, k, v, begin, gap, resume, end, starts, stops, scale, cap,
    CAPPED: tl.constexpr, MASKED: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add keys ``begin .. end - 1`` except ``gap .. resume - 1`` to the online softmax, in blocks; not MASKED
    if every row attends to all of them."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    tile = n[:, None] * STRIDE + d[None, :]
    for step in range(begin, end - (resume - gap), BLOCK_N):
        # Load the keys and values of the block.
        first = step
        if MASKED:
            first = tl.where(step < gap, step, step + (resume - gap))
        block_at = tl.cast(first, tl.int64) * STRIDE
        if MASKED:
            present = ((first + n) < end)[:, None] & (d < D)[None, :]
            keys = tl.load(k + block_at + tile, present, 0.0)
            values = tl.load(v + block_at + tile, present, 0.0)
        elif D < BLOCK_D:
            present = (d < D)[None, :]
            keys = tl.load(k + block_at + tile, present, 0.0)
            values = tl.load(v + block_at + tile, present, 0.0)
        else:
            keys = tl.load(k + block_at + tile)
            values = tl.load(v + block_at + tile)

        # Scores.
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if CAPPED:
            scores = tanh(scores * cap)
        scores *= scale
        if MASKED:
            seen = ((first + n)[None, :] >= starts[:, None]) & ((first + n)[None, :] < stops[:, None])
            scores = tl.where(seen, scores, float("-inf"))

        # Weights and values, and the sums so far relative to the new maximum.
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        base = new_max
        if MASKED:  # rows without a key so far
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(row_max - base)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(values.dtype), values, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["rows", "num_own"])
def _forward(
    q, k, v, own_k, own_v, starts, stops, sinks, out, lse, scale, cap, rows, num_own,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, OWN: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Forward of some rows of one query head; the last rows, which have most keys, run first. Grid ``(Hq,
    blocks of rows)``."""
    # Load the queries and the spans of their keys. Rows past the end repeat the last one.
    i = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(0)
    kv_head = head // (HQ // HKV)
    d = tl.arange(0, BLOCK_D)
    i_clamped = tl.minimum(i, rows - 1)
    start = tl.load(starts + i_clamped)
    stop = tl.load(stops + i_clamped)
    row = i_clamped.to(tl.int64)
    q_at = (row * HQ + head)[:, None] * D + d[None, :]
    in_head = (d < D)[None, :]
    queries = tl.load(q + q_at, in_head, 0.0)

    # An empty softmax, or one with the sink in it.
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        row_max = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E
        row_sum += 1.0

    # Own keys, one of every row at a time: row-wise dots.
    if OWN:
        wide = queries.to(tl.float32)
        own_at = (row * HKV + kv_head)[:, None] * (num_own * D) + d[None, :]
        for _ in range(num_own):
            score = tl.sum(wide * tl.load(own_k + own_at, in_head, 0.0).to(tl.float32), 1)
            if CAPPED:
                score = tanh(score * cap)
            score *= scale
            new_max = tl.maximum(row_max, score)
            p = tl.exp2(score - new_max)
            rescale = tl.exp2(row_max - new_max)
            value = tl.load(own_v + own_at, in_head, 0.0).to(tl.float32)
            acc = acc * rescale[:, None] + p[:, None] * value
            row_sum = row_sum * rescale + p
            row_max = new_max
            own_at += D

    # The prefix. All rows attend to the keys gap .. resume - 1, which need no mask.
    begin = tl.min(start)
    end = tl.max(stop)
    gap = begin + tl.cdiv(tl.max(start) - begin, BLOCK_N) * BLOCK_N
    resume = gap + tl.maximum(tl.min(stop) - gap, 0) // BLOCK_N * BLOCK_N
    k += kv_head * D
    v += kv_head * D
    STRIDE: tl.constexpr = HKV * D
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, queries, k, v, begin, gap, resume, end, start, stop, scale, cap,
        CAPPED, True, STRIDE, D, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, queries, k, v, gap, resume, resume, resume, start, stop, scale, cap,
        CAPPED, False, STRIDE, D, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    # Store the result and the log-sum-exp over the scale.
    is_row = i < rows
    acc = acc / row_sum[:, None]
    tl.store(out + q_at, acc.to(out.dtype.element_ty), is_row[:, None] & in_head)
    tl.store(lse + head * rows + i, (row_max + tl.log2(row_sum)) / scale, is_row)


@triton.jit(do_not_specialize=["rows", "num_own"])
def _backward_own(
    q, own_k, own_v, out, dout, lse, delta, dq, down_k, down_v, scale, rows, num_own,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``delta [Hq, R]`` and, where there are own keys, their gradients and their part of dq, for some rows
    and one key head. Grid ``(blocks of rows, Hkv)``."""
    G: tl.constexpr = HQ // HKV
    i = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    kv_head = tl.program_id(1)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    row = i.to(tl.int64)
    head = kv_head * G + g

    # delta: sums of dout * out, [BLOCK_R, BLOCK_G].
    is_row = (i < rows)[:, None] & (g < G)[None, :]
    q_at = (row[:, None] * HQ + head[None, :])[:, :, None] * D + d[None, None, :]
    in_head = is_row[:, :, None] & (d < D)[None, None, :]
    douts = tl.load(dout + q_at, in_head, 0.0).to(tl.float32)
    deltas = tl.sum(douts * tl.load(out + q_at, in_head, 0.0).to(tl.float32), 2)
    row_at = head[None, :] * rows + i[:, None]
    tl.store(delta + row_at, deltas, is_row)
    if num_own > 0:
        # Load the queries; gradients of them are summed over the own keys.
        queries = tl.load(q + q_at, in_head, 0.0).to(tl.float32)
        row_lse = tl.load(lse + row_at, is_row, float("inf"))
        own_at = (row * HKV + kv_head)[:, None] * (num_own * D) + d[None, :]
        present = (i < rows)[:, None] & (d < D)[None, :]
        dqueries = tl.zeros([BLOCK_R, BLOCK_G, BLOCK_D], tl.float32)
        for _ in range(num_own):
            # p and ds of one own key of every row.
            key = tl.load(own_k + own_at, present, 0.0).to(tl.float32)[:, None, :]
            value = tl.load(own_v + own_at, present, 0.0).to(tl.float32)[:, None, :]
            p = tl.exp2((tl.sum(queries * key, 2) - row_lse) * (scale * LOG2_E))
            ds = p * (tl.sum(douts * value, 2) - deltas) * scale

            # Gradients of the queries, and of the key and value over the query heads of the group.
            dqueries += ds[:, :, None] * key
            dkey = tl.sum(ds[:, :, None] * queries, 1)
            dvalue = tl.sum(p[:, :, None] * douts, 1)
            tl.store(down_k + own_at, dkey.to(down_k.dtype.element_ty), present)
            tl.store(down_v + own_at, dvalue.to(down_v.dtype.element_ty), present)
            own_at += D
        tl.store(dq + q_at, dqueries.to(dq.dtype.element_ty), in_head)


@triton.jit(do_not_specialize=["rows"])
def _backward_q(
    q, k, v, starts, stops, dout, lse, delta, dq, scale, rows,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, OWN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add the prefix's part of dq, for some rows of one query head; with OWN, dq already holds the other
    part. Grid ``(Hq, blocks of rows)``."""
    # Load the spans, queries and gradients of the rows. Rows past the end repeat the last one.
    i = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(0)
    kv_head = head // (HQ // HKV)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    i_clamped = tl.minimum(i, rows - 1)
    start = tl.load(starts + i_clamped)
    stop = tl.load(stops + i_clamped)
    row_lse = tl.load(lse + head * rows + i_clamped)
    deltas = tl.load(delta + head * rows + i_clamped)
    row = i_clamped.to(tl.int64)
    q_at = (row * HQ + head)[:, None] * D + d[None, :]
    in_head = (d < D)[None, :]
    queries = tl.load(q + q_at, in_head, 0.0)
    douts = tl.load(dout + q_at, in_head, 0.0)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    log2_scale = scale * LOG2_E
    begin = tl.min(start)
    end = tl.max(stop)
    STRIDE: tl.constexpr = HKV * D
    tile = n[:, None] * STRIDE + d[None, :]
    k += kv_head * D
    v += kv_head * D
    for first in range(begin, end, BLOCK_N):
        # Load a block of keys and values.
        present = ((first + n) < end)[:, None] & in_head
        block_at = tl.cast(first, tl.int64) * STRIDE
        keys = tl.load(k + block_at + tile, present, 0.0)
        values = tl.load(v + block_at + tile, present, 0.0)

        # P and dS of the block, and its part of dq.
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        seen = ((first + n)[None, :] >= start[:, None]) & ((first + n)[None, :] < stop[:, None])
        p = tl.where(seen, tl.exp2((scores - row_lse[:, None]) * log2_scale), 0.0)
        dp = tl.dot(douts, tl.trans(values), input_precision="ieee")
        ds = p * (dp - deltas[:, None])
        acc = tl.dot(ds.to(keys.dtype), keys, acc, input_precision="ieee")

    # Store the sum, with the part of the own keys.
    acc *= scale
    mask = (i < rows)[:, None] & in_head
    if OWN:
        acc += tl.load(dq + q_at, mask, 0.0).to(tl.float32)
    tl.store(dq + q_at, acc.to(dq.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows", "tokens"])
def _backward_kv(
    q, k, v, starts, stops, bounds, dout, lse, delta, dk, dv, scale, rows, tokens,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BRANCH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of some keys and values of one head, over its query heads and the rows that attend to them.
    Grid ``(Hkv, blocks of keys)``; ``bounds`` are those of :func:`_seen_by`.

    BRANCH skips the mask where all rows attend to all keys; ptxas spills that for sm_80.
    """
    # Load the keys and values.
    G: tl.constexpr = HQ // HKV
    block = tl.program_id(1)
    kv_head = tl.program_id(0)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    m = tl.arange(0, BLOCK_M)
    in_head = (d < D)[None, :]
    k_at = (n.to(tl.int64) * HKV + kv_head)[:, None] * D + d[None, :]
    present = (n < tokens)[:, None] & in_head
    keys = tl.load(k + k_at, present, 0.0)
    values = tl.load(v + k_at, present, 0.0)
    dkeys = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dvalues = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    log2_scale = scale * LOG2_E

    # Rows that attend to some of the keys, and those that attend to all.
    begin = tl.load(bounds + block * 4)
    end = tl.load(bounds + block * 4 + 1)
    all_begin = tl.load(bounds + block * 4 + 2)
    all_end = tl.load(bounds + block * 4 + 3)
    tile = m[:, None] * (HQ * D) + d[None, :]
    num_blocks = tl.cdiv(end - begin, BLOCK_M)
    for step in range(num_blocks * G):
        # Load a block of rows of one query head.
        head = kv_head * G + step // num_blocks
        first = begin + step % num_blocks * BLOCK_M
        i = first + m
        is_row = i < end
        block_at = (tl.cast(first, tl.int64) * HQ + head) * D
        queries = tl.load(q + block_at + tile, is_row[:, None] & in_head, 0.0)
        douts = tl.load(dout + block_at + tile, is_row[:, None] & in_head, 0.0)
        row_lse = tl.load(lse + head * rows + i, is_row, 0.0)
        deltas = tl.load(delta + head * rows + i, is_row, 0.0)

        # P, transposed. The log-sum-exp is subtracted as the product's first term.
        minus_lse = tl.broadcast_to(-row_lse[None, :], [BLOCK_N, BLOCK_M])
        p = tl.exp2(tl.dot(keys, tl.trans(queries), minus_lse, input_precision="ieee") * log2_scale)
        if BRANCH:
            if (first < all_begin) | (first + BLOCK_M > all_end):
                start = tl.load(starts + i, is_row, 0)
                stop = tl.load(stops + i, is_row, 0)
                p = tl.where((n[:, None] >= start[None, :]) & (n[:, None] < stop[None, :]), p, 0.0)
        else:
            start = tl.load(starts + i, is_row, 0)
            stop = tl.load(stops + i, is_row, 0)
            p = tl.where((n[:, None] >= start[None, :]) & (n[:, None] < stop[None, :]), p, 0.0)

        # dv, then dS, transposed, and dk.
        p = p.to(douts.dtype)
        dvalues = tl.dot(p, douts, dvalues, input_precision="ieee")
        minus_delta = tl.broadcast_to(-deltas[None, :], [BLOCK_N, BLOCK_M])
        ds = p.to(tl.float32) * tl.dot(values, tl.trans(douts), minus_delta, input_precision="ieee")
        dkeys = tl.dot(ds.to(queries.dtype), queries, dkeys, input_precision="ieee")
    tl.store(dk + k_at, (dkeys * scale).to(dk.dtype.element_ty), present)
    tl.store(dv + k_at, dvalues.to(dv.dtype.element_ty), present)


class TTTBlocks(NamedTuple):
    """Rows (M) and keys (N) of a program, warps, pipeline stages, and a bound on the registers of a thread.

    Without a bound the assembler may spill a few bytes, so that another program could fit."""

    m: int
    n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


# Half types, by kernel and head size: blocks where warps multiply in groups, and where not.
_HALF = {
    ("forward", 64): (TTTBlocks(128, 64, 8, 3), TTTBlocks(128, 64, 8, 2)),
    ("forward", 128): (TTTBlocks(128, 64, 8, 3), TTTBlocks(128, 64, 8, 2)),
    ("forward", 256): (TTTBlocks(64, 32, 8, 3), TTTBlocks(64, 32, 8, 2)),
    ("q", 64): (TTTBlocks(128, 64, 8, 3), TTTBlocks(64, 64, 8, 3)),
    ("q", 128): (TTTBlocks(128, 64, 8, 3), TTTBlocks(64, 64, 8, 3)),
    ("q", 256): (TTTBlocks(64, 32, 8, 2), TTTBlocks(64, 32, 8, 2)),
    ("kv", 64): (TTTBlocks(64, 128, 8, 3), TTTBlocks(32, 128, 8, 3)),
    ("kv", 128): (TTTBlocks(32, 128, 8, 3), TTTBlocks(64, 64, 8, 3)),
    ("kv", 256): (TTTBlocks(16, 64, 8, 2), TTTBlocks(16, 32, 8, 2)),
}


def _blocks(kernel: str, block_d: int, itemsize: int, facts: DeviceFacts) -> TTTBlocks:
    """The largest blocks that neither Triton 3.6 nor later ones spill registers for; 3.7 spills two where a
    program of B200 has heads of 256 and own keys.

    Two warpgroups share an SM of Hopper, 64 rows of a matrix instruction each. The accumulators of dk and dv
    leave room for 32 rows at a time at head size 128, and for 16 at 256; the side of the block that the loop
    goes over (N forward and for dq, M for dk and dv) then decides only how often the other is read from
    shared memory. fp32 is multiplied without tensor cores, as torch does unless TF32 is allowed, and takes
    many more registers, of which 3.6 spills up to six: it is there to be exact. Where shared memory is short,
    the loop has as many stages as fit.
    """
    if itemsize == 4:
        return TTTBlocks(16, 32, 4, 2) if block_d <= 64 else TTTBlocks(16, 16, 8, 2)
    in_groups, others = _HALF[kernel, max(block_d, 64)]
    blocks = in_groups if facts.multiplies_in_groups else others
    if kernel == "forward" and block_d >= 128 and not facts.multiplies_in_groups:
        blocks = blocks._replace(max_registers=255)  # one program fits by its shared memory

    # Bytes of a row. Rows are loaded in pairs: keys with values, queries with gradients.
    row_bytes = block_d * itemsize
    if kernel == "kv":
        fixed_bytes = 2 * blocks.n * row_bytes
        extra_bytes = (blocks.n + 8) * itemsize
        m, stages = facts.fit(
            blocks.m, blocks.num_stages, 2 * row_bytes, extra_bytes=extra_bytes, fixed_bytes=fixed_bytes
        )
        return blocks._replace(m=m, num_stages=stages)
    if kernel == "forward" and facts.is_small:
        blocks = blocks._replace(m=64 if block_d <= 128 else 32)
    fixed_bytes = blocks.m * row_bytes * (2 if kernel == "q" else 1)
    n, stages = facts.fit(
        blocks.n, blocks.num_stages, 2 * row_bytes, extra_bytes=blocks.m * itemsize, fixed_bytes=fixed_bytes
    )
    return blocks._replace(n=n, num_stages=stages)


def _own_rows(block_g: int, block_d: int) -> tuple[int, int]:
    """Rows and warps of ``_backward_own``: 16 elements per thread of queries, of gradients and of their
    sum; more where heads of a block's rows (``anchored.py``) are too many for 32 warps."""
    rows = max(1, 2048 // (block_g * block_d))
    return rows, min(32, max(4, rows * block_g * block_d // 512))


def _constants(q: torch.Tensor, k: torch.Tensor) -> dict[str, int]:
    """Sizes that all kernels are compiled for. Raises UserError for larger heads than they take."""
    hq, d = q.shape[1:]
    if d > MAX_HEAD_SIZE:
        raise UserError(
            f"The Triton attention kernels support head sizes up to {MAX_HEAD_SIZE}, not {d}.",
            "Use the backend 'reference'.",
        )
    return {"HQ": hq, "HKV": k.shape[1], "D": d, "BLOCK_D": max(triton.next_power_of_2(d), 16)}


def _launch(blocks: TTTBlocks) -> dict[str, int | None]:
    return {
        "BLOCK_M": blocks.m,
        "BLOCK_N": blocks.n,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
        "maxnreg": blocks.max_registers,
    }


@custom_operator("eagle_kit::ttt_attention")
def ttt_attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    scale: float,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward with all inputs contiguous, scale > 0 -> ``out [R, Hq, D]``, and L fp32 ``[Hq, R]``; that of
    capped scores and of ``sinks [Hq]`` has no backward."""
    rows, hq, _ = q.shape
    num_own = own_k.shape[2]
    out = torch.empty_like(q)
    lse = q.new_empty(hq, rows, dtype=torch.float32)
    if rows == 0:
        return out, lse
    shape = _constants(q, k)
    blocks = _blocks("forward", shape["BLOCK_D"], q.element_size(), device_facts(q.device))
    factor, cap = score_factors(scale, soft_cap)
    _forward[(hq, triton.cdiv(rows, blocks.m))](
        q,
        k,
        v,
        own_k,
        own_v,
        starts,
        stops,
        q if sinks is None else sinks,
        out,
        lse,
        factor,
        cap,
        rows,
        num_own,
        **shape,
        OWN=num_own > 0,
        CAPPED=soft_cap is not None,
        SINKS=sinks is not None,
        **_launch(blocks),
    )
    return out, lse


@ttt_attention_op.register_fake
def _(q, *args):
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


def _seen_by(starts: torch.Tensor, stops: torch.Tensor, tokens: int, block: int) -> torch.Tensor:
    """For each block of keys, the rows ``begin .. end - 1`` that attend to some of it, and ``all_begin ..
    all_end - 1`` that attend to all: int32 ``[blocks, 4]`` of these."""
    first = torch.arange(0, tokens, block, dtype=torch.int32, device=starts.device)
    after = (first + block).clamp(max=tokens)
    begin, all_begin = torch.searchsorted(stops, torch.stack((first + 1, after)), out_int32=True)
    all_end, end = torch.searchsorted(starts, torch.stack((first + 1, after)), out_int32=True)
    return torch.stack((begin, end, all_begin, all_end), 1)


@custom_operator("eagle_kit::ttt_attention_backward")
def ttt_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of ``q, k, v, own_k, own_v``."""
    rows, hq, _ = q.shape
    tokens, hkv = k.shape[:2]
    num_own = own_k.shape[2]
    if rows == 0:
        return torch.zeros_like(q), k.new_zeros(k.shape), v.new_zeros(v.shape), own_k.clone(), own_v.clone()
    dq, dk, dv, down_k, down_v = (torch.empty_like(x) for x in (q, k, v, own_k, own_v))
    delta = torch.empty_like(lse)
    shape = _constants(q, k)
    itemsize = q.element_size()
    facts = device_facts(q.device)

    # delta, and the gradients of own keys with their part of dq.
    block_g = triton.next_power_of_2(hq // hkv)
    block_r, num_warps = _own_rows(block_g, shape["BLOCK_D"])
    _backward_own[(triton.cdiv(rows, block_r), hkv)](
        q,
        own_k,
        own_v,
        out,
        dout,
        lse,
        delta,
        dq,
        down_k,
        down_v,
        scale,
        rows,
        num_own,
        **shape,
        BLOCK_R=block_r,
        BLOCK_G=block_g,
        num_warps=num_warps,
    )

    # The prefix's part of dq.
    blocks = _blocks("q", shape["BLOCK_D"], itemsize, facts)
    _backward_q[(hq, triton.cdiv(rows, blocks.m))](
        q,
        k,
        v,
        starts,
        stops,
        dout,
        lse,
        delta,
        dq,
        scale,
        rows,
        **shape,
        OWN=num_own > 0,
        **_launch(blocks),
    )

    # dk and dv.
    blocks = _blocks("kv", shape["BLOCK_D"], itemsize, facts)
    bounds = _seen_by(starts, stops, tokens, blocks.n)
    _backward_kv[(hkv, bounds.shape[0])](
        q,
        k,
        v,
        starts,
        stops,
        bounds,
        dout,
        lse,
        delta,
        dk,
        dv,
        scale,
        rows,
        tokens,
        **shape,
        BRANCH=facts.multiplies_in_groups,
        **_launch(blocks),
    )
    return dq, dk, dv, down_k, down_v


@ttt_attention_backward.register_fake
def _(dout, q, k, v, own_k, own_v, starts, stops, out, lse, scale):
    return tuple(torch.empty_like(x) for x in (q, k, v, own_k, own_v))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale, soft_cap, sinks = inputs
    assert soft_cap is None and sinks is None, "capped scores and sinks have no backward"
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, dout: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, k, v, own_k, own_v, starts, stops, out, lse = ctx.saved_tensors
    grads = ttt_attention_backward(
        dout.contiguous(), q, k, v, own_k, own_v, starts, stops, out, lse, ctx.scale
    )
    return *grads, None, None, None, None, None


ttt_attention_op.register_autograd(_gradients, setup_context=_setup_context)


def ttt_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    scale: float,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the reference, with ``starts, stops`` int32 ``[R]``, both ascending, in place of blocks.

    Computed in the autocast dtype, or else in the dtype of ``q``; fp32 without TF32. The result has the dtype
    of ``q``.
    """
    kind = q.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
    out, _ = ttt_attention_op(
        q.to(dtype).contiguous(),
        k.to(dtype).contiguous(),
        v.to(dtype).contiguous(),
        own_k.to(dtype).contiguous(),
        own_v.to(dtype).contiguous(),
        starts,
        stops,
        scale,
        soft_cap,
        sinks,
    )
    return out.to(q.dtype)
