"""Flash attention of prompt chunks over pages: one launch for the chunks of all requests.

Row j of a chunk is position ``p = start + j``. With ``c = scale k_scale log2(e)``, running values over blocks
of keys k and values v at positions ``first_position .. p`` are

    S = c q k^T,    m' = max(m, max S),    P = exp2(S - m'),    l' = l exp2(m - m') + sum P,
    o' = o exp2(m - m') + P v;    out = v_scale o / l.

The G query heads that share a key head are rows of one tile: 128 rows are 128 / G positions. So a block of
keys is read once for all of them, and little of a tile lies across the diagonal. Blocks before the first
position of a tile are not masked. The last tiles, which have most keys, run first; tiles past the end of a
chunk return at once: the grid depends on the host's upper bound on rows. Rows of padding get zeros.

Bytes: ``2 T Hq D`` elements of queries and results, ``2 Hkv (start + rows) D`` of the store per request and
tile, out of the L2 cache except for the first tile. FLOPs: ``4 Hq D`` per visible pair of query and key.

After FlashAttention-2 (arXiv 2307.08691) and paged attention (arXiv 2309.06180).

Legend: B requests, T tokens, Hq / Hkv heads, G = Hq / Hkv, D head size, R rows of the store. In kernels:
``m`` query rows of a tile, ``n`` keys of a block, ``d`` elements of a key, ``e`` elements of a value as they
are loaded (pairs of fp8 values are one, PAIR = 2).
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
from eagle_kit.ops.attention.prefill.plan import PrefillPlan
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.attention.window.sizes import block_d, choose_blocks, values_per_element
from eagle_kit.ops.capability import device_facts
from eagle_kit.ops.custom_operator import custom_operator


@triton.jit(do_not_specialize=["store_rows", "table_stride"])
def _prefill(
    q, k_rows, v_rows, page_tables, cu_rows, starts, sinks, out, factor, cap, v_scale, store_rows,
    table_stride,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAIR: tl.constexpr, PAGE: tl.constexpr,
    FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of query rows of one request and key head. Grid ``(tiles, Hkv, B)``."""
    # The tile, counted from the last one.
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    begin = tl.load(cu_rows + request).to(tl.int64)
    num_rows = (tl.load(cu_rows + request + 1) - begin).to(tl.int32) * G
    tile = tl.cdiv(num_rows, BLOCK_M) - 1 - tl.program_id(0)
    if tile < 0:
        return

    # Positions of its rows; rows past the end have the position of the last one.
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_D // PAIR)
    is_row = m < num_rows
    in_head = (d < D)[None, :]
    start = tl.load(starts + request).to(tl.int32)
    token = tile * BLOCK_M // G
    lowest = start + token
    position = start + tl.minimum(m, num_rows - 1) // G
    highest = start + tl.minimum(tile * BLOCK_M + BLOCK_M - 1, num_rows - 1) // G

    # Load the queries; find this request's pages, and this head's keys and values.
    first_query = (begin + token) * (HKV * G * D)
    q_at = ((m // G - token) * (HKV * G) + head * G + m % G)[:, None] * D + d[None, :]
    if start < 0:
        # Padding attends to nothing. Its output is read by later layers, so it is finite.
        nothing = tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty)
        tl.store(out + first_query + q_at, nothing, is_row[:, None] & in_head)
        return
    queries = tl.load(q + first_query + q_at, is_row[:, None] & in_head, 0.0)
    table = page_tables + request * table_stride
    head_row = head.to(tl.int64) * store_rows
    k = k_rows + head_row * D
    v = v_rows + head_row * (D // PAIR)

    # An empty softmax, or one with the sinks in it.
    acc = tl.zeros([BLOCK_M, BLOCK_D // PAIR], tl.float32)
    acc_odd = tl.zeros([BLOCK_M, BLOCK_D // PAIR], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        row_max = tl.load(sinks + head * G + m % G).to(tl.float32) * LOG2_E
        row_sum += 1.0

    # Every row attends to all keys of the blocks gap .. resume - 1, which need no mask. The blocks before
    # them are cut by limits, those behind by the diagonal.
    num_blocks = highest // BLOCK_N + 1
    first_block = first_seen(lowest, WINDOW, CHUNK) // BLOCK_N
    gap = tl.minimum(tl.cdiv(tl.maximum(FIRST, first_seen(highest, WINDOW, CHUNK)), BLOCK_N), num_blocks)
    resume = tl.maximum(gap, (lowest + 1) // BLOCK_N)
    acc, acc_odd, row_max, row_sum = update_by_blocks(
        acc, acc_odd, row_max, row_sum, queries, k, v, table, gap, resume, factor, cap,
        D, PAIR, PAGE, BLOCK_N, BLOCK_D, CAPPED,
    )  # fmt: skip

    # The other blocks, masked.
    first_of = first_seen(position, WINDOW, CHUNK)
    for step in tl.range(first_block, num_blocks - (resume - gap), num_stages=1):
        # Load the keys and values of the block.
        column = tl.where(step < gap, step, step + (resume - gap)) * BLOCK_N + n
        present = (column <= highest) & (column >= tl.minimum(FIRST, start))
        row = page_rows(table, column, present, PAGE).to(tl.int64)[:, None]
        keys, values = load_rows(k, v, row, present[:, None], d, e, D, PAIR)

        # Scores.
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")

        # Mask: positions up to the own one, within the limits. Those before FIRST see themselves only,
        # and nobody else sees them.
        column = column[None, :]
        seen = (column <= position[:, None]) & ((column >= FIRST) | (column == position[:, None]))
        if WINDOW > 0 or CHUNK > 0:
            seen = seen & (column >= first_of[:, None])
        if CAPPED:
            scores = tanh(scores * cap)
        scores = tl.where(seen, scores, float("-inf"))
        acc, acc_odd, row_max, row_sum = update(
            acc, acc_odd, row_max, row_sum, scores, values, factor, queries.dtype, True
        )

    # Store the result.
    if PAIR == 2:
        acc = tl.reshape(tl.join(acc, acc_odd), [BLOCK_M, BLOCK_D])
    result = (acc * (v_scale / row_sum)[:, None]).to(out.dtype.element_ty)
    tl.store(out + first_query + q_at, result, is_row[:, None] & in_head)


@custom_operator("eagle_kit::paged_prefill_attention")
def paged_prefill_attention_op(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    page_tables: torch.Tensor,
    page_size: int,
    cu_rows: torch.Tensor,
    starts: torch.Tensor,
    first_position: int,
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
    blocks = choose_blocks(rows, d, q.element_size(), k_rows.element_size(), device_facts(q.device))
    pair = values_per_element(blocks, q.element_size(), k_rows.element_size())
    factor, cap = score_factors(scale, soft_cap)
    _prefill[(triton.cdiv(rows, blocks.m), hkv, starts.shape[0])](
        q,
        k_rows,
        v_rows.view(torch.int16) if pair == 2 else v_rows,
        page_tables,
        cu_rows,
        starts,
        q if sinks is None else sinks,
        out,
        factor,
        cap,
        v_scale,
        store_rows,
        page_tables.stride(0),
        G=hq // hkv,
        HKV=hkv,
        D=d,
        PAIR=pair,
        PAGE=page_size,
        FIRST=first_position,
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
        plan.first_position,
        plan.max_rows,
        variant.scale * k_scale,
        v_scale,
        list(variant.limits),
        variant.soft_cap,
        variant.sinks,
    )
