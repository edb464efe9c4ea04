"""Window attention by flash decoding over parts of the keys, which the last program of a request merges.

A request attends to columns ``0 .. prefix + M - 1``: its prefix, then its window keys. With
``c = scale k_scale log2(e)`` and scores ``S = c q k^T``, a part of the columns gives, for each query row,

    m = max S,    P = exp2(S - m),    o = P v / sum(P),    L = m + log2(sum(P)),

and parts p merge to ``sum_p exp2(L_p - max L) o_p / sum_p exp2(L_p - max L)``, times ``v_scale``.

The N x G query rows that share a key head are one tile of matrix rows (padded to 16; more tiles from 128
on), so that a key is read once per window. Columns are taken in blocks. Blocks inside the prefix are not
masked; the rest is one or two blocks, the end of the prefix with the window directly behind it, masked by
ancestor bits. A program takes an even share of the blocks of its request, whose length it reads on the
device: the grid depends only on sizes known to the host, and a program without a share returns at once. The
grid has parts for the longest request that there may be; shorter ones have fewer (:class:`Parts`).

Parts are merged in their order, whoever does it: the program of a tile that arrives last by a counter, which
it sets back to 0 for the next launch, or a second launch where that is one program's work for too long
(:func:`are_merged`). A request that has only one part writes its result at once.

With limits, blocks before all that the nodes may attend to are not read, and those at the border are masked.
A soft cap c gives scores ``c tanh(scale q k / c)``; a sink is the score that the first part begins with.

Bytes: ``2 Hkv (prefix + M) D`` elements of the store per request, ``2 N Hq D`` of queries and results; with S
parts ``8 S N Hq D`` bytes for partial results, most of which stay in the L2 cache.

After FlashAttention-2 (arXiv 2307.08691) and flash decoding (Dao et al. 2023); ancestors' masks are those of
SpecInfer (arXiv 2305.09781).

Legend: B requests, N query nodes, M window keys, Hq / Hkv heads, G = Hq / Hkv, D head size, R rows of the
store, C a bound on columns, S parts. In kernels: ``m`` query rows of a tile, ``n`` keys of a block, ``d``
elements of a key, ``e`` elements of a value as they are loaded (pairs of fp8 values are one, PAIR = 2).
"""

import torch
import triton
import triton.language as tl

from eagle_kit.ops.attention.online_softmax import (
    LOG2_E,
    first_seen,
    load_rows,
    page_rows,
    score_factors,
    tanh,
    update,
    update_by_blocks,
)
from eagle_kit.ops.attention.variant import AttentionVariant, Limits
from eagle_kit.ops.attention.window.bits import count_up_to, has_key, load_words
from eagle_kit.ops.attention.window.merge import merge, merge_rows, share
from eagle_kit.ops.attention.window.plan import WindowPlan
from eagle_kit.ops.attention.window.sizes import (
    MIN_KEYS,
    Parts,
    are_merged,
    block_d,
    choose_blocks,
    choose_parts,
    few_enough,
    merged_rows,
    values_per_element,
)
from eagle_kit.ops.capability import device_facts
from eagle_kit.ops.custom_operator import custom_operator
from eagle_kit.ops.dependent_launch import launch_options, wait_for_launch


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "bits_stride_b",
        "bits_stride_n",
        "scratch_start",
        "scratch_stride",
        "num_keys",
        "usual_splits",
        "longest_part",
    ]
)
def _window(
    q, k_rows, v_rows, page_table, prefix_lens, ancestors, sinks, out, partial, lse, arrivals,
    factor, cap, v_scale, num_rows, store_rows, table_stride, bits_stride_b, bits_stride_n,
    scratch_start, scratch_stride, num_keys, usual_splits, longest_part,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAIR: tl.constexpr, PAGE: tl.constexpr,
    FIRST: tl.constexpr, SPLIT: tl.constexpr, MIN_BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, MERGED: tl.constexpr, BLOCK_S: tl.constexpr,
    WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of query rows of one key head to one part of the columns of one request. Grid
    ``(tiles * Hkv, S, B)``.

    With SPLIT, ``partial`` takes partial results ``[B, Hkv, S, N * G, D]`` and ``lse [B, Hkv, S, N * G]``
    their base-2 log-sum-exp. With MERGED, the last program of a tile by its counter in ``arrivals`` merges
    them, so many rows at a time.
    """
    wait_for_launch(PDL)
    tile = tl.program_id(0) // HKV
    head = tl.program_id(0) % HKV
    part = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)

    # Blocks of this part, begin .. end - 1.
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    first_block, num_blocks, part_blocks = share(
        prefix, num_keys, tl.num_programs(1), usual_splits, longest_part, WINDOW, CHUNK, BLOCK_N, MIN_BLOCKS
    )
    begin = first_block + part * part_blocks
    if begin >= num_blocks:
        return
    end = tl.minimum(begin + part_blocks, num_blocks)

    # Every node attends to all keys of the blocks gap .. resume - 1, which lie in the prefix: they need no
    # mask. The blocks before them are cut by limits, those behind by the end of the prefix.
    lowest = tl.maximum(FIRST, first_seen(prefix, WINDOW, CHUNK))
    highest = tl.maximum(FIRST, first_seen(prefix + num_keys - 1, WINDOW, CHUNK))
    gap = tl.minimum(tl.maximum(begin, tl.cdiv(highest, BLOCK_N)), end)
    resume = tl.maximum(gap, tl.minimum(prefix // BLOCK_N, end))

    # Load the queries and the ancestor bits of their nodes.
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_D // PAIR)
    is_row = m < num_rows
    in_head = (d < D)[None, :]
    node = m // G
    first_query = request * (num_rows * HKV * D)
    q_at = (node * (HKV * G) + head * G + m % G)[:, None] * D + d[None, :]
    queries = tl.load(q + first_query + q_at, is_row[:, None] & in_head, 0.0)
    first_word = ancestors + request * bits_stride_b + node * bits_stride_n
    words = load_words(first_word, is_row, 1, WORDS)

    # Where this request's pages and this head's keys and values are.
    table = page_table + request * table_stride
    head_row = head.to(tl.int64) * store_rows
    k = k_rows + head_row * D
    v = v_rows + head_row * (D // PAIR)

    # An empty softmax; the first part has the sinks in it.
    acc = tl.zeros([BLOCK_M, BLOCK_D // PAIR], tl.float32)
    acc_odd = tl.zeros([BLOCK_M, BLOCK_D // PAIR], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head * G + m % G).to(tl.float32) * LOG2_E
        row_max = tl.where(part == 0, sink, row_max)
        row_sum = tl.where(part == 0, 1.0, row_sum)

    # Blocks without a mask.
    acc, acc_odd, row_max, row_sum = update_by_blocks(
        acc, acc_odd, row_max, row_sum, queries, k, v, table, gap, resume, factor, cap,
        D, PAIR, PAGE, BLOCK_N, BLOCK_D, CAPPED,
    )  # fmt: skip

    # Positions of the nodes: behind the prefix by the number of their ancestors.
    if WINDOW > 0 or CHUNK > 0:
        last_of_prefix = prefix - 1
        own_key = (num_keys - num_rows // G + node).to(tl.int64)
        # A column: Triton 3.7 does not compile chunks of positions that it needs in two layouts.
        position = last_of_prefix + count_up_to(words, own_key[:, None], WORDS)
        first_of = first_seen(position, WINDOW, CHUNK)

    # The other blocks, masked.
    scratch = request * scratch_stride + scratch_start
    for step in tl.range(begin, end - (resume - gap), num_stages=1):
        # Load the keys and values of the block: from pages in the prefix, from the scratch behind it.
        column = tl.where(step < gap, step, step + (resume - gap)) * BLOCK_N + n
        in_prefix = (column < prefix) & (column >= lowest)
        key = column - prefix
        in_window = (key >= 0) & (key < num_keys)
        row = tl.where(in_prefix, page_rows(table, column, in_prefix, PAGE), scratch + key)[:, None]
        present = (in_prefix | in_window)[:, None]
        keys, values = load_rows(k, v, row, present, d, e, D, PAIR)

        # Mask: all of the prefix, and a node's ancestors in the window, within the limits.
        window_key = tl.where(in_window, key, 0).to(tl.int64)[None, :]
        seen = in_prefix[None, :] | (in_window[None, :] & has_key(words, window_key, WORDS))
        if WINDOW > 0 or CHUNK > 0:
            key_position = last_of_prefix + count_up_to(words, window_key, WORDS)
            key_position = tl.where(in_prefix[None, :], column[None, :], key_position)
            seen = seen & (key_position >= first_of)

        # Scores, and the softmax with them.
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
        if CAPPED:
            scores = tanh(scores * cap)
        scores = tl.where(seen, scores, float("-inf"))
        acc, acc_odd, row_max, row_sum = update(
            acc, acc_odd, row_max, row_sum, scores, values, factor, queries.dtype, True
        )

    if PAIR == 2:
        acc = tl.reshape(tl.join(acc, acc_odd), [BLOCK_M, BLOCK_D])
    row_sum = tl.where(row_sum > 0.0, row_sum, 1.0)  # a row without a key gets zeros
    parts = tl.cdiv(num_blocks - first_block, part_blocks)
    if SPLIT and (MERGED == 0 or parts > 1):
        # Store this part's result.
        first_part = (request * HKV + head) * tl.num_programs(1) * num_rows
        part_at = first_part + part * num_rows
        partial_at = partial + part_at * D + m[:, None] * D + d[None, :]
        tl.store(partial_at, acc / row_sum[:, None], is_row[:, None] & in_head)
        tl.store(lse + part_at + m, row_max + tl.log2(row_sum), is_row)

        # The program that arrives last merges all parts of the tile.
        if MERGED > 0:
            counter = arrivals + (request * tl.num_programs(0) + tl.program_id(0))
            tl.debug_barrier()  # this program's part is written before it is counted
            if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
                tl.store(counter, 0)
                for begin_row in range(
                    tile * BLOCK_M, tl.minimum(tile * BLOCK_M + BLOCK_M, num_rows), MERGED
                ):
                    r = begin_row + tl.arange(0, MERGED)
                    merged, total = merge_rows(
                        partial, lse, first_part, r, r < num_rows, parts, num_rows, D, BLOCK_S, BLOCK_D
                    )  # fmt: skip
                    result = (merged * (v_scale / total)[:, None]).to(out.dtype.element_ty)
                    out_at = ((r // G) * (HKV * G) + head * G + r % G)[:, None] * D + d[None, :]
                    tl.store(out + first_query + out_at, result, (r < num_rows)[:, None] & in_head)
    else:
        # The only part: store the result.
        result = (acc * (v_scale / row_sum)[:, None]).to(out.dtype.element_ty)
        tl.store(out + first_query + q_at, result, is_row[:, None] & in_head)


@custom_operator("eagle_kit::window_attention", mutates_args=("arrivals",))
def window_attention_op(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    prefix_lens: torch.Tensor,
    first_position: int,
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
    arrivals: torch.Tensor | None,  # no default: torch 2.11 drops it, then misses the mutated argument
    splits: int | None = None,
) -> torch.Tensor:
    """Window attention of ``q [B, N, Hq, D]`` and a store, both contiguous; ``splits`` overrides
    :func:`choose_parts`. Without ``arrivals``, parts are merged by a second launch."""
    b, nodes, hq, d = q.shape
    hkv, store_rows, _ = k_rows.shape
    out = torch.empty_like(q)
    if q.numel() == 0:
        return out

    # Tiles, and the parts of a request.
    rows = nodes * (hq // hkv)
    facts = device_facts(q.device)
    blocks = choose_blocks(rows, d, q.element_size(), k_rows.element_size(), facts)
    tiles = triton.cdiv(rows, blocks.m)
    numbers = min(rows, blocks.m) * d
    has_counters = arrivals is not None and b * hkv * tiles <= arrivals.numel()
    if splits is not None:
        parts = Parts.even(splits)
    else:
        span = Limits(*limits).span(num_keys + blocks.n)
        columns = min(num_columns, span or num_columns)
        parts = choose_parts(b, hkv, columns, rows, blocks, facts.multiprocessors)
        if has_counters:
            parts = few_enough(parts, b * hkv * tiles, columns, numbers, facts.multiprocessors)

    # Partial results, and who merges them.
    is_split = parts.most > 1
    partial = out
    lse = out
    if is_split:
        partial = q.new_empty(b, hkv, parts.most, rows, d, dtype=torch.float32)
        lse = q.new_empty(b, hkv, parts.most, rows, dtype=torch.float32)
    merged, parts_at_a_time = merged_rows(rows, d, blocks)
    if not (is_split and has_counters and are_merged(parts, numbers)):
        merged = 0

    factor, cap = score_factors(scale, soft_cap)
    pair = values_per_element(blocks, q.element_size(), k_rows.element_size())
    shape = {
        "G": hq // hkv,
        "HKV": hkv,
        "D": d,
        "MIN_BLOCKS": MIN_KEYS // blocks.n,
        "BLOCK_N": blocks.n,
        "BLOCK_D": block_d(d),
        "WINDOW": limits[0],
        "CHUNK": limits[1],
        **launch_options(q.device),
    }
    _window[(tiles * hkv, parts.most, b)](
        q,
        k_rows,
        v_rows.view(torch.int16) if pair == 2 else v_rows,
        page_table,
        prefix_lens,
        ancestors,
        q if sinks is None else sinks,
        out,
        partial,
        lse,
        prefix_lens if arrivals is None else arrivals,
        factor,
        cap,
        v_scale,
        rows,
        store_rows,
        page_table.stride(0),
        ancestors.stride(0),
        ancestors.stride(1),
        scratch_start,
        scratch_stride,
        num_keys,
        parts.usual,
        parts.longest,
        **shape,
        PAIR=pair,
        PAGE=page_size,
        FIRST=first_position,
        SPLIT=is_split,
        BLOCK_M=blocks.m,
        CAPPED=soft_cap is not None,
        SINKS=sinks is not None,
        MERGED=merged,
        BLOCK_S=parts_at_a_time,
        WORDS=ancestors.shape[2],
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        maxnreg=blocks.max_registers,
    )
    if is_split and not merged:
        merge[(rows, hkv, b)](
            partial,
            lse,
            prefix_lens,
            out,
            v_scale,
            rows,
            num_keys,
            parts.most,
            parts.usual,
            parts.longest,
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
        plan.first_position,
        plan.scratch_start,
        plan.scratch_stride,
        plan.num_keys,
        plan.words,
        plan.num_columns,
        variant.scale * k_scale,
        v_scale,
        list(variant.limits),
        variant.soft_cap,
        variant.sinks,
        plan.arrivals,
    )
