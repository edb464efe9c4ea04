"""Online softmax over keys in pages, in Triton: what the kernels of windows and of prompts share.

For each query row a program keeps, over the keys that it has read, the maximum ``row_max`` of the scores in
base 2, the sum ``row_sum`` of ``exp2(score - row_max)``, and ``acc``, the sum of ``exp2(score - row_max) v``.

Legend: D head size, PAIR values of a head that are loaded as one element. In kernels: ``n`` keys of a block,
``d`` elements of a key, ``e`` elements of a value as they are loaded, D / PAIR.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """``factor`` and ``cap`` of a kernel: its scores in base 2 are ``factor q k``, or, where they are capped,
    ``factor tanh(cap q k)``."""
    if soft_cap is None:
        return scale * LOG2_E.value, 1.0
    return soft_cap * LOG2_E.value, scale / soft_cap


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """First position that a query at ``position`` attends to, see :class:`~.variant.Limits`."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position + 1 - WINDOW)
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def update(acc, acc_odd, row_max, row_sum, scores, values, factor, kind: tl.constexpr, MASKED: tl.constexpr):
    """Add one block of keys to the online softmax: scores ``[M, N]`` without ``factor``, which may be -inf if
    MASKED, and values ``[N, E]``. Products are of type ``kind``.

    Pairs of fp8 values as int16 go into two results, ``acc`` for even elements and ``acc_odd``: the matrix
    instructions need neighbouring keys side by side, and shared memory loads can transpose pairs but not
    bytes. fp8 is exact in fp16, which also holds P better than bf16 does.
    """
    # The new maximum. Rows without a key so far have -inf, of which no difference may be taken.
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    base = new_max
    if MASKED:
        base = tl.where(new_max == float("-inf"), 0.0, new_max)

    # Weights of the block, and the sums so far relative to the new maximum.
    p = tl.exp2(scores * factor - base[:, None])
    rescale = tl.exp2(row_max - base)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    acc = acc * rescale[:, None]

    # The weighted values.
    if values.dtype == tl.int16:
        p = p.to(tl.float16)
        low = values.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        high = (values >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        acc = tl.dot(p, low.to(tl.float16), acc)
        acc_odd = tl.dot(p, high.to(tl.float16), acc_odd * rescale[:, None])
    elif values.dtype == tl.float8e4nv and kind != tl.float32:
        acc = tl.dot(p.to(tl.float16), values.to(tl.float16), acc)
    else:
        acc = tl.dot(p.to(kind), values.to(kind), acc, input_precision="ieee")
    return acc, acc_odd, new_max, row_sum


@triton.jit
def page_rows(table, column, present, PAGE: tl.constexpr):
    """Rows of the store of the positions ``column`` of a request, by its page table; row of page 0 where not
    ``present``."""
    page = tl.load(table + column // PAGE, present, 0)
    return page * PAGE + column % PAGE


@triton.jit
def load_rows(k, v, row, present, d, e, D: tl.constexpr, PAIR: tl.constexpr):
    """Load keys ``[N, BLOCK_D]`` and values ``[N, BLOCK_D / PAIR]`` of the rows ``row [N, 1]`` of the store,
    0 where not ``present [N, 1]``."""
    keys = tl.load(k + (row * D + d[None, :]), present & (d < D)[None, :], 0.0)
    values = tl.load(v + (row * (D // PAIR) + e[None, :]), present & (e < D // PAIR)[None, :], 0.0)
    return keys, values


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
def update_by_blocks(
    acc, acc_odd, row_max, row_sum, queries, k, v, table, begin, end, factor, cap,
    D: tl.constexpr, PAIR: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Add blocks ``begin .. end - 1`` of a prefix, to all of whose keys every query row attends, without a
    mask. CAPPED scores are ``tanh(cap q k)``, times ``factor``."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_D // PAIR)
    if begin < end:
        rows = block_rows(table, begin, PAGE, BLOCK_N)
        for block in range(begin, end):
            # Addresses of this block. The page table is read a block ahead.
            if PAGE % BLOCK_N == 0:
                row = rows.to(tl.int64)
                k_at = k + row * D + (n[:, None] * D + d[None, :])
                v_at = v + row * (D // PAIR) + (n[:, None] * (D // PAIR) + e[None, :])
            else:
                row = rows.to(tl.int64)[:, None]
                k_at = k + (row * D + d[None, :])
                v_at = v + (row * (D // PAIR) + e[None, :])
            rows = block_rows(table, tl.minimum(block + 1, end - 1), PAGE, BLOCK_N)

            # Load the keys and values.
            if D < BLOCK_D:
                keys = tl.load(k_at, (d < D)[None, :], 0.0)
                values = tl.load(v_at, (e < D // PAIR)[None, :], 0.0)
            else:
                keys = tl.load(k_at)
                values = tl.load(v_at)

            # Scores, and the softmax with them.
            scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
            if CAPPED:
                scores = tanh(scores * cap)
            acc, acc_odd, row_max, row_sum = update(
                acc, acc_odd, row_max, row_sum, scores, values, factor, queries.dtype, False
            )
    return acc, acc_odd, row_max, row_sum
