"""Flash attention of prompt chunks over pages: one launch for the chunks of all requests.

Row j of a chunk is position ``p = start + j``. With ``c = scale k_scale log2(e)``, running values over blocks
of keys k and values v at slots ``first_slot .. p`` are

    S = c q k^T,    m' = max(m, max S),    P = exp2(S - m'),    l' = l exp2(m - m') + sum P,
    o' = o exp2(m - m') + P v;    out = v_scale o / l.

The G query heads that share a key head are rows of one tile: 128 rows are 128 / G positions. So a block of
keys is read once for all of them, and little of a tile lies across the diagonal. Blocks before the first
position of a tile are not masked. The last tiles, which have most keys, run first; tiles past the end of a
chunk return at once: the grid depends on the host's upper bound on rows.

Bytes: ``2 T Hq D`` elements of queries and results, ``2 Hkv (start + rows) D`` of the store per request and
tile, out of the L2 cache except for the first tile. FLOPs: ``4 Hq D`` per visible pair of query and key.

After FlashAttention-2 (arXiv 2307.08691) and paged attention (arXiv 2309.06180).

Legend: B requests, T tokens, Hq / Hkv heads, G = Hq / Hkv, D head size, R rows of the store.
"""

import torch
import triton
import triton.language as tl

from eagle_kit.ops.attention.prefill.plan import PrefillPlan
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.attention.window.triton import (
    block_d,
    choose_blocks,
    first_seen,
    fold,
    fold_blocks,
    score_factors,
    tanh,
    values_per_element,
)
from eagle_kit.ops.capability import device_facts


@triton.jit(do_not_specialize=["store_rows", "table_stride"])
def _prefill(
    q, k_rows, v_rows, page_tables, cu_rows, starts, sinks, out, factor, cap, v_scale, store_rows,
    table_stride,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAIR: tl.constexpr, PAGE: tl.constexpr,
    FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of query rows of one request and key head."""
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    begin = tl.load(cu_rows + request).to(tl.int64)
    num_rows = (tl.load(cu_rows + request + 1) - begin).to(tl.int32) * G
    tile = tl.cdiv(num_rows, BLOCK_M) - 1 - tl.program_id(0)
    if tile < 0:
        return
    r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_D // PAIR)
    live = r < num_rows
    inside = (d < D)[None, :]
    start = tl.load(starts + request).to(tl.int32)
    token = tile * BLOCK_M // G
    lowest = start + token
    position = start + tl.minimum(r, num_rows - 1) // G
    highest = start + tl.minimum(tile * BLOCK_M + BLOCK_M - 1, num_rows - 1) // G

    first = (begin + token) * (HKV * G * D)
    mine = ((r // G - token) * (HKV * G) + head * G + r % G)[:, None] * D + d[None, :]
    queries = tl.load(q + first + mine, live[:, None] & inside, 0.0)
    table = page_tables + request * table_stride
    plane = head.to(tl.int64) * store_rows
    k = k_rows + plane * D
    v = v_rows + plane * (D // PAIR)
    acc = tl.zeros([BLOCK_M, BLOCK_D // PAIR], tl.float32)
    odd = tl.zeros([BLOCK_M, BLOCK_D // PAIR], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        top = tl.load(sinks + head * G + r % G).to(tl.float32) * 1.4426950408889634
        total += 1.0
    # every row attends to all blocks from gap to resume
    count = highest // BLOCK_N + 1
    skipped = first_seen(lowest, WINDOW, CHUNK) // BLOCK_N
    gap = tl.minimum(tl.cdiv(tl.maximum(FIRST, first_seen(highest, WINDOW, CHUNK)), BLOCK_N), count)
    resume = tl.maximum(gap, (lowest + 1) // BLOCK_N)
    acc, odd, top, total = fold_blocks(
        acc, odd, top, total, queries, k, v, table, gap, resume, factor, cap,
        D, PAIR, PAGE, BLOCK_N, BLOCK_D, CAPPED,
    )  # fmt: skip
    first_of = first_seen(position, WINDOW, CHUNK)
    for step in tl.range(skipped, count - (resume - gap), num_stages=1):
        column = tl.where(step < gap, step, step + (resume - gap)) * BLOCK_N + n
        held = (column <= highest) & (column >= tl.minimum(FIRST, start))
        page = tl.load(table + column // PAGE, held, 0)
        row = (page * PAGE + column % PAGE).to(tl.int64)[:, None]
        keys = tl.load(k + (row * D + d[None, :]), held[:, None] & inside, 0.0)
        there = held[:, None] & (e < D // PAIR)[None, :]
        values = tl.load(v + (row * (D // PAIR) + e[None, :]), there, 0.0)
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
        column = column[None, :]
        seen = (column <= position[:, None]) & ((column >= FIRST) | (column == position[:, None]))
        if WINDOW > 0 or CHUNK > 0:
            seen = seen & (column >= first_of[:, None])
        if CAPPED:
            scores = tanh(scores * cap)
        scores = tl.where(seen, scores, float("-inf"))
        acc, odd, top, total = fold(acc, odd, top, total, scores, values, factor, queries.dtype, True)

    if PAIR == 2:
        acc = tl.reshape(tl.join(acc, odd), [BLOCK_M, BLOCK_D])
    result = (acc * (v_scale / total)[:, None]).to(out.dtype.element_ty)
    tl.store(out + first + mine, result, live[:, None] & inside)


@torch.library.custom_op("eagle_kit::paged_prefill_attention", mutates_args=())
def paged_prefill_attention_op(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    page_tables: torch.Tensor,
    page_size: int,
    cu_rows: torch.Tensor,
    starts: torch.Tensor,
    first_slot: int,
    max_rows: int,
    scale: float,
    v_scale: float,
    limits: list[int],
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Prefill attention of ``q [T, Hq, D]``; the store, ``cu_rows`` and ``starts`` are contiguous."""
    _, hq, d = q.shape
    hkv, store_rows, _ = k_rows.shape
    out = torch.empty_like(q)
    rows = max_rows * (hq // hkv)
    if q.numel() == 0 or rows == 0:
        return out
    widths = q.element_size(), k_rows.element_size()
    blocks = choose_blocks(rows, d, *widths, device_facts(q.device))
    pair = values_per_element(blocks, *widths)
    _prefill[(triton.cdiv(rows, blocks.m), hkv, starts.shape[0])](
        *(q, k_rows, v_rows.view(torch.int16) if pair == 2 else v_rows, page_tables, cu_rows, starts),
        *(q if sinks is None else sinks, out),
        *(*score_factors(scale, soft_cap), v_scale, store_rows, page_tables.stride(0)),
        G=hq // hkv,
        HKV=hkv,
        D=d,
        PAIR=pair,
        PAGE=page_size,
        FIRST=first_slot,
        BLOCK_M=blocks.m,
        BLOCK_N=blocks.n,
        BLOCK_D=block_d(d),
        WINDOW=limits[0],
        CHUNK=limits[1],
        CAPPED=soft_cap is not None,
        SINKS=sinks is not None,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )
    return out


@paged_prefill_attention_op.register_fake
def _(q, *args):
    return torch.empty_like(q)


def paged_prefill_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    plan: PrefillPlan,
    variant: AttentionVariant,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """See the reference; scales are positive, the store is contiguous."""
    assert variant.scale * k_scale > 0 and k_rows.is_contiguous() and v_rows.is_contiguous()
    return paged_prefill_attention_op(
        q.contiguous(),
        k_rows,
        v_rows,
        plan.page_tables if plan.page_tables.stride(1) == 1 else plan.page_tables.contiguous(),
        plan.page_size,
        plan.cu_rows.contiguous(),
        plan.starts.contiguous(),
        plan.first_slot,
        plan.max_rows,
        variant.scale * k_scale,
        v_scale,
        [*variant.limits],
        variant.soft_cap,
        variant.sinks,
    )
