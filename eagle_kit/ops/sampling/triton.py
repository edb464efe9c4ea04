"""Sampling kernels: filters and samples of a distribution without sorting or materialising probabilities.

A filtered distribution needs four numbers per row besides the logits x: the best logit, the temperature, and
the bound of the kept tokens. With d = (best - x) / temperature, top-k, top-p and min-p each keep a prefix of
the order (d, token id), so together they keep the tokens up to one pair (``bound``, ``last``):

    weight(i) = exp(-d_i)  if d_i < bound or (d_i = bound and i <= last), else 0;    p(i) = weight(i) / total.

The weights are summed by chunks of a row, in fp64. Sampling with a uniform u finds the first chunk whose
running sum exceeds u * total and then the first token within it: the inverse CDF in the order of ids, as in
``uniform.py``.

The bound of top-k and top-p is a radix search over the 31 bits of d >= 0, four a launch: every program sums
the weight of each of 16 digits in its chunk, and begins by merging the digits of the round before. There are
no atomics, so sums do not depend on the order of programs. A chunk whose best token lies beyond the digit is
not read again, nor is a row without a filter. The last round counts tokens: each of its digits is a single
value of d.

Bytes, for M rows of V logits of e bytes: best and sums read e M V each; a filter reads as much in its first
round and little in later ones, as few chunks hold a token near the bound (eight times as much at worst).
Launches: 2, and 9 each for top-k and top-p.

Legend: M = B N rows, V vocabulary, C chunks of a row. In kernels: ``m`` a row, ``c`` a chunk, ``i`` token
ids, ``x`` their logits and ``d`` their distances.
"""

import torch
import triton
import triton.language as tl

from eagle_kit.ops.custom_operator import custom_operator

ROUNDS = 8
"""Rounds of the radix search: 4 of the 31 bits each, 3 in the first one."""
DIGITS = 16
"""Values of the 4 bits of a round."""
_INFINITY = tl.constexpr(0x7F800000)
"""Bits of infinity in fp32."""
_NO_ID = tl.constexpr(2**31 - 1)
"""Above every token id."""
# Constants of MurmurHash3's finaliser and of the streams, as in uniform.py, unsigned.
_MIX_1 = tl.constexpr(0xFF51AFD7ED558CCD)
_MIX_2 = tl.constexpr(0xC4CEB9FE1A85EC53)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_STREAM = tl.constexpr(0x5851F42D4C957F2D)


@triton.jit
def row_best(values, m, chunks, CPAD: tl.constexpr):
    """Largest value of row ``m``, from those of its chunks."""
    c = tl.arange(0, CPAD)
    return tl.max(tl.load(values + m * chunks + c, c < chunks, float("-inf")), 0)


@triton.jit
def row_argmax(values, ids, m, chunks, CPAD: tl.constexpr):
    """Lowest id of the largest value of row ``m``; of a row of NaN, some id of the vocabulary."""
    c = tl.arange(0, CPAD)
    value = tl.load(values + m * chunks + c, c < chunks, float("-inf"))
    # A chunk of NaN alone equals no maximum, and the id of padding would be left.
    value = tl.where(value == value, value, float("-inf"))
    id = tl.load(ids + m * chunks + c, c < chunks, _NO_ID)
    return tl.min(tl.where(value == tl.max(value, 0), id, _NO_ID), 0)


@triton.jit
def probability(x):
    """``x``, or 0 where it is no probability: NaN, infinity, below 0."""
    return tl.where((x > 0) & (x < float("inf")), x, 0.0)


@triton.jit
def _best(logits, values, ids, vocab, chunks, CHUNK: tl.constexpr):
    """Largest logit of one chunk of a row, and its first id. Grid ``(M, C)``."""
    m = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    i = c * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + m * vocab + i, i < vocab, float("-inf")).to(tl.float32)
    best = tl.max(x, 0)
    tl.store(values + m * chunks + c, best)
    tl.store(ids + m * chunks + c, tl.minimum(tl.min(tl.where(x == best, i, _NO_ID), 0), vocab - 1))


@triton.jit
def _narrowed(partial, lows, bases, needs, m, rows, chunks, round, shift, AFTER_COUNT: tl.constexpr,
              TOP_P: tl.constexpr, CPAD: tl.constexpr):  # fmt: skip
    """Interval that is left by round ``round - 1``, of digits ``shift``: its leading bits, the weight before
    it, the weight still needed, and the chosen digit."""
    # The interval before that round.
    previous = (round - 1) * rows + m
    low = tl.load(lows + previous)
    base = tl.load(bases + previous)
    need = tl.load(needs + previous)

    # The weight of each digit in it, over the chunks of the row.
    c = tl.arange(0, CPAD)
    digit = tl.arange(0, 16)
    chunk_at = (((round - 1) % 2) * rows + m) * chunks + c
    chunk_weights = tl.load(partial + chunk_at[:, None] * 16 + digit[None, :], (c < chunks)[:, None], 0.0)
    weight = tl.sum(chunk_weights.to(tl.float64), 0)
    if AFTER_COUNT and TOP_P:
        token_weight = tl.exp(-(low + digit).to(tl.float32, bitcast=True)).to(tl.float64)
        weight = tl.where(weight > 0, weight * token_weight, 0.0)  # bits above infinity are NaN
    if TOP_P:
        # Round 0 has summed all weights: from here on the share is a weight.
        need = tl.where(round == 1, need * tl.sum(weight, 0), need)

    # The first digit at which the running weight reaches what is needed.
    upto = base + tl.cumsum(weight, 0)
    chosen = tl.min(tl.where(upto >= need, digit, 15), 0)
    chosen = tl.where(round == 1, tl.minimum(chosen, 7), chosen)  # infinity lies in digit 7
    base += tl.sum(tl.where(digit < chosen, weight, 0.0), 0)
    return low + (chosen << shift), base, need, chosen


@triton.jit(do_not_specialize=["nodes", "rows", "round", "shift"])
def _search(logits, values, temperature, wanted, bounds, lasts, partial, lows, bases, needs, nodes, vocab,
            chunks, rows, round, shift, COUNT: tl.constexpr, TOP_P: tl.constexpr, HAS_LIMIT: tl.constexpr,
            CHUNK: tl.constexpr, LANES: tl.constexpr, CPAD: tl.constexpr):  # fmt: skip
    """One round of the radix search, for one chunk of a row. Grid ``(M, C)``.

    Sums the weight of every digit of the row's interval into ``partial [2, M, C, 16]``, of which odd and even
    rounds use one half each; counts tokens instead if COUNT. ``lows``, ``bases`` and ``needs [ROUNDS, M]``
    keep the interval of each round: its leading bits, the weight before it, and the weight that is needed.
    """
    # The interval that the round before leaves; at first all distances.
    m = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    divisor = tl.load(temperature + m // nodes)
    if round == 0:
        low = 0
        base = tl.zeros((), tl.float64)
        share = tl.load(wanted + m // nodes).to(tl.float64)
        # A threshold that keeps everything is never reached.
        needed = tl.where((divisor > 0) & (share < (1 if TOP_P else vocab)), share, float("inf"))
    else:
        low, base, needed, _ = _narrowed(
            partial, lows, bases, needs, m, rows, chunks, round, shift + 4, False, TOP_P, CPAD
        )
    if c == 0:
        tl.store(lows + round * rows + m, low)
        tl.store(bases + round * rows + m, base)
        tl.store(needs + round * rows + m, needed)

    # A chunk is read only if its best token may lie in the interval, and if the row has a filter.
    divisor = tl.where(divisor > 0, divisor, 1.0)
    best = row_best(values, m, chunks, CPAD)
    nearest = tl.div_rn(best - tl.load(values + m * chunks + c), divisor).to(tl.int32, bitcast=True)
    digit = tl.arange(0, 16)
    sums = tl.zeros([16, LANES], tl.float32)
    # Bits of a NaN may be negative: what lies below ``low`` is raised to it, or the difference overflows.
    if (needed < float("inf")) & ((tl.maximum(nearest, low) - low) >> shift < 16):
        for start in range(0, CHUNK, LANES):
            i = c * CHUNK + start + tl.arange(0, LANES)
            x = tl.load(logits + m * vocab + i, i < vocab, float("-inf")).to(tl.float32)
            d = tl.div_rn(best - x, divisor)
            bits = d.to(tl.int32, bitcast=True)

            # Tokens of the interval, and of the filter before.
            is_inside = (i < vocab) & (bits >= low)
            if HAS_LIMIT:
                bound = tl.load(bounds + m)
                last = tl.load(lasts + m)
                is_inside &= (d < bound) | ((d == bound) & (i <= last))

            # Each adds to its digit; tokens behind the interval have 16 or more.
            token_digit = tl.where(is_inside, (tl.maximum(bits, low) - low) >> shift, 16)
            weight = tl.full([LANES], 1.0, tl.float32) if COUNT else tl.exp(-d)
            sums += tl.where(token_digit[None, :] == digit[:, None], weight[None, :], 0.0)
    chunk_at = ((round % 2) * rows + m) * chunks + c
    tl.store(partial + chunk_at * 16 + digit, tl.sum(sums, 1))


@triton.jit(do_not_specialize=["nodes", "rows"])
def _settle(logits, values, temperature, bounds, lasts, partial, lows, bases, needs, new_bounds, new_lasts,
            nodes, vocab, chunks, rows, TOP_P: tl.constexpr, HAS_LIMIT: tl.constexpr, CHUNK: tl.constexpr,
            CPAD: tl.constexpr):  # fmt: skip
    """End the radix search of one row: the bound, and the last token kept at the bound. Grid ``(M,)``."""
    # The bound: the single distance that eight rounds leave.
    m = tl.program_id(0).to(tl.int64)
    bits, base, need, chosen = _narrowed(
        partial, lows, bases, needs, m, rows, chunks, 8, 0, True, TOP_P, CPAD
    )
    bits = tl.minimum(bits, _INFINITY)
    bound = bits.to(tl.float32, bitcast=True)

    # Tokens at the bound in every chunk, and how many of them are needed.
    last = vocab
    c = tl.arange(0, CPAD)
    # After eight rounds the buffer of odd rounds is the newest.
    ties = tl.load(partial + ((rows + m) * chunks + c) * 16 + chosen, c < chunks, 0.0).to(tl.int32)
    upto = tl.cumsum(ties, 0)
    total = tl.sum(ties, 0)
    token_weight = tl.exp(-bound).to(tl.float64) if TOP_P else tl.full((), 1.0, tl.float64)
    missing = tl.where(token_weight > 0, tl.ceil((need - base) / token_weight), float("inf"))
    wanted = tl.maximum(tl.minimum(missing, total.to(tl.float64)).to(tl.int32), 1)

    # The last one: first its chunk, then its id in the chunk.
    if (bits < _INFINITY) & (wanted < total):
        chunk = tl.min(tl.where(upto >= wanted, c, CPAD), 0)
        rank = wanted - tl.sum(tl.where(c < chunk, ties, 0), 0)
        best = row_best(values, m, chunks, CPAD)
        i = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + m * vocab + i, i < vocab, float("-inf")).to(tl.float32)
        tied = (tl.div_rn(best - x, tl.load(temperature + m // nodes)) == bound) & (i < vocab)
        last = tl.min(tl.where(tied & (tl.cumsum(tied.to(tl.int32), 0) == rank), i, vocab), 0)

    # The tighter of this filter's bound and that of the filter before.
    if HAS_LIMIT:
        is_new = bits < _INFINITY
        old_last = tl.load(lasts + m)
        last = tl.where(bound == tl.load(bounds + m), tl.minimum(last, old_last), last)
        last = tl.where(is_new, last, old_last)
        bound = tl.where(is_new, bound, tl.load(bounds + m))
    tl.store(new_bounds + m, bound)
    tl.store(new_lasts + m, last)


@triton.jit
def logit_weights(rows, i, m, vocab, stats, last, DENSE: tl.constexpr):
    """Unnormalised weights of tokens ``i`` of row ``m``, fp32; in dense rows the probabilities themselves. 0
    from ``vocab`` on."""
    x = tl.load(rows + m * vocab + i, i < vocab, 0.0 if DENSE else float("-inf")).to(tl.float32)
    if DENSE:
        return probability(x)
    best = tl.load(stats + m * 3)
    divisor = tl.load(stats + m * 3 + 1)
    bound = tl.load(stats + m * 3 + 2)
    end = tl.load(last + m)
    d = tl.div_rn(best - x, divisor)
    return tl.where((d < bound) | ((d == bound) & (i <= end)), tl.exp(-d), 0.0)


@triton.jit(do_not_specialize=["nodes"])
def _sums(rows, values, ids, temperature, bounds, lasts, floors, stats, last, sums, nodes, vocab, chunks,
          DENSE: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_FLOOR: tl.constexpr, CHUNK: tl.constexpr,
          CPAD: tl.constexpr):  # fmt: skip
    """Sum the weights of one chunk of a row; of logits, the first chunk also writes the row's ``stats`` and
    ``last``. Grid ``(M, C)``."""
    m = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    i = c * CHUNK + tl.arange(0, CHUNK)
    if DENSE:
        weight = probability(tl.load(rows + m * vocab + i, i < vocab, 0.0)).to(tl.float64)
        tl.store(sums + m * chunks + c, tl.sum(weight, 0))
    else:
        # The bound of top-k and top-p, min-p's if it is tighter, and one token alone for greedy rows.
        best = row_best(values, m, chunks, CPAD)
        best_id = row_argmax(values, ids, m, chunks, CPAD)
        divisor = tl.load(temperature + m // nodes)
        bound = float("inf")
        end = vocab
        if HAS_LIMIT:
            bound = tl.load(bounds + m)
            end = tl.load(lasts + m)
        if HAS_FLOOR:
            floor = tl.load(floors + m // nodes)
            end = tl.where(floor < bound, vocab, end)
            bound = tl.minimum(floor, bound)
        is_greedy = divisor == 0
        divisor = tl.where(is_greedy, 1.0, divisor)
        bound = tl.where(is_greedy, 0.0, bound)
        end = tl.where(is_greedy, best_id, end)
        if c == 0:
            tl.store(stats + m * 3, best)
            tl.store(stats + m * 3 + 1, divisor)
            tl.store(stats + m * 3 + 2, bound)
            tl.store(last + m, end)

        # The chunk's weights; it is not read if its best token is not kept.
        total = tl.zeros((), tl.float64)
        if tl.div_rn(best - tl.load(values + m * chunks + c), divisor) <= bound:
            x = tl.load(rows + m * vocab + i, i < vocab, float("-inf")).to(tl.float32)
            d = tl.div_rn(best - x, divisor)
            weight = tl.where((d < bound) | ((d == bound) & (i <= end)), tl.exp(-d), 0.0)
            total = tl.sum(weight.to(tl.float64), 0)
        tl.store(sums + m * chunks + c, total)


@triton.jit
def row_sums(sums, m, chunks, CPAD: tl.constexpr):
    """Sums of the chunks of row ``m``, fp64."""
    c = tl.arange(0, CPAD)
    return tl.load(sums + m * chunks + c, c < chunks, 0.0)


@triton.jit
def row_scale(sums, m, chunks, DENSE: tl.constexpr, CPAD: tl.constexpr):
    """Factor that normalises the weights of row ``m`` to probabilities."""
    if DENSE:
        return tl.full((), 1.0, tl.float64)
    return 1.0 / tl.sum(row_sums(sums, m, chunks, CPAD), 0)


@triton.jit
def row_probs(rows, i, m, vocab, stats, last, scale, DENSE: tl.constexpr):
    """Probabilities of tokens ``i`` of row ``m``, fp32; bit-identical wherever a distribution is read."""
    weight = logit_weights(rows, i, m, vocab, stats, last, DENSE)
    return (weight.to(tl.float64) * scale).to(tl.float32)


@triton.jit
def pick_chunk(sums, uniform, CPAD: tl.constexpr):
    """First chunk whose running sum exceeds ``aim = uniform * total``, the sum before it, and ``aim``. Where
    rounding leaves none, the last chunk of nonzero sum."""
    c = tl.arange(0, CPAD)
    upto = tl.cumsum(sums, 0)
    aim = uniform * tl.sum(sums, 0)
    first = tl.min(tl.where((sums > 0) & (upto > aim), c, CPAD), 0)
    chunk = tl.where(first < CPAD, first, tl.max(tl.where(sums > 0, c, 0), 0))
    return chunk, tl.sum(tl.where(c < chunk, sums, 0.0), 0), aim


@triton.jit
def pick_token(weight, i, before, aim, vocab):
    """First token of ``i`` at which the running sum exceeds ``aim``; where rounding leaves none, the last of
    nonzero weight."""
    upto = before + tl.cumsum(weight, 0)
    first = tl.min(tl.where((weight > 0) & (upto > aim), i, vocab), 0)
    return tl.where(first < vocab, first, tl.max(tl.where((weight > 0) & (i < vocab), i, 0), 0))


@triton.jit
def draw(rows, m, uniform, vocab, chunks, stats, last, sums, DENSE: tl.constexpr, CHUNK: tl.constexpr,
         CPAD: tl.constexpr):  # fmt: skip
    """Token of row ``m`` sampled with ``uniform``."""
    chunk, before, aim = pick_chunk(row_sums(sums, m, chunks, CPAD), uniform, CPAD)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    weight = logit_weights(rows, i, m, vocab, stats, last, DENSE).to(tl.float64)
    return pick_token(weight, i, before, aim, vocab)


@triton.jit
def _draw(rows, uniforms, stats, last, sums, out, vocab, chunks, DENSE: tl.constexpr, CHUNK: tl.constexpr,
          CPAD: tl.constexpr):  # fmt: skip
    """Sample the token of one row. Grid ``(M,)``."""
    m = tl.program_id(0).to(tl.int64)
    token = draw(rows, m, tl.load(uniforms + m), vocab, chunks, stats, last, sums, DENSE, CHUNK, CPAD)
    tl.store(out + m, token.to(tl.int64))


@triton.jit
def _probs(rows, stats, last, sums, out, vocab, chunks, CHUNK: tl.constexpr, CPAD: tl.constexpr):
    """Write the probabilities of one chunk of a row. Grid ``(M, C)``."""
    m = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    i = c * CHUNK + tl.arange(0, CHUNK)
    scale = row_scale(sums, m, chunks, False, CPAD)
    tl.store(out + m * vocab + i, row_probs(rows, i, m, vocab, stats, last, scale, False), i < vocab)


@triton.jit(do_not_specialize=["count"])
def _draw_distinct(rows, uniforms, sums, out, vocab, chunks, count, CHUNK: tl.constexpr, CPAD: tl.constexpr,
                   KPAD: tl.constexpr):  # fmt: skip
    """Sample the tokens of one row without replacement. Grid ``(M,)``."""
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KPAD)
    c = tl.arange(0, CPAD)
    sampled = tl.full([KPAD], -1, tl.int32)
    left = row_sums(sums, m, chunks, CPAD)  # of each chunk, without the sampled tokens
    for n in range(count):
        # The lowest id not sampled yet, which is one of the first KPAD: taken where no weight is left.
        is_sampled = tl.max((sampled[:, None] == k[None, :]).to(tl.int32), 0)
        token = tl.min(tl.where(is_sampled == 0, k, KPAD), 0)

        # Otherwise a sample of the weights that are left, whose chunk is summed again without it.
        if tl.sum(left, 0) > 0:
            chunk, before, aim = pick_chunk(left, tl.load(uniforms + m * count + n), CPAD)
            i = chunk * CHUNK + tl.arange(0, CHUNK)
            weight = probability(tl.load(rows + m * vocab + i, i < vocab, 0.0)).to(tl.float64)
            for earlier in range(n):
                weight = tl.where(i == tl.sum(tl.where(k == earlier, sampled, 0), 0), 0.0, weight)
            token = pick_token(weight, i, before, aim, vocab)
            rest = tl.sum(tl.where(i == token, 0.0, weight), 0)
            left = tl.where(c == chunk, rest, left)
        sampled = tl.where(k == n, token, sampled)
    tl.store(out + m * count + k, sampled.to(tl.int64), k < count)


@triton.jit
def _mix(x):
    """MurmurHash3's finaliser of unsigned words."""
    x = (x ^ (x >> 33)) * _MIX_1
    x = (x ^ (x >> 33)) * _MIX_2
    return x ^ (x >> 33)


@triton.jit(do_not_specialize=["count", "size", "row_stride", "column_stride"])
def _uniforms(seeds, positions, out, count, size, row_stride, column_stride, STREAM: tl.constexpr,
           OF_CYCLE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Hash BLOCK of the ``size`` pairs of a request b and a number j. Grid ``(ceil(size / BLOCK),)``."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = i // count
    j = i % count
    inside = i < size
    stream: tl.constexpr = (STREAM * _STREAM) % 2**64
    seed = tl.load(seeds + b, inside, 0).to(tl.uint64, bitcast=True)
    if OF_CYCLE:
        root = tl.load(positions + b * row_stride, inside, 0).to(tl.uint64, bitcast=True)
        seed = _mix(_mix(seed + _GOLDEN) + root * _GOLDEN + stream)
        position = j.to(tl.uint64)
    else:
        position = tl.load(positions + b * row_stride + j * column_stride, inside, 0)
        position = position.to(tl.uint64, bitcast=True)
    hashed = _mix(_mix(seed + _GOLDEN) + position * _GOLDEN + stream)
    tl.store(out + i, (hashed >> 11).to(tl.float64) * (2.0**-53), inside)


def chunk_size(vocab: int) -> int:
    """Tokens that a program reads. Eight or more chunks per row and none above 4,096: a window of eight nodes
    over 128 K tokens is then 256 programs of 8 to 16 KB, two for each multiprocessor of an H200."""
    return min(4096, max(256, triton.next_power_of_2(vocab) // 8))


def num_chunks(vocab: int) -> int:
    """Number of chunks of a row, C."""
    return triton.cdiv(vocab, chunk_size(vocab))


def sizes(vocab: int) -> dict[str, int]:
    """Launch options of kernels over chunks."""
    chunk = chunk_size(vocab)
    return {
        "CHUNK": chunk,
        "CPAD": triton.next_power_of_2(num_chunks(vocab)),
        "num_warps": max(1, chunk // 512),
    }


def best_of_chunks(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest logit of each chunk, fp32 ``[M, C]``, and its first id, int32; ``logits [..., V]``
    contiguous."""
    vocab = logits.shape[-1]
    rows = logits.numel() // vocab
    chunks = num_chunks(vocab)
    values = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    if rows:
        options = sizes(vocab)
        _best[(rows, chunks)](
            logits, values, ids, vocab, chunks, CHUNK=options["CHUNK"], num_warps=options["num_warps"]
        )
    return values, ids


def _filter(
    logits: torch.Tensor,
    values: torch.Tensor,
    temperature: torch.Tensor,
    wanted: torch.Tensor,
    limit: tuple[torch.Tensor, torch.Tensor] | None,
    is_top_p: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds and last ids ``[M]`` of the tokens that top-k or top-p keeps of those within ``limit``."""
    rows, chunks = values.shape
    vocab = logits.shape[-1]
    device = logits.device
    nodes = rows // temperature.shape[0]

    # State of the search (see the kernels), and results.
    partial = torch.empty(2, rows, chunks, DIGITS, dtype=torch.float32, device=device)
    lows = torch.empty(ROUNDS, rows, dtype=torch.int32, device=device)
    bases, needs = torch.empty(2, ROUNDS, rows, dtype=torch.float64, device=device)
    bounds = torch.empty(rows, dtype=torch.float32, device=device)
    lasts = torch.empty(rows, dtype=torch.int32, device=device)
    old_bounds, old_lasts = (bounds, lasts) if limit is None else limit
    state = (partial, lows, bases, needs)
    options = sizes(vocab)
    chunk = options["CHUNK"]
    padded_chunks = options["CPAD"]
    for round in range(ROUNDS):
        _search[(rows, chunks)](
            logits, values, temperature, wanted, old_bounds, old_lasts, *state, nodes, vocab, chunks, rows,
            round, 4 * (ROUNDS - 1 - round), COUNT=not is_top_p or round == ROUNDS - 1, TOP_P=is_top_p,
            HAS_LIMIT=limit is not None, CHUNK=chunk, LANES=min(512, chunk), CPAD=padded_chunks, num_warps=4,
        )  # fmt: skip
    _settle[(rows,)](
        logits, values, temperature, old_bounds, old_lasts, *state, bounds, lasts, nodes, vocab, chunks, rows,
        TOP_P=is_top_p, HAS_LIMIT=limit is not None, CHUNK=chunk, CPAD=padded_chunks,
        num_warps=2 * options["num_warps"],
    )  # fmt: skip
    return bounds, lasts


@custom_operator("eagle_kit::filter_logits")
def filter_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    floors: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``stats``, ``last`` and ``sums`` of a ``FilteredLogits`` of ``logits [B, N, V]``, contiguous, of any
    float type.

    Args:
        temperature, top_k, top_p: ``[B]``, as in ``SamplingBatch``.
        floors: fp32 ``[B]``, the distance up to which min-p keeps tokens, infinity for all.
    """
    b, n, vocab = logits.shape
    stats, last, sums = _empty_filter_stats(logits)
    if b * n == 0:
        return stats, last, sums
    values, ids = best_of_chunks(logits)

    # Bounds of top-k, then of top-p within it.
    limit = None
    if top_k is not None:
        limit = _filter(logits, values, temperature, top_k, limit, False)
    if top_p is not None:
        limit = _filter(logits, values, temperature, top_p, limit, True)

    # Sums of the weights within the bounds. Bounds that are not there are not read: any tensors do.
    bounds, lasts = limit or (stats, last)
    floor = stats if floors is None else floors
    _sums[values.shape](
        logits, values, ids, temperature, bounds, lasts, floor, stats, last, sums, n,
        vocab, values.shape[1], DENSE=False, HAS_LIMIT=limit is not None, HAS_FLOOR=floors is not None,
        **sizes(vocab),
    )  # fmt: skip
    return stats, last, sums


def _empty_filter_stats(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    b, n, vocab = logits.shape
    stats = torch.empty(b, n, 3, dtype=torch.float32, device=logits.device)
    last = torch.empty(b, n, dtype=torch.int32, device=logits.device)
    return stats, last, torch.empty(b, n, num_chunks(vocab), dtype=torch.float64, device=logits.device)


@filter_logits.register_fake
def _(logits, temperature, top_k, top_p, floors):
    return _empty_filter_stats(logits)


def chunk_sums(probs: torch.Tensor) -> torch.Tensor:
    """Sums of the chunks of ``probs [..., V]`` contiguous, fp64 ``[..., C]``; NaN counts 0."""
    vocab = probs.shape[-1]
    chunks = num_chunks(vocab)
    sums = torch.empty(*probs.shape[:-1], chunks, dtype=torch.float64, device=probs.device)
    if sums.numel():
        unused = probs  # arguments for logits, from values to last
        _sums[(sums.numel() // chunks, chunks)](
            probs, unused, unused, unused, unused, unused, unused, unused, unused, sums, 1, vocab, chunks,
            DENSE=True, HAS_LIMIT=False, HAS_FLOOR=False, **sizes(vocab),
        )  # fmt: skip
    return sums


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Kernel arguments ``rows``, ``stats``, ``last`` and ``sums`` of a distribution."""


def rows_of(parts: list[torch.Tensor]) -> tuple[Rows, bool]:
    """Kernel arguments of a distribution in the form of ``distribution_parts``, and DENSE: True if it is
    given as probabilities, whose chunks are summed here."""
    if len(parts) == 1:
        probs = parts[0]
        return (probs, probs, probs, chunk_sums(probs)), True
    logits, stats, last, sums = parts
    return (logits, stats, last, sums), False


@custom_operator("eagle_kit::sample")
def sample(uniforms: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """Sample tokens int64 ``[...]`` with ``uniforms`` fp64 ``[...]``, contiguous, from a distribution in the
    form of ``distribution_parts``. Two launches for probabilities, one for a ``FilteredLogits``."""
    vocab = parts[0].shape[-1]
    out = torch.empty(uniforms.shape, dtype=torch.int64, device=uniforms.device)
    if out.numel():
        (rows, stats, last, sums), dense = rows_of(parts)
        _draw[(out.numel(),)](
            rows, uniforms, stats, last, sums, out, vocab, num_chunks(vocab), DENSE=dense, **sizes(vocab)
        )  # fmt: skip
    return out


@sample.register_fake
def _(uniforms, parts):
    return torch.empty(uniforms.shape, dtype=torch.int64, device=uniforms.device)


@custom_operator("eagle_kit::filtered_probs")
def filtered_probs(
    logits: torch.Tensor, stats: torch.Tensor, last: torch.Tensor, sums: torch.Tensor
) -> torch.Tensor:
    """Probabilities of a ``FilteredLogits``, fp32 ``[B, N, V]``."""
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if out.numel():
        rows = last.numel()
        vocab = logits.shape[-1]
        chunks = sums.shape[-1]
        _probs[(rows, chunks)](logits, stats, last, sums, out, vocab, chunks, **sizes(vocab))
    return out


@filtered_probs.register_fake
def _(logits, stats, last, sums):
    return torch.empty(logits.shape, dtype=torch.float32, device=logits.device)


@custom_operator("eagle_kit::sample_distinct")
def sample_distinct(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample tokens int64 ``[B, K]`` without replacement from ``probs [B, V]`` with ``uniforms`` fp64 ``[B,
    K]``, both contiguous; 2 launches."""
    out = torch.empty(uniforms.shape, dtype=torch.int64, device=probs.device)
    if out.numel():
        b, count = uniforms.shape
        vocab = probs.shape[-1]
        _draw_distinct[(b,)](
            probs, uniforms, chunk_sums(probs), out, vocab, num_chunks(vocab), count,
            KPAD=triton.next_power_of_2(count), **sizes(vocab),
        )  # fmt: skip
    return out


@sample_distinct.register_fake
def _(probs, uniforms):
    return torch.empty(uniforms.shape, dtype=torch.int64, device=probs.device)


@custom_operator("eagle_kit::uniforms")
def uniforms(
    seeds: torch.Tensor, positions: torch.Tensor, count: int, stream: int, of_cycle: bool
) -> torch.Tensor:
    """Uniform random numbers fp64 ``[B, count]`` for contiguous ``seeds [B]`` and ``positions [B, count]``,
    or with ``of_cycle`` for the roots' ``positions [B, 1]``. Integer arithmetic modulo 2^64 with an exact
    conversion: bit-identical to the reference."""
    out = torch.empty(seeds.shape[0], count, dtype=torch.float64, device=seeds.device)
    size = out.numel()
    if size:
        _uniforms[(triton.cdiv(size, 256),)](
            seeds, positions, out, count, size, positions.stride(0), positions.stride(1), STREAM=stream,
            OF_CYCLE=of_cycle, BLOCK=256, num_warps=2,
        )  # fmt: skip
    return out


@uniforms.register_fake
def _(seeds, positions, count, stream, of_cycle):
    return torch.empty(seeds.shape[0], count, dtype=torch.float64, device=seeds.device)
