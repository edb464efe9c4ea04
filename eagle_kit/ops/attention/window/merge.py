"""Shares of the columns of a request, and the merge of their results, in Triton.

Legend: B requests, Hkv key heads, N * G query rows of a key head, D head size, S parts.
"""

import triton
import triton.language as tl

from eagle_kit.ops.attention.window.fold import first_seen
from eagle_kit.ops.dependent_launch import wait_for_launch


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
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
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
        weight = tl.exp2(weight - base[None, :])
        kept = tl.exp2(top - base)
        total = total * kept + tl.sum(weight, 0)
        acc = acc * kept[:, None] + tl.sum(weight[:, :, None] * value, 0)
        top = higher
    return acc, tl.where(total > 0.0, total, 1.0)


@triton.jit(do_not_specialize=["num_rows", "num_keys", "splits"])
def merge(
    partial, lse, prefix_lens, out, v_scale, num_rows, num_keys, splits,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, MIN_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one query row of one request and head."""
    wait_for_launch(PDL)
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    skipped, count, each = share(prefix, num_keys, splits, WINDOW, CHUNK, BLOCK_N, MIN_BLOCKS)
    parts = tl.cdiv(count - skipped, each)
    first = (request * HKV + head) * splits * num_rows
    r = tl.program_id(0) + tl.arange(0, 1)
    d = tl.arange(0, BLOCK_D)[None, :]
    acc, mass = merge_rows(partial, lse, first, r, r >= 0, parts, num_rows, D, BLOCK_S, BLOCK_D)
    row = request * (num_rows * HKV) + (r // G) * (HKV * G) + head * G + r % G
    result = acc * (v_scale / mass)[:, None]
    tl.store(out + row[:, None] * D + d, result.to(out.dtype.element_ty), d < D)
