"""Shares of the columns of a request, and the merge of their results, in Triton.

Legend: B requests, Hkv key heads, N * G query rows of a key head, D head size, S parts. In kernels: ``s``
parts that are merged at a time, ``r`` query rows, ``d`` elements of a head.
"""

import triton
import triton.language as tl

from eagle_kit.ops.attention.online_softmax import first_seen
from eagle_kit.ops.dependent_launch import wait_for_launch


@triton.jit
def share(
    prefix, num_keys, splits, usual_splits, longest_part,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, MIN_BLOCKS: tl.constexpr,
):  # fmt: skip
    """First block of a request that is read, the number of blocks up to its end, and the blocks of a part:
    one of ``usual_splits``, at most ``longest_part`` columns, but no more than ``splits`` parts
    (:class:`~eagle_kit.ops.attention.window.sizes.Parts`)."""
    first_block = first_seen(prefix, WINDOW, CHUNK) // BLOCK_N
    num_blocks = tl.cdiv(prefix + num_keys, BLOCK_N)
    blocks = num_blocks - first_block
    part_blocks = tl.minimum(tl.cdiv(blocks, usual_splits), longest_part // BLOCK_N)
    return first_block, num_blocks, tl.maximum(tl.maximum(part_blocks, tl.cdiv(blocks, splits)), MIN_BLOCKS)


@triton.jit
def merge_rows(
    partial, lse, first, r, is_row, parts, num_rows,
    D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge the parts of query rows ``r [X]``, BLOCK_S at a time -> their weighted sums ``[X, BLOCK_D]`` and
    the sums of their weights ``[X]``.

    Part p of row r lies at ``first + p num_rows + r``. It is read past the first-level cache, since other
    programs of the launch may have written it.
    """
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([r.shape[0], BLOCK_D], tl.float32)
    row_max = tl.full([r.shape[0]], float("-inf"), tl.float32)
    row_sum = tl.zeros([r.shape[0]], tl.float32)
    for step in range(0, parts, BLOCK_S):
        # Load log-sum-exps and results of some parts.
        present = (step + s < parts)[:, None] & is_row[None, :]
        part_at = first + (step + s)[:, None] * num_rows + r[None, :]
        part_lse = tl.load(lse + part_at, present, float("-inf"), cache_modifier=".cg")
        value_at = partial + part_at[:, :, None] * D + d[None, None, :]
        value = tl.load(value_at, present[:, :, None] & (d < D)[None, None, :], 0.0, cache_modifier=".cg")

        # Add them with weights relative to the largest log-sum-exp so far.
        new_max = tl.maximum(row_max, tl.max(part_lse, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(part_lse - base[None, :])
        rescale = tl.exp2(row_max - base)
        row_sum = row_sum * rescale + tl.sum(weight, 0)
        acc = acc * rescale[:, None] + tl.sum(weight[:, :, None] * value, 0)
        row_max = new_max
    return acc, tl.where(row_sum > 0.0, row_sum, 1.0)


@triton.jit(do_not_specialize=["num_rows", "num_keys", "splits", "usual_splits", "longest_part"])
def merge(
    partial, lse, prefix_lens, out, v_scale, num_rows, num_keys, splits, usual_splits, longest_part,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, MIN_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one query row of one request and key head. Grid ``(N * G, Hkv, B)``."""
    wait_for_launch(PDL)
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)

    # Number of parts that were written, as the first launch has computed it.
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    first_block, num_blocks, part_blocks = share(
        prefix, num_keys, splits, usual_splits, longest_part, WINDOW, CHUNK, BLOCK_N, MIN_BLOCKS
    )
    parts = tl.cdiv(num_blocks - first_block, part_blocks)

    # Merge them and store the row.
    first = (request * HKV + head) * splits * num_rows
    r = tl.program_id(0) + tl.arange(0, 1)
    d = tl.arange(0, BLOCK_D)[None, :]
    acc, total = merge_rows(partial, lse, first, r, r >= 0, parts, num_rows, D, BLOCK_S, BLOCK_D)
    row = request * (num_rows * HKV) + (r // G) * (HKV * G) + head * G + r % G
    result = acc * (v_scale / total)[:, None]
    tl.store(out + row[:, None] * D + d, result.to(out.dtype.element_ty), d < D)
