"""The draft head: logits, softmax and top-k without logits in memory, in two launches.

``_tiles``: a program multiplies a tile of the vocabulary with a block of rows, the tile on the side of the
matrix instruction that has 64 rows, and keeps of each row's logits z, in fp32,

    the K best, as keys, and the sum of exp(z - best).

A key is a logit's bits, in the order of integers, before the inverted id: the largest key is the largest
logit of the lowest id. No two are equal, so the best is taken out by comparing.

``_merge``: one program per row. The K best lie in the K tiles with the best heads, since each of these holds
a better key than any in another tile. With m the best logit and (m_t, s_t) those of tile t,

    log-probability = z - m - log(sum_t s_t exp(m_t - m)).

Logits are sums in fp32 and never rounded (a linear layer rounds them to the dtype of x); sums of exponentials
are fp32.

Bytes: Vd H elements of weight once for up to 64 rows, 8 K + 4 per tile and row between the launches. The best
K of a tile are K maxima over keys in registers, after a loop that is bound by the weight's bytes.

Legend: T rows, H hidden, Vd draft vocabulary, K top-k. In kernels: ``id`` draft ids of a tile, ``h`` elements
of a row that are multiplied at a time, ``t`` tiles, ``k`` places of the top-k.
"""

import torch
import triton
import triton.language as tl

from eagle_kit.ops.capability import DeviceFacts, device_facts
from eagle_kit.ops.custom_operator import custom_operator
from eagle_kit.ops.dependent_launch import (
    LINE,
    gdc_launch_dependents,
    gdc_wait,
    launch_options,
    prefetch_rows,
    wait_for_launch,
)

_SIGN = tl.constexpr(2**31 - 1)
"""All bits but the sign."""
_NOTHING = tl.constexpr(-(2**63))
"""Key below those of all logits."""
PROGRAMS = 2
"""Programs of ``_tiles`` that fit on a multiprocessor."""
AHEAD = tl.constexpr(1024)
"""Bytes of each row of the weight that a program brings to the cache before it waits: 34 MB of an H200's 50
for all that are there at once."""


@triton.jit
def _key(logit, id):
    """Sortable integer of a logit and its inverted id; 0 and -0 are equal."""
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & _SIGN)).to(tl.int64) << 32) | (id ^ _SIGN).to(tl.int64)


@triton.jit
def _logit(key):
    """Logit of a key."""
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & _SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def _id(key):
    """Id of a key."""
    return ((key & _SIGN) ^ _SIGN).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "tiles", "topk"])
def _tiles(x, weight, keys, sums, num_rows, vocab, size, tiles, topk, NORMALIZED: tl.constexpr,
           EVEN: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
           PDL: tl.constexpr):  # fmt: skip
    """The K best keys, ``keys [T, K, tiles]``, and the sum of exponentials, ``sums [T, tiles]``, of one tile
    of the vocabulary and a block of rows. Grid ``(blocks of rows, tiles)``."""
    # Addresses of x and of the weight, whose first lines are brought to the cache.
    tile = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    id = tile * TILE + tl.arange(0, TILE)
    h = tl.arange(0, DEPTH)
    # Rows and ids after the last repeat it, so that loads need no mask.
    x += tl.minimum(row, num_rows - 1).to(tl.int64)[None, :] * size + h[:, None]
    weight_rows = weight + tl.minimum(id, vocab - 1).to(tl.int64) * size
    if PDL:
        gdc_launch_dependents()
        prefetch_rows(weight_rows, 0, size, AHEAD // LINE)
        gdc_wait()
    weight = weight_rows[:, None] + h[None, :]

    # Logits.
    logits = tl.zeros([TILE, ROWS], tl.float32)
    for start in range(0, size, DEPTH):
        if EVEN:
            w_part = tl.load(weight)
            x_part = tl.load(x)
        else:
            w_part = tl.load(weight, (h < size - start)[None, :], 0.0)
            x_part = tl.load(x, (h < size - start)[:, None], 0.0)
        logits = tl.dot(w_part, x_part, logits, input_precision="ieee")
        weight += DEPTH
        x += DEPTH

    # The sum of exponentials of the tile, relative to its best logit.
    is_id = (id < vocab)[:, None]
    is_row = row < num_rows
    row = row.to(tl.int64)
    if NORMALIZED:
        best = tl.max(tl.where(is_id, logits, float("-inf")), 0)
        total = tl.sum(tl.where(is_id, tl.exp(logits - best[None, :]), 0.0), 0)
        tl.store(sums + row * tiles + tile, total, is_row)

    # The best keys, taken out one after another.
    key = tl.where(is_id, _key(logits, id[:, None]), _NOTHING)
    for k in range(topk):
        best_key = tl.max(key, 0)
        tl.store(keys + (row * topk + k) * tiles + tile, best_key, is_row)
        key = tl.where(key == best_key[None, :], _NOTHING, key)


@triton.jit(do_not_specialize=["tiles", "topk"])
def _merge(keys, sums, token_map, ids, scores, tiles, topk, NORMALIZED: tl.constexpr, HAS_MAP: tl.constexpr,
           TILE: tl.constexpr, TILES: tl.constexpr, TOPK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Top-k of one row from those of its tiles. Grid ``(T,)``."""
    # The best key of every tile, and the log of the sum of exponentials.
    wait_for_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    keys += row * topk * tiles
    t = tl.arange(0, TILES)
    k = tl.arange(0, TOPK)
    head = tl.load(keys + t, t < tiles, _NOTHING)
    if NORMALIZED:
        logit = tl.where(t < tiles, _logit(head), float("-inf"))
        best = tl.max(logit, 0)
        part = tl.load(sums + row * tiles + t, t < tiles, 0.0)
        log_total = best + tl.log(tl.sum(part * tl.exp(logit - best), 0))

    # The K tiles with the best heads.
    chosen = tl.full([TOPK], -1, tl.int32)
    for i in range(tl.minimum(topk, tiles)):
        best_key = tl.max(head, 0)
        chosen = tl.where(k == i, _id(best_key) // TILE, chosen)
        head = tl.where(head == best_key, _NOTHING, head)

    # The K best of all keys of these tiles.
    mask = (k < topk)[:, None] & (chosen >= 0)[None, :]
    key = tl.load(keys + k[:, None] * tiles + chosen[None, :], mask, _NOTHING)
    for i in range(topk):
        best_key = tl.max(key)
        key = tl.where(key == best_key, _NOTHING, key)
        id = _id(best_key).to(tl.int64)
        if HAS_MAP:
            id = tl.load(token_map + id)
        tl.store(ids + row * topk + i, id)
        score = _logit(best_key) - log_total if NORMALIZED else 0.0
        tl.store(scores + row * topk + i, score)


def _options(num_rows: int, vocab: int, size: int, dtype: torch.dtype, facts: DeviceFacts) -> dict[str, int]:
    """Sizes of ``_tiles``, for an H200: 132 multiprocessors of 228 KB need some 32 KB in flight each.

    128 ids a tile halve what is read of x from the L2 cache; 64 reach all multiprocessors with a small
    vocabulary, about one program each, which takes more stages. 16 rows: stages of 32 + 4 KB, two of three in
    flight, two programs a multiprocessor, which hold all 250 tiles of 32,000 ids at once. 64 rows: stages of
    16 + 8 KB, three of four in flight, likewise. Where less shared memory is there, as many stages as fit.
    """
    if dtype == torch.float32:
        return {"ROWS": 16, "TILE": 64, "DEPTH": 32, "num_warps": 4, "num_stages": 3}
    if num_rows <= 16:
        rows = 16
    elif num_rows <= 32:
        rows = 32
    else:
        rows = 64
    depth = 128 if rows == 16 and size % 128 == 0 and not facts.is_small else 64
    is_large = vocab >= 200 * 128
    tile = 128 if is_large else 64
    stages = 3 if depth == 128 else 4
    if not is_large:
        stages += 2
    depth, stages = facts.fit(depth, stages, 2 * (tile + rows), programs=PROGRAMS)
    return {
        "ROWS": rows,
        "TILE": tile,
        "DEPTH": depth,
        "num_warps": 8 if rows == 64 and is_large else 4,
        "num_stages": stages,
    }


def _merge_options(topk: int, tiles: int) -> dict[str, int]:
    padded = triton.next_power_of_2(tiles)
    return {
        "TILES": padded,
        "TOPK": triton.next_power_of_2(topk),
        "num_warps": min(8, max(1, padded // 128)),
    }


@custom_operator("eagle_kit::draft_topk")
def draft_topk(
    x: torch.Tensor, weight: torch.Tensor, topk: int, normalized: bool, token_map: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k of ``x [T, H]``, ``weight [Vd, H]`` of the same dtype, ``token_map`` int64 ``[Vd]``, all
    contiguous."""
    num_rows, size = x.shape
    vocab = weight.shape[0]
    ids, scores = _outputs(x, topk)
    if num_rows == 0:
        return ids, scores
    options = _options(num_rows, vocab, size, x.dtype, device_facts(x.device))
    tiles = triton.cdiv(vocab, options["TILE"])
    early = launch_options(x.device)
    keys = torch.empty(num_rows, topk, tiles, dtype=torch.int64, device=x.device)
    sums = torch.empty(num_rows, tiles if normalized else 0, device=x.device)
    _tiles[(triton.cdiv(num_rows, options["ROWS"]), tiles)](
        x, weight, keys, sums, num_rows, vocab, size, tiles, topk, NORMALIZED=normalized,
        EVEN=size % options["DEPTH"] == 0, **options, **early,
    )  # fmt: skip
    _merge[(num_rows,)](
        keys, sums, ids if token_map is None else token_map, ids, scores, tiles, topk, NORMALIZED=normalized,
        HAS_MAP=token_map is not None, TILE=options["TILE"], **_merge_options(topk, tiles), **early,
    )  # fmt: skip
    return ids, scores


def _outputs(x: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (x.shape[0], topk)
    return torch.empty(shape, dtype=torch.int64, device=x.device), torch.empty(shape, device=x.device)


@draft_topk.register_fake
def _(x, weight, topk, normalized, token_map):
    return _outputs(x, topk)
