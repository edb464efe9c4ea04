"""Window attention by flash decoding over parts of the keys, which the last program of a request merges.

A request attends to columns ``0 .. prefix + M - 1``: its prefix slots, then its window keys. With
``c = scale k_scale log2(e)`` and scores ``S = c q k^T``, a part of the columns gives, for each query row,

    m = max S,    P = exp2(S - m),    o = P v / sum(P),    L = m + log2(sum(P)),

and parts p merge to ``sum_p exp2(L_p - max L) o_p / sum_p exp2(L_p - max L)``, times ``v_scale``.

The N x G query rows that share a key head are one tile of matrix rows (padded to 16; more tiles from 128 on),
so that a key is read once per window. Columns are taken in blocks. Blocks inside the prefix are not masked;
the rest is one or two blocks, the end of the prefix with the window directly behind it, masked by ancestor
bits. A program takes an even share of the blocks of its request, whose length it reads on the device: the
grid depends only on sizes known to the host, and a program without a share returns at once.

Parts are merged in their order, whoever does it: the program of a tile that arrives last by a counter, which
it sets back to 0 for the next launch, or a second launch where that is one program's work for too long
(:func:`merged_rows`). A request that has only one part writes its result at once.

With limits, blocks before all that the nodes may attend to are not read, and those at the border are masked.
A soft cap c gives scores ``c tanh(scale q k / c)``; a sink is the score that the first part begins with.

Bytes: ``2 Hkv (prefix + M) D`` elements of the store per request, ``2 N Hq D`` of queries and results; with S
parts ``8 S N Hq D`` bytes for partial results, most of which stay in the L2 cache.

After FlashAttention-2 (arXiv 2307.08691) and flash decoding (Dao et al. 2023); ancestors' masks are those of
SpecInfer (arXiv 2305.09781).

Legend: B requests, N query nodes, M window keys, Hq / Hkv heads, G = Hq / Hkv, D head size, R rows of the
store, C a bound on columns, S parts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from eagle_kit.kernels.aot import Variant
from eagle_kit.kernels.capability import SHIPPED, WITH_FP8, DeviceFacts, device_facts
from eagle_kit.kernels.dependent_launch import launch_options, wait_for_launch
from eagle_kit.kernels.variant import AttentionVariant, Limits
from eagle_kit.kernels.window_attention.plan import WindowPlan

LOG2_E = 1.4426950408889634
MIN_KEYS = 128
"""Minimum number of keys of a part: fewer are read no faster."""
MAX_SPLITS = 128


@triton.jit
def fold(acc, odd, top, total, scores, values, factor, kind: tl.constexpr, MASKED: tl.constexpr):
    """Accumulate one block of scores and values into the online softmax, multiplied as ``kind``; with MASKED,
    scores may be -inf.

    Pairs of fp8 values as int16 go into two results, ``acc`` for even elements and ``odd``: the matrix
    instructions need neighbouring keys side by side, and shared memory loads can transpose pairs but not
    bytes. fp8 is exact in fp16, which also holds P better than bf16 does.
    """
    higher = tl.maximum(top, tl.max(scores, 1) * factor)
    base = higher
    if MASKED:  # rows without a key so far
        base = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(scores * factor - base[:, None])
    kept = tl.exp2(top - base)
    total = total * kept + tl.sum(p, 1)
    acc = acc * kept[:, None]
    if values.dtype == tl.int16:
        p = p.to(tl.float16)
        low = values.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        high = (values >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        acc = tl.dot(p, low.to(tl.float16), acc)
        odd = tl.dot(p, high.to(tl.float16), odd * kept[:, None])
    elif values.dtype == tl.float8e4nv and kind != tl.float32:
        acc = tl.dot(p.to(tl.float16), values.to(tl.float16), acc)
    else:
        acc = tl.dot(p.to(kind), values.to(kind), acc, input_precision="ieee")
    return acc, odd, higher, total


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@triton.jit
def count_bits(bits):
    """Number of set bits of int64 words."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    bits += bits >> 8
    bits += bits >> 16
    bits += bits >> 32
    return (bits & 0x7F).to(tl.int32)


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """First position that a query at ``position`` attends to."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position + 1 - WINDOW)
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def block_rows(table, block, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows of the store of block ``block`` of a prefix: the first one if they are all of one page, each of
    them otherwise. The table is read once for each page that the block touches."""
    if PAGE % BLOCK_N == 0:
        column = block * BLOCK_N
        rows = tl.load(table + column // PAGE).to(tl.int32) * PAGE + column % PAGE
    elif PAGE > 1 and BLOCK_N % PAGE == 0:
        page = tl.load(table + block * (BLOCK_N // PAGE) + tl.arange(0, BLOCK_N // PAGE)).to(tl.int32)
        rows = tl.reshape(page[:, None] * PAGE + tl.arange(0, PAGE)[None, :], [BLOCK_N])
    else:
        column = block * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = tl.load(table + column // PAGE).to(tl.int32) * PAGE + column % PAGE
    return rows


@triton.jit
def fold_blocks(
    acc, odd, top, total, queries, k, v, table, begin, end, factor, cap,
    D: tl.constexpr, PAIR: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Accumulate blocks ``begin .. end - 1`` of a prefix, without a mask. The table is read a block ahead.
    CAPPED scores are ``tanh(cap q k)``, times ``factor``."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_D // PAIR)
    if begin < end:
        rows = block_rows(table, begin, PAGE, BLOCK_N)
        for block in range(begin, end):
            if PAGE % BLOCK_N == 0:
                at = rows.to(tl.int64)
                k_at = k + at * D + (n[:, None] * D + d[None, :])
                v_at = v + at * (D // PAIR) + (n[:, None] * (D // PAIR) + e[None, :])
            else:
                at = rows.to(tl.int64)[:, None]
                k_at = k + (at * D + d[None, :])
                v_at = v + (at * (D // PAIR) + e[None, :])
            rows = block_rows(table, tl.minimum(block + 1, end - 1), PAGE, BLOCK_N)
            if D < BLOCK_D:
                keys = tl.load(k_at, (d < D)[None, :], 0.0)
                values = tl.load(v_at, (e < D // PAIR)[None, :], 0.0)
            else:
                keys, values = tl.load(k_at), tl.load(v_at)
            scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
            if CAPPED:
                scores = tanh(scores * cap)
            acc, odd, top, total = fold(acc, odd, top, total, scores, values, factor, queries.dtype, False)
    return acc, odd, top, total


@triton.jit
def share(
    prefix, num_keys, splits,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, MIN_BLOCKS: tl.constexpr,
):  # fmt: skip
    """First block of a request that is read, the number of blocks up to its end, and that of a part."""
    skipped = first_seen(prefix, WINDOW, CHUNK) // BLOCK_N
    count = tl.cdiv(prefix + num_keys, BLOCK_N)
    return skipped, count, tl.maximum(tl.cdiv(count - skipped, splits), MIN_BLOCKS)


@triton.jit
def merge_rows(
    partial, lse, first, r, live, parts, num_rows,
    D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge the parts of query rows ``r``, BLOCK_S at a time -> their sums ``[R, BLOCK_D]`` and masses. Part
    p of row r lies at ``first + p num_rows + r``, and is read past the first-level cache: other programs of
    the launch may have written it."""
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    acc = tl.zeros([r.shape[0], BLOCK_D], tl.float32)
    top = tl.full([r.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([r.shape[0]], tl.float32)
    for step in range(0, parts, BLOCK_S):
        there = (step + s < parts)[:, None] & live[None, :]
        held = first + (step + s)[:, None] * num_rows + r[None, :]
        weight = tl.load(lse + held, there, float("-inf"), cache_modifier=".cg")
        at = partial + held[:, :, None] * D + d[None, None, :]
        value = tl.load(at, there[:, :, None] & (d < D)[None, None, :], 0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(weight, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight, kept = tl.exp2(weight - base[None, :]), tl.exp2(top - base)
        total = total * kept + tl.sum(weight, 0)
        acc = acc * kept[:, None] + tl.sum(weight[:, :, None] * value, 0)
        top = higher
    return acc, tl.where(total > 0.0, total, 1.0)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "bits_stride_b",
        "bits_stride_n",
        "scratch_start",
        "scratch_stride",
        "num_keys",
    ]
)
def _window(
    q, k_rows, v_rows, page_table, prefix_lens, ancestors, sinks, out, partial, lse, arrivals,
    factor, cap, v_scale, num_rows, store_rows, table_stride, bits_stride_b, bits_stride_n,
    scratch_start, scratch_stride, num_keys,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAIR: tl.constexpr, PAGE: tl.constexpr,
    FIRST: tl.constexpr, SPLIT: tl.constexpr, MIN_BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, MERGED: tl.constexpr, BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of query rows of one key head to one part of the columns of one request. With
    SPLIT, ``partial`` takes partial results ``[B, Hkv, S, N * G, D]``, ``lse [B, Hkv, S, N * G]`` their
    base-2 log-sum-exp; with MERGED rows at a time, the last program of a tile by its counter in ``arrivals``
    merges them."""
    wait_for_launch(PDL)
    tile, head = tl.program_id(0) // HKV, tl.program_id(0) % HKV
    part, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    skipped, count, each = share(prefix, num_keys, tl.num_programs(1), WINDOW, CHUNK, BLOCK_N, MIN_BLOCKS)
    begin = skipped + part * each
    if begin >= count:
        return
    end = tl.minimum(begin + each, count)
    lowest = tl.maximum(FIRST, first_seen(prefix, WINDOW, CHUNK))
    # every node attends to all of the blocks from gap to resume, which lie in the prefix
    highest = tl.maximum(FIRST, first_seen(prefix + num_keys - 1, WINDOW, CHUNK))
    gap = tl.minimum(tl.maximum(begin, tl.cdiv(highest, BLOCK_N)), end)
    resume = tl.maximum(gap, tl.minimum(prefix // BLOCK_N, end))

    r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n, d, e = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // PAIR)
    live, inside = r < num_rows, (d < D)[None, :]
    node = r // G
    first = request * (num_rows * HKV * D)
    mine = (node * (HKV * G) + head * G + r % G)[:, None] * D + d[None, :]
    queries = tl.load(q + first + mine, live[:, None] & inside, 0.0)
    bits = tl.load(ancestors + request * bits_stride_b + node * bits_stride_n, live, 0)
    table = page_table + request * table_stride
    plane = head.to(tl.int64) * store_rows
    k, v = k_rows + plane * D, v_rows + plane * (D // PAIR)
    acc = tl.zeros([BLOCK_M, BLOCK_D // PAIR], tl.float32)
    odd = tl.zeros([BLOCK_M, BLOCK_D // PAIR], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head * G + r % G).to(tl.float32) * 1.4426950408889634
        top = tl.where(part == 0, sink, top)
        total = tl.where(part == 0, 1.0, total)
    acc, odd, top, total = fold_blocks(
        acc, odd, top, total, queries, k, v, table, gap, resume, factor, cap,
        D, PAIR, PAGE, BLOCK_N, BLOCK_D, CAPPED,
    )  # fmt: skip
    if WINDOW > 0 or CHUNK > 0:
        position = prefix + count_bits(bits) - 1
        first_of = first_seen(position, WINDOW, CHUNK)
        behind = (bits >> 1) & 0x7FFFFFFFFFFFFFFF
    scratch = request * scratch_stride + scratch_start
    for step in tl.range(begin, end - (resume - gap), num_stages=1):
        column = tl.where(step < gap, step, step + (resume - gap)) * BLOCK_N + n
        in_prefix = (column < prefix) & (column >= lowest)
        key = column - prefix
        in_window = (key >= 0) & (key < num_keys)
        page = tl.load(table + column // PAGE, in_prefix, 0)
        row = tl.where(in_prefix, page * PAGE + column % PAGE, scratch + key)[:, None]
        there = (in_prefix | in_window)[:, None]
        keys = tl.load(k + (row * D + d[None, :]), there & inside, 0.0)
        values = tl.load(v + (row * (D // PAIR) + e[None, :]), there & (e < D // PAIR)[None, :], 0.0)
        bit = tl.where(in_window, key, 0).to(tl.int64)
        chosen = ((bits[:, None] >> bit[None, :]) & 1) != 0
        seen = in_prefix[None, :] | (in_window[None, :] & chosen)
        if WINDOW > 0 or CHUNK > 0:
            place = position[:, None] - count_bits(behind[:, None] >> bit[None, :])
            place = tl.where(in_prefix[None, :], column[None, :], place)
            seen = seen & (place >= first_of[:, None])
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
        if CAPPED:
            scores = tanh(scores * cap)
        scores = tl.where(seen, scores, float("-inf"))
        acc, odd, top, total = fold(acc, odd, top, total, scores, values, factor, queries.dtype, True)

    if PAIR == 2:
        acc = tl.reshape(tl.join(acc, odd), [BLOCK_M, BLOCK_D])
    mass = tl.where(total > 0.0, total, 1.0)
    parts = tl.cdiv(count - skipped, each)
    if SPLIT and (MERGED == 0 or parts > 1):
        held = (request * HKV + head) * tl.num_programs(1) * num_rows
        at = held + part * num_rows
        tl.store(partial + at * D + r[:, None] * D + d[None, :], acc / mass[:, None], live[:, None] & inside)
        tl.store(lse + at + r, top + tl.log2(mass), live)
        if MERGED > 0:
            counter = arrivals + (request * tl.num_programs(0) + tl.program_id(0))
            tl.debug_barrier()  # all of this program's parts are written before it says so
            if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
                tl.store(counter, 0)
                for begin_row in range(
                    tile * BLOCK_M, tl.minimum(tile * BLOCK_M + BLOCK_M, num_rows), MERGED
                ):
                    m = begin_row + tl.arange(0, MERGED)
                    merged, whole = merge_rows(
                        partial, lse, held, m, m < num_rows, parts, num_rows, D, BLOCK_S, BLOCK_D
                    )  # fmt: skip
                    result = (merged * (v_scale / whole)[:, None]).to(out.dtype.element_ty)
                    to = ((m // G) * (HKV * G) + head * G + m % G)[:, None] * D + d[None, :]
                    tl.store(out + first + to, result, (m < num_rows)[:, None] & inside)
    else:
        result = (acc * (v_scale / mass)[:, None]).to(out.dtype.element_ty)
        tl.store(out + first + mine, result, live[:, None] & inside)


@triton.jit(do_not_specialize=["num_rows", "num_keys", "splits"])
def _merge(
    partial, lse, prefix_lens, out, v_scale, num_rows, num_keys, splits,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, MIN_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one query row of one request and head."""
    wait_for_launch(PDL)
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    skipped, count, each = share(prefix, num_keys, splits, WINDOW, CHUNK, BLOCK_N, MIN_BLOCKS)
    parts, first = tl.cdiv(count - skipped, each), (request * HKV + head) * splits * num_rows
    r, d = tl.program_id(0) + tl.arange(0, 1), tl.arange(0, BLOCK_D)[None, :]
    acc, mass = merge_rows(partial, lse, first, r, r >= 0, parts, num_rows, D, BLOCK_S, BLOCK_D)
    row = request * (num_rows * HKV) + (r // G) * (HKV * G) + head * G + r % G
    result = acc * (v_scale / mass)[:, None]
    tl.store(out + row[:, None] * D + d, result.to(out.dtype.element_ty), d < D)


class WindowBlocks(NamedTuple):
    """Query rows (m) and keys (n) of a program, warps, pipeline stages, and number of programs that fit on a
    multiprocessor."""

    m: int
    n: int
    num_warps: int
    num_stages: int
    resident: int


def block_d(size: int) -> int:
    """Head size rounded up to the size of a tile."""
    return triton.next_power_of_2(max(size, 16))


def choose_blocks(
    rows: int, size: int, query_bytes: int, store_bytes: int, facts: DeviceFacts
) -> WindowBlocks:
    """Block sizes for ``rows`` query rows of a key head.

    A block of keys is 16 KB, and as much of values: two blocks in flight are 64 KB per program, twice what
    4.8 TB/s at 1 us of latency require of each of 132 multiprocessors, so two programs fit and either may
    wait. From 64 rows on, Hopper's matrix instructions take 64 rows per warp group; elsewhere more warps
    share the registers. Padded head sizes (80, 96) and fp8 take smaller blocks, and one more in flight. fp32
    is multiplied without tensor cores (TF32 would lose 13 bits): small tiles. Where less shared memory is
    there (A100's 163 KB, 99 KB of Ada and the small Blackwells, whose bandwidth asks for a quarter of the
    bytes in flight), as many stages, and then keys, as fit.
    """
    blocks = _choose_blocks(rows, size, query_bytes, store_bytes, facts)
    of_key, of_query = 2 * block_d(size) * store_bytes, block_d(size) * query_bytes
    weights = 0 if facts.multiplies_in_groups else blocks.m * query_bytes
    n, stages = facts.fit(
        blocks.n,
        blocks.num_stages,
        of_key,
        each=weights,
        held=blocks.m * of_query,
        programs=blocks.resident,
    )
    return blocks._replace(n=n, num_stages=stages)


def _choose_blocks(
    rows: int, size: int, query_bytes: int, store_bytes: int, facts: DeviceFacts
) -> WindowBlocks:
    if query_bytes == 4:
        return WindowBlocks(16, 32 if size <= 64 else 16, 4, 2, 2)
    m = min(128, max(16, triton.next_power_of_2(rows)))
    n = min(128, max(32, 16384 // (block_d(size) * store_bytes)))
    if m < 64 and (store_bytes == 1 or size < block_d(size)):
        return WindowBlocks(m, n // 4 if facts.is_small and store_bytes == 1 else n // 2, 4, 4, 2)
    if m < 64:
        return WindowBlocks(m, n, 4, 3, 2)
    if not facts.multiplies_in_groups or size > 128:
        return WindowBlocks(64, 64 if size <= 128 else 32, 8, 3, 1)
    if facts.capability >= 100 and (store_bytes == 1 or size <= 64):  # ptxas spills the others there
        return WindowBlocks(64, 64, 8 if store_bytes == 1 else 4, 3, 1)
    return WindowBlocks(m, 64, 8, 3, 1) if m == 128 else WindowBlocks(m, 64, 4, 3, 2)


def values_per_element(blocks: WindowBlocks, query_bytes: int, store_bytes: int) -> int:
    """Number of values that are read as one element: fp8 pairs where tensor cores multiply out of
    registers."""
    return 2 if store_bytes == 1 and query_bytes == 2 and blocks.m < 64 else 1


def narrow_loads(blocks: WindowBlocks, store: str) -> str:
    """Why keys and values are loaded by less than 16 bytes at a time; empty where they are not."""
    return "64 rows of mma.sync take fp8 swizzled by 8 bytes" if store == "fp8e4nv" and blocks.m >= 64 else ""


def num_splits(
    batch: int, kv_heads: int, columns: int, rows: int, blocks: WindowBlocks, sms: int = 132
) -> int:
    """Number of parts to split the columns of a request into, from sizes that the host knows.

    One round of programs should fill the ``sms`` multiprocessors; a bound beyond 4,096 columns is always
    split, since lengths may differ; then up to four times as many parts, until the rounds are 80 % full. A
    part's partial results (8 rows bytes for each element of a head) never exceed its keys.

    Batch invariance: results are bit-identical for equal numbers of parts, that is for equal ``batch``,
    ``columns`` (a bound, best a bucket) and number of rows, whatever the other requests hold. Where the
    number differs, sums are grouped differently and agree to fp32 rounding only.
    """
    programs = batch * kv_heads * triton.cdiv(rows, blocks.m)
    slots = sms * blocks.resident
    limit = min(MAX_SPLITS, max(1, columns // max(MIN_KEYS, 2 * min(rows, blocks.m))))
    fewest = min(limit, max(1, slots // max(programs, 1), triton.cdiv(columns, 4096)))
    for splits in range(fewest, min(limit, 4 * fewest) + 1):
        rounds = triton.cdiv(programs * splits, slots)
        if programs * splits >= 0.8 * rounds * slots:
            return splits
    return fewest


MERGED_NUMBERS = 4 * 8192
"""Most partial results that the last program of a tile merges, 128 KB. Reading them out of the second-level
cache takes a program some 3 microseconds, about as long as a launch, whose programs share the work."""


def merged_rows(rows: int, size: int, splits: int, blocks: WindowBlocks) -> tuple[int, int]:
    """Rows and parts that the last program of a tile merges at a time, 32 KB of partial results of a plain
    step's rows and 16 KB of more, which leaves it the registers on every GPU; 0 rows where there are too many
    parts."""
    tile = min(rows, blocks.m)
    at_once, numbers = (min(4, triton.next_power_of_2(tile)), 8192) if tile <= 4 else (2, 4096)
    parts = max(1, numbers // (at_once * block_d(size)))
    return (at_once if tile * splits * size <= MERGED_NUMBERS else 0), parts


def few_enough(splits: int, programs: int, columns: int, most: int, sms: int = 132) -> int:
    """``splits`` for ``programs`` tiles, or the ``most`` that the last program merges, where these still give
    each multiprocessor a program: two blocks in flight are all that its share of the bandwidth needs."""
    keeps_busy = programs * most >= 0.8 * sms and most >= triton.cdiv(columns, 4096)
    return most if splits > most and keeps_busy else splits


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Factor of scores in base 2, capped or not, and that of those to be capped."""
    return (scale * LOG2_E, 1.0) if soft_cap is None else (soft_cap * LOG2_E, scale / soft_cap)


@torch.library.custom_op("eagle_kit::window_attention", mutates_args=("arrivals",))
def window_attention_op(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    prefix_lens: torch.Tensor,
    first_slot: int,
    scratch_start: int,
    scratch_stride: int,
    num_keys: int,
    ancestors: torch.Tensor,
    num_columns: int,
    scale: float,
    v_scale: float,
    limits: list[int],
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    arrivals: torch.Tensor | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Window attention of ``q [B, N, Hq, D]`` and a store, both contiguous; ``splits`` overrides
    :func:`num_splits`. Without ``arrivals``, parts are merged by a second launch."""
    (b, nodes, hq, d), (hkv, store_rows, _) = q.shape, k_rows.shape
    out = torch.empty_like(q)
    if q.numel() == 0:
        return out
    rows = nodes * (hq // hkv)
    facts = device_facts(q.device)
    blocks = choose_blocks(rows, d, q.element_size(), k_rows.element_size(), facts)
    if splits is None:
        span = Limits(*limits).span(num_keys + blocks.n)
        columns = min(num_columns, span or num_columns)
        splits = num_splits(b, hkv, columns, rows, blocks, facts.multiprocessors)
        if arrivals is not None:
            most = MERGED_NUMBERS // (min(rows, blocks.m) * d)
            splits = few_enough(
                splits, b * hkv * triton.cdiv(rows, blocks.m), columns, most, facts.multiprocessors
            )
    partial, lse = out, out
    if splits > 1:
        partial = q.new_empty(b, hkv, splits, rows, d, dtype=torch.float32)
        lse = q.new_empty(b, hkv, splits, rows, dtype=torch.float32)
    tiles = triton.cdiv(rows, blocks.m)
    merged, parts = merged_rows(rows, d, splits, blocks)
    if splits == 1 or arrivals is None or b * hkv * tiles > arrivals.numel():
        merged = 0
    shape = {
        **{"G": hq // hkv, "HKV": hkv, "D": d, "MIN_BLOCKS": MIN_KEYS // blocks.n},
        **{"BLOCK_N": blocks.n, "BLOCK_D": block_d(d), "WINDOW": limits[0], "CHUNK": limits[1]},
        **launch_options(q.device),
    }
    pair = values_per_element(blocks, q.element_size(), k_rows.element_size())
    _window[(tiles * hkv, splits, b)](
        *(q, k_rows, v_rows.view(torch.int16) if pair == 2 else v_rows),
        *(page_table, prefix_lens, ancestors, q if sinks is None else sinks, out, partial, lse),
        prefix_lens if arrivals is None else arrivals,
        *(
            *score_factors(scale, soft_cap),
            v_scale,
            rows,
            store_rows,
            page_table.stride(0),
            *ancestors.stride(),
        ),
        *(scratch_start, scratch_stride, num_keys),
        **shape,
        PAIR=pair,
        PAGE=page_size,
        FIRST=first_slot,
        SPLIT=splits > 1,
        BLOCK_M=blocks.m,
        CAPPED=soft_cap is not None,
        SINKS=sinks is not None,
        MERGED=merged,
        BLOCK_S=parts,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )
    if splits > 1 and not merged:
        _merge[(rows, hkv, b)](
            *(partial, lse, prefix_lens, out, v_scale, rows, num_keys, splits),
            **shape,
            BLOCK_S=16,
            num_warps=4,
        )
    return out


@window_attention_op.register_fake
def _(q, *args, **kwargs):
    return torch.empty_like(q)


def window_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    plan: WindowPlan,
    variant: AttentionVariant,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """See the reference; scales are positive, the store is contiguous."""
    assert variant.scale * k_scale > 0 and k_rows.is_contiguous() and v_rows.is_contiguous()
    return window_attention_op(
        q.contiguous(),
        k_rows,
        v_rows,
        plan.page_table if plan.page_table.stride(1) == 1 else plan.page_table.contiguous(),
        plan.page_size,
        plan.prefix_lens.contiguous(),
        plan.first_slot,
        plan.scratch_start,
        plan.scratch_stride,
        plan.num_keys,
        plan.ancestors,
        plan.num_columns,
        variant.scale * k_scale,
        v_scale,
        [*variant.limits],
        variant.soft_cap,
        variant.sinks,
        plan.arrivals,
    )


def _variant(
    kind: str,
    size: int,
    group: int,
    nodes: int,
    page: int,
    store: str,
    split: bool,
    facts: DeviceFacts,
    **variant: int,
) -> Variant:
    widths = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8e4nv": 1}
    blocks = choose_blocks(nodes * group, size, widths[kind], widths[store], facts)
    merged, parts = merged_rows(nodes * group, size, 8 if split else 1, blocks)
    pair = values_per_element(blocks, widths[kind], widths[store])
    counts: tuple[str, ...] = ("num_rows", "store_rows", "table_stride", "bits_stride_b", "bits_stride_n")
    counts += ("scratch_start", "scratch_stride", "num_keys")
    return Variant(
        f"window_attention {kind} D{size} G{group} N{nodes} page {page}"
        + (" fp8" if store == "fp8e4nv" else "")
        + (" split" if split else "")
        + (" merged" if split and merged else "")
        + "".join(f" {name.lower()} {value}" for name, value in variant.items()),
        _window,
        {
            **{"q": f"*{kind}", "k_rows": f"*{store}", "page_table": "*i64"},
            "v_rows": "*i16" if pair == 2 else f"*{store}",
            **{
                "prefix_lens": "*i64",
                "ancestors": "*i64",
                "sinks": f"*{kind}",
                "out": f"*{kind}",
                **dict.fromkeys(("partial", "lse"), "*fp32"),
                "arrivals": "*i32",
            },
            **{"factor": "fp32", "cap": "fp32", "v_scale": "fp32"},
            **dict.fromkeys(counts, "i32"),
        },
        {
            **{"G": group, "HKV": 8, "D": size, "PAGE": page, "FIRST": 0, "SPLIT": split},
            "PAIR": pair,
            **{"MIN_BLOCKS": MIN_KEYS // blocks.n, "BLOCK_M": blocks.m, "BLOCK_N": blocks.n},
            "BLOCK_D": block_d(size),
            **{"WINDOW": 0, "CHUNK": 0, "CAPPED": False, "SINKS": False},
            **{"MERGED": merged if split else 0, "BLOCK_S": parts, "PDL": facts.starts_early},
            **variant,
        },
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        wgmma=blocks.m >= 64,
        programs=blocks.resident,
        narrow=narrow_loads(blocks, store),
        archs=WITH_FP8 if store == "fp8e4nv" else SHIPPED,
    )


def variants(facts: DeviceFacts) -> list[Variant]:
    """Kernels to compile ahead of time: decoding and windows of 8, 16 and 32 nodes of Llama 3 8B; other head
    sizes, pages and stores; gpt-oss's, Gemma 2's and Llama 4's layers."""
    merge = Variant(
        "window_attention merge bf16 D128 G4",
        _merge,
        {
            **{"partial": "*fp32", "lse": "*fp32", "prefix_lens": "*i64", "out": "*bf16", "v_scale": "fp32"},
            **dict.fromkeys(("num_rows", "num_keys", "splits"), "i32"),
        },
        {
            **{"G": 4, "HKV": 8, "D": 128, "MIN_BLOCKS": 2, "BLOCK_N": 64, "BLOCK_S": 16, "BLOCK_D": 128},
            **{"WINDOW": 0, "CHUNK": 0, "PDL": facts.starts_early},
        },
    )
    return [
        merge,
        _variant("bf16", 128, 4, 1, 16, "bf16", True, facts),
        _variant("bf16", 128, 4, 8, 64, "bf16", True, facts),
        _variant("bf16", 128, 4, 16, 1, "bf16", False, facts),
        _variant("bf16", 128, 4, 32, 16, "bf16", True, facts),
        _variant("bf16", 128, 4, 1, 16, "fp8e4nv", True, facts),
        _variant("bf16", 128, 4, 16, 64, "fp8e4nv", True, facts),
        _variant("fp16", 64, 3, 64, 16, "fp16", True, facts),
        _variant("bf16", 80, 1, 5, 16, "bf16", True, facts),
        _variant("bf16", 96, 5, 64, 1, "bf16", True, facts),
        _variant("bf16", 256, 16, 8, 64, "bf16", True, facts),
        _variant("fp32", 128, 4, 8, 16, "fp32", True, facts),
        _variant("bf16", 64, 8, 8, 16, "bf16", True, facts, WINDOW=128, SINKS=True),
        _variant("bf16", 256, 2, 8, 16, "bf16", True, facts, WINDOW=4096, CAPPED=True),
        _variant("bf16", 128, 5, 16, 16, "bf16", True, facts, CHUNK=8192),
    ]
