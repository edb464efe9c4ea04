"""Online softmax over blocks of a paged store, in Triton: what window attention and prompts share.

Legend: D head size.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Factor of scores in base 2, capped or not, and that of those to be capped."""
    return (scale * LOG2_E, 1.0) if soft_cap is None else (soft_cap * LOG2_E, scale / soft_cap)


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
                keys = tl.load(k_at)
                values = tl.load(v_at)
            scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
            if CAPPED:
                scores = tanh(scores * cap)
            acc, odd, top, total = fold(acc, odd, top, total, scores, values, factor, queries.dtype, False)
    return acc, odd, top, total
