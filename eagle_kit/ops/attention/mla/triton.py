"""Absorbed latent attention of a window in Triton: flash decoding with split keys.

A request's N x H query rows share every key. A program takes a block of these rows and one of S runs of
keys. For scores s = scale log2(e) q . k it keeps m = max s, l = sum exp2(s - m) and acc = sum exp2(s - m) v.
Each row of the store is loaded once and is both key and value. With one run, acc / l is the answer; otherwise
acc / l and m + log2(l) are stored, and the runs are added up in their order with weights exp2(m + log2(l)):
by the program of a block of query rows that arrives last by a counter, which it sets back to 0, where that is
not too much for one program, and otherwise by a second launch with a program for each row
(:func:`are_merged`).

Keys are counted in columns: the prefix from ``first_position`` on, and the window's keys right behind it,
which lie in a scratch or IN_PAGES too. Only tiles that reach beyond the prefix are masked by ancestor bits.
A row without any key gets zeros.

There are two variants of the same products. Plain: ``S = Q K^T`` and ``O = P V``. Swapped: ``S^T = K Q^T``
and ``O^T = V^T P^T``, so that the 64 keys, then the latent, are the M side of the dots, and 16 query rows
fill Hopper's matrix instructions as well as 64 do.

Bytes: 2 D per key and block of query rows (blocks of one run are neighbours and find it in L2), 2 (D + L) per
query row, and 8 (L + 1) per query row and run where S > 1. FLOPs: 2 (D + L) per key and query row, so that an
H200 is bound by bytes up to about 97 query rows. Sources: FlashDecoding and DeepSeek-V2 (arXiv 2405.04434).

Legend: B requests, N query nodes, H heads, L latent size, D latent + RoPE size, R rows of the store, S runs.
In kernels: ``d`` elements of a piece of the latent, ``r`` elements of the RoPE part.
"""

import torch
import triton
import triton.language as tl

from eagle_kit.ops.attention.mla.plan import PagedWindowPlan
from eagle_kit.ops.attention.mla.sizes import MAX_SPLITS, choose_blocks, choose_parts
from eagle_kit.ops.attention.online_softmax import LOG2_E
from eagle_kit.ops.attention.window.bits import has_key, load_words
from eagle_kit.ops.attention.window.plan import WindowPlan
from eagle_kit.ops.attention.window.sizes import are_merged, few_enough
from eagle_kit.ops.capability import device_facts
from eagle_kit.ops.custom_operator import custom_operator
from eagle_kit.ops.dependent_launch import launch_options, wait_for_launch

PIECES = tl.constexpr(4)
"""Number of pieces that a latent is loaded in, 256 bytes of a row at a time, so that a thread addresses few
rows."""


@triton.jit
def _run(
    prefix_lens, kv_lens, request, num_keys, first_position, splits, usual_splits, longest_part,
    IN_PAGES: tl.constexpr,
):  # fmt: skip
    """Number of prefix columns, first column, columns per run, and the column behind the last. A run is one
    of ``usual_splits``, at most ``longest_part`` columns, but there are no more than ``splits``."""
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    end = prefix + num_keys
    if IN_PAGES:
        end = tl.load(kv_lens + request).to(tl.int32)
    first = tl.minimum(prefix, first_position)
    columns = tl.minimum(tl.cdiv(end - first, usual_splits), longest_part)
    columns = tl.maximum(columns, tl.cdiv(end - first, splits))
    return prefix, first, tl.cdiv(columns, 64) * 64, end


@triton.jit
def _load_keys(
    rows, pages, start, end, paged, scratch, row_stride,
    kind: tl.constexpr, PAGE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Load columns ``start .. start + KEYS - 1`` as RoPE part and pieces of the latent; the first ``paged``
    columns lie in pages. The last column is repeated beyond the end."""
    # The row of the store of each column.
    PIECE: tl.constexpr = LATENT // PIECES
    column = tl.minimum(start + tl.arange(0, KEYS), end - 1)
    in_pages = column < paged
    row = tl.load(pages + column // PAGE, in_pages, 0).to(tl.int32) * PAGE + column % PAGE
    row = tl.where(in_pages, row, scratch + column)

    # Its parts.
    key = rows + row.to(tl.int64)[:, None] * row_stride
    rope = tl.load(key + LATENT + tl.arange(0, ROPE)[None, :]).to(kind)
    latents = ()
    for piece in tl.static_range(PIECES):
        latent = tl.load(key + piece * PIECE + tl.arange(0, PIECE)[None, :]).to(kind)
        latents = latents + (latent,)  # type: ignore[assignment]
    return rope, latents


@triton.jit
def _sum_of_runs(
    partial, lse, first, num_runs, LATENT: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add up ``num_runs`` runs of a query row, from ``first`` on, weighted by their sums of exponentials.
    They are read past the first-level cache, since other programs of the launch may have written them."""
    # The largest log-sum-exp, and the sum of all weights relative to it.
    i = tl.arange(0, MAX_SPLITS)
    d = tl.arange(0, LATENT)
    run_lse = tl.load(lse + first + i, i < num_runs, float("-inf"), cache_modifier=".cg")
    top = tl.max(run_lse, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(run_lse - base), 0)

    # The weighted sum, some runs at a time.
    acc = tl.zeros((LATENT,), tl.float32)
    for start in range(0, num_runs, BLOCK):
        run = start + tl.arange(0, BLOCK)
        weight = tl.load(lse + first + run, run < num_runs, float("-inf"), cache_modifier=".cg")
        partial_at = partial + (first + run)[:, None] * LATENT + d[None, :]
        part = tl.load(partial_at, (run < num_runs)[:, None], 0.0, cache_modifier=".cg")
        acc += tl.sum(tl.exp2(weight - base)[:, None] * part, 0)
    return acc / tl.where(total > 0.0, total, 1.0)


@triton.jit
def _store_latents(target, accs, factor, mask, PIECE: tl.constexpr):
    """Store the pieces ``accs``, times ``factor``, side by side from ``target`` on."""
    for piece in tl.static_range(PIECES):
        tl.store(target + piece * PIECE, (accs[piece] * factor).to(target.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_rows", "num_nodes", "num_keys", "splits", "usual_splits", "longest_part"])
def _attend(
    q, rows, page_table, prefix_lens, kv_lens, ancestors, out, partial, lse, arrivals, scale, out_scale,
    num_rows, heads, num_nodes, num_keys, first_position, scratch_start, scratch_stride, row_stride,
    table_stride, splits, usual_splits, longest_part,
    PAGE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SWAPPED: tl.constexpr, SPLIT: tl.constexpr, IN_PAGES: tl.constexpr, PRECISION: tl.constexpr,
    MERGED: tl.constexpr, MAX_SPLITS: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of a block of query rows to one run of keys. Grid ``(blocks, S, B)``.

    AXIS is the axis of keys in the scores, OTHER that of query rows. With SPLIT, ``partial [B, N * H, S, L]``
    and ``lse [B, N * H, S]`` take the runs; with MERGED, the last program of a block by its counter in
    ``arrivals`` adds them up.

    fp8 keys are loaded and widened a tile ahead: the compiler keeps loop-carried values in shared memory as
    it does 16-bit keys, and would otherwise move single bytes.
    """
    wait_for_launch(PDL)
    AHEAD: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth == 8
    AXIS: tl.constexpr = 0 if SWAPPED else 1
    OTHER: tl.constexpr = 1 - AXIS
    PIECE: tl.constexpr = LATENT // PIECES
    kind: tl.constexpr = q.dtype.element_ty

    # Columns of this run, begin .. end - 1.
    block = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    prefix, first, columns, end = _run(
        prefix_lens, kv_lens, request, num_keys, first_position, splits, usual_splits, longest_part, IN_PAGES
    )
    begin = first + split * columns
    if begin >= end:
        return
    paged = end if IN_PAGES else prefix
    end = tl.minimum(begin + columns, end)

    # Load the queries, RoPE part and pieces of the latent. An empty softmax.
    row = block * QUERIES + tl.arange(0, QUERIES)
    is_row = row < num_rows
    row_at = request * num_rows + row
    d = tl.arange(0, PIECE)
    r = tl.arange(0, ROPE)
    q_at = q + row_at[:, None] * (LATENT + ROPE)
    rope_queries = tl.load(q_at + LATENT + r[None, :], is_row[:, None], 0.0)
    queries = ()
    accs = ()
    for piece in tl.static_range(PIECES):
        part = tl.load(q_at + piece * PIECE + d[None, :], is_row[:, None], 0.0)
        zeros = tl.zeros((PIECE, QUERIES) if SWAPPED else (QUERIES, PIECE), tl.float32)
        queries = queries + (part,)  # type: ignore[assignment]
        accs = accs + (zeros,)  # type: ignore[assignment]

    # Ancestor bits of the nodes, this request's pages, and its scratch by column.
    first_word = ancestors + (request * num_nodes + row // heads) * WORDS
    if WORDS == 1:
        words = load_words(first_word, is_row, AXIS, WORDS)
    pages = page_table + request * table_stride
    scratch = (scratch_start + request * scratch_stride - prefix).to(tl.int32)
    row_max = tl.full((QUERIES,), float("-inf"), tl.float32)
    row_sum = tl.zeros((QUERIES,), tl.float32)
    if AHEAD:
        rope, latents = _load_keys(
            rows, pages, begin, end, paged, scratch, row_stride, kind, PAGE, LATENT, ROPE, KEYS
        )
    for start in tl.range(begin, end, KEYS):
        # Load this tile of keys, or the next one.
        load_at = start
        if AHEAD:
            load_at += KEYS
        new_rope, new_latents = _load_keys(
            rows, pages, load_at, end, paged, scratch, row_stride, kind, PAGE, LATENT, ROPE, KEYS
        )
        if not AHEAD:
            rope = new_rope
            latents = new_latents

        # Scores.
        if SWAPPED:
            scores = tl.dot(rope, tl.trans(rope_queries), input_precision=PRECISION)
        else:
            scores = tl.dot(rope_queries, tl.trans(rope), input_precision=PRECISION)
        for piece in tl.static_range(PIECES):
            if SWAPPED:
                scores = tl.dot(latents[piece], tl.trans(queries[piece]), scores, input_precision=PRECISION)
            else:
                scores = tl.dot(queries[piece], tl.trans(latents[piece]), scores, input_precision=PRECISION)
        scores *= scale

        # Mask, where the tile reaches beyond the prefix: the window's keys that are ancestors.
        if start + KEYS > prefix:
            column = start + tl.arange(0, KEYS)
            key = tl.minimum(tl.maximum(column - prefix, 0), 64 * WORDS - 1).to(tl.int64)
            if WORDS > 1:  # several words are no registers of the loop
                words = load_words(first_word, is_row, AXIS, WORDS)
            seen = has_key(words, tl.expand_dims(key, OTHER), WORDS)
            seen = tl.expand_dims(column < prefix, OTHER) | (seen & tl.expand_dims(column < end, OTHER))
            scores = tl.where(seen, scores, float("-inf"))

        # Weights, and the sums so far relative to the new maximum.
        new_max = tl.maximum(row_max, tl.max(scores, AXIS))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores - tl.expand_dims(base, AXIS))
        rescale = tl.exp2(row_max - base)
        row_sum = row_sum * rescale + tl.sum(p, AXIS)
        row_max = new_max

        # Values: the latents, piece by piece.
        p = p.to(kind)
        new_accs = ()
        for piece in tl.static_range(PIECES):
            acc = accs[piece] * tl.expand_dims(rescale, AXIS)
            if SWAPPED:
                acc = tl.dot(tl.trans(latents[piece]), p, acc, input_precision=PRECISION)
            else:
                acc = tl.dot(p, latents[piece], acc, input_precision=PRECISION)
            new_accs = new_accs + (acc,)  # type: ignore[assignment]
        accs = new_accs
        if AHEAD:
            rope = new_rope
            latents = new_latents

    # Number of runs that have keys: some programs had none.
    _, first, columns, last = _run(
        prefix_lens, kv_lens, request, num_keys, first_position, splits, usual_splits, longest_part, IN_PAGES
    )
    num_runs = tl.cdiv(last - first, columns)
    factor = tl.expand_dims(out_scale / tl.where(row_sum > 0.0, row_sum, 1.0), AXIS)
    mask = tl.expand_dims(is_row, AXIS)
    d_at = tl.expand_dims(d, OTHER)
    if SPLIT and (MERGED == 0 or num_runs > 1):
        # Store this run's result.
        run_at = row_at * splits + split
        tl.store(lse + run_at, row_max + tl.log2(row_sum), is_row)
        _store_latents(partial + tl.expand_dims(run_at, AXIS) * LATENT + d_at, accs, factor, mask, PIECE)

        # The program that arrives last adds up the runs of every row of the block.
        if MERGED:
            counter = arrivals + request * tl.num_programs(0) + block
            tl.debug_barrier()  # this program's run is written before it is counted
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_runs - 1:
                tl.store(counter, 0)
                for merged_row in range(block * QUERIES, tl.minimum(block * QUERIES + QUERIES, num_rows)):
                    merged_at = request * num_rows + merged_row
                    merged = _sum_of_runs(partial, lse, merged_at * splits, num_runs, LATENT, MAX_SPLITS, 8)
                    merged_to = out + merged_at * LATENT + tl.arange(0, LATENT)
                    tl.store(merged_to, merged.to(out.dtype.element_ty))
    else:
        # The only run: store the result.
        _store_latents(out + tl.expand_dims(row_at, AXIS) * LATENT + d_at, accs, factor, mask, PIECE)


@triton.jit(do_not_specialize=["num_rows", "num_keys", "splits", "usual_splits", "longest_part"])
def _merge(
    partial, lse, prefix_lens, kv_lens, out, num_rows, num_keys, first_position, splits, usual_splits,
    longest_part,
    LATENT: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr, IN_PAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merge the runs of one query row. Grid ``(N * H, B)``."""
    wait_for_launch(PDL)
    request = tl.program_id(1).to(tl.int64)
    _, first, columns, end = _run(
        prefix_lens, kv_lens, request, num_keys, first_position, splits, usual_splits, longest_part, IN_PAGES
    )
    num_runs = tl.cdiv(end - first, columns)
    row = request * num_rows + tl.program_id(0)
    acc = _sum_of_runs(partial, lse, row * splits, num_runs, LATENT, MAX_SPLITS, BLOCK)
    tl.store(out + row * LATENT + tl.arange(0, LATENT), acc.to(out.dtype.element_ty))


@custom_operator("eagle_kit::mla_window_attention", mutates_args=("arrivals",))
def mla_window_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    kv_lens: torch.Tensor | None,
    ancestors: torch.Tensor,
    page_size: int,
    first_position: int,
    scratch_start: int,
    scratch_stride: int,
    num_keys: int,
    num_columns: int,
    scale: float,
    kv_scale: float,
    latent_dim: int,
    arrivals: torch.Tensor | None,  # no default: torch 2.11 drops it, then misses the mutated argument
) -> torch.Tensor:
    """:func:`attend` with the fields of its plan, all contiguous except ``rows``, whose rows are. ``kv_lens``
    is given where the window's keys lie in pages. Without ``arrivals`` a second launch adds up the runs."""
    b, n, h, dim = q.shape
    out = q.new_empty(b, n, h, latent_dim)
    if out.numel() == 0:
        return out

    # Blocks of query rows, the number of runs, and who adds them up.
    facts = device_facts(q.device)
    blocks = choose_blocks(n * h, rows.element_size(), facts)
    programs = triton.cdiv(n * h, blocks.queries)
    parts = choose_parts(b * programs, num_columns, facts.multiprocessors)
    numbers = min(n * h, blocks.queries) * latent_dim
    has_counters = arrivals is not None and b * programs <= arrivals.numel()
    if has_counters:
        parts = few_enough(parts, b * programs, num_columns, numbers, facts.multiprocessors)
    splits = parts.most
    merged = has_counters and splits > 1 and are_merged(parts, numbers)

    parts_of_grid = (parts.most, parts.usual, parts.longest)
    early = launch_options(q.device)
    in_pages = kv_lens is not None
    lens = (prefix_lens, kv_lens if in_pages else prefix_lens)
    partial = out
    lse = out
    if splits > 1:
        partial = q.new_empty(b, n * h, splits, latent_dim, dtype=torch.float32)
        lse = q.new_empty(b, n * h, splits, dtype=torch.float32)
    _attend[(programs, splits, b)](
        q,
        rows,
        page_table,
        *lens,
        ancestors,
        out,
        partial,
        lse,
        prefix_lens if arrivals is None else arrivals,
        scale * kv_scale * LOG2_E.value,
        kv_scale,
        n * h,
        h,
        n,
        num_keys,
        first_position,
        scratch_start,
        scratch_stride,
        rows.stride(0),
        page_table.stride(0),
        *parts_of_grid,
        PAGE=page_size,
        LATENT=latent_dim,
        ROPE=dim - latent_dim,
        QUERIES=blocks.queries,
        KEYS=blocks.keys,
        SWAPPED=blocks.swapped,
        SPLIT=splits > 1,
        IN_PAGES=in_pages,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "ieee",
        MERGED=merged,
        MAX_SPLITS=MAX_SPLITS,
        WORDS=ancestors.shape[2],
        **early,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )
    if splits > 1 and not merged:
        _merge[(n * h, b)](
            partial,
            lse,
            *lens,
            out,
            n * h,
            num_keys,
            first_position,
            *parts_of_grid,
            LATENT=latent_dim,
            MAX_SPLITS=MAX_SPLITS,
            BLOCK=8,
            IN_PAGES=in_pages,
            **early,
            num_warps=4,
        )
    return out


@mla_window_attention.register_fake
def _(q, rows, *plan):
    return q.new_empty(*q.shape[:3], plan[12])


def attend(
    q: torch.Tensor, rows: torch.Tensor, plan: WindowPlan, scale: float, kv_scale: float, latent_dim: int
) -> torch.Tensor:
    """Absorbed attention of ``q [B, N, H, D]`` to ``rows [R, D]`` of the same dtype or fp8 -> ``[B, N, H,
    L]``."""
    assert rows.dtype == q.dtype or rows.element_size() == 1
    return mla_window_attention(
        q.contiguous(),
        rows if rows.stride(1) == 1 else rows.contiguous(),
        plan.page_table.contiguous(),
        plan.prefix_lens.contiguous(),
        plan.kv_lens.contiguous() if isinstance(plan, PagedWindowPlan) else None,
        plan.words.contiguous(),
        plan.page_size,
        plan.first_position,
        plan.scratch_start,
        plan.scratch_stride,
        plan.num_keys,
        plan.num_columns,
        scale,
        kv_scale,
        latent_dim,
        plan.arrivals,
    )
