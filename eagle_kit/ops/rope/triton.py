"""RMSNorm of query and key heads, rotary positions and the store of keys and values: one pass over memory.

A pair (a, b) of a head turns by its position's angle: ``a' = a cos - b sin, b' = b cos + a sin``, in fp32.
A program has one token and some heads of one kind (query, key or value). Half types are rounded after the
norm, after its weight and after the rotation, as the reference rounds; an fp8 store takes the rounded values
divided by its scale, and the conversion saturates.

Angles are those of the reference, products in fp32; their cosines and sines are computed here
(:func:`_cos_sin`): a table in memory would be one more launch a forward, or 64 MB for 131,072 positions, and
its row an address that a load must bring first.

Moves T (2 Hq + 4 Hkv) D elements, or T (2 Hq + 6 Hkv) D where k and v are both stored and returned. After Su
et al. (arXiv 2104.09864); norms of heads after Qwen3 (arXiv 2505.09388).

Legend: T tokens, Hq / Hkv query / key-value heads, D head size, E rotated elements of a head, R rows of a
store. In kernels: ``a`` and ``b`` first and second members of pairs, ``rest`` the D - E other elements.
"""

import torch
import triton
import triton.language as tl

from eagle_kit.ops.custom_operator import custom_operator
from eagle_kit.ops.dependent_launch import launch_options, wait_for_launch


@triton.jit
def _cos_sin(angle):
    """Cosine and sine of fp32 angles, within 2e-7 up to 4 million radians.

    Cody and Waite's reduction: ``angle - k pi/2`` with pi/2 in three parts. Multiplied and added at once, the
    first part leaves no error, since angle and ``k pi/2`` are near each other; the second rounds once. What
    is left is at most pi/4, where Taylor's series to r^9 and r^10 are closer than fp32. CUDA's own ``cosf``
    would put an array on the stack for large angles.
    """
    # The quarter turn k, and the remainder r.
    k = tl.floor(angle * 0.6366197723675814 + 0.5)
    r = tl.fma(k, -1.57079637050628662109375, angle)
    r = tl.fma(k, 4.37113900018624283e-8, r)
    r = tl.fma(k, 1.71512451613e-15, r)

    # Sine and cosine of r.
    z = r * r
    sin = r + r * z * (-1 / 6 + z * (1 / 120 + z * (-1 / 5040 + z * (1 / 362880))))
    cos = 1.0 + z * (-1 / 2 + z * (1 / 24 + z * (-1 / 720 + z * (1 / 40320 + z * (-1 / 3628800)))))

    # Those of the angle: swapped in odd quarters, and with the quarter's signs.
    quarter = k.to(tl.int32)
    is_odd = (quarter & 1) != 0
    c = tl.where(is_odd, sin, cos)
    s = tl.where(is_odd, cos, sin)
    return tl.where(((quarter + 1) & 2) != 0, -c, c), tl.where((quarter & 2) != 0, -s, s)


@triton.jit
def _load_pairs(start, inside, E: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Load both members of the pairs of the heads at ``start [X, 1]`` -> fp32 ``[X, BLOCK_HALF]`` each."""
    if INTERLEAVED:
        i = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        both = tl.load(start + i, inside & (i < E), 0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, [start.shape[0], BLOCK_HALF, 2]))
    else:
        i = tl.arange(0, BLOCK_HALF)[None, :]
        mask = inside & (i < E // 2)
        a = tl.load(start + i, mask, 0.0).to(tl.float32)
        b = tl.load(start + E // 2 + i, mask, 0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_pairs(start, a, b, inside, E: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Store both members of the pairs of the heads at ``start [X, 1]``."""
    if INTERLEAVED:
        i = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        both = tl.reshape(tl.join(a, b), [start.shape[0], 2 * BLOCK_HALF])
        tl.store(start + i, both.to(start.dtype.element_ty), inside & (i < E))
    else:
        i = tl.arange(0, BLOCK_HALF)[None, :]
        mask = inside & (i < E // 2)
        tl.store(start + i, a.to(start.dtype.element_ty), mask)
        tl.store(start + E // 2 + i, b.to(start.dtype.element_ty), mask)


@triton.jit
def _normed(x, scale, weight, weight_kind: tl.constexpr, kind: tl.constexpr):
    """``x`` times the scale of its norm and the weight, rounded to ``kind``; a half weight multiplies what is
    rounded."""
    x = x * scale
    if weight_kind != tl.float32:
        x = x.to(kind).to(tl.float32)
    return (x * weight).to(kind).to(tl.float32)


@triton.jit
def _scaled(x, scale, kind: tl.constexpr):
    """``x`` scaled and clamped for a store of dtype ``kind``, before the conversion."""
    if kind == tl.float8e4nv:
        x = tl.div_rn(x, scale)
    return x


@triton.jit
def _turn(
    source,
    out,
    stored,
    inside,
    position,
    inv_freq,
    magnitude,
    weight,
    eps,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    RETURNS: tl.constexpr,
    STORES: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Norm and rotate the heads at ``source [X, 1]`` into those at ``out``, if RETURNS, and at ``stored``, if
    STORES."""
    # Load the pairs, and the elements that are not rotated.
    kind: tl.constexpr = source.dtype.element_ty
    stored_kind: tl.constexpr = stored.dtype.element_ty
    a, b = _load_pairs(source, inside, E, INTERLEAVED, BLOCK_HALF)
    if E < D:
        i = E + tl.arange(0, BLOCK_REST)[None, :]
        in_rest = inside & (i < D)
        rest = tl.load(source + i, in_rest, 0.0).to(tl.float32)

    # Norm.
    if HAS_NORM:
        total = tl.sum(a * a + b * b, 1)
        if E < D:
            total += tl.sum(rest * rest, 1)
        norm = (1.0 / tl.sqrt_rn(total / D + eps))[:, None]
        one = tl.arange(0, 1)[:, None]
        weight_a, weight_b = _load_pairs(weight + one, one == 0, E, INTERLEAVED, BLOCK_HALF)
        weight_kind: tl.constexpr = weight.dtype.element_ty
        a = _normed(a, norm, weight_a, weight_kind, kind)
        b = _normed(b, norm, weight_b, weight_kind, kind)
        if E < D:
            weight_rest = tl.load(weight + i, i < D, 0.0).to(tl.float32)
            rest = _normed(rest, norm, weight_rest, weight_kind, kind)

    # Rotate.
    j = tl.arange(0, BLOCK_HALF)[None, :]
    c, s = _cos_sin(position * tl.load(inv_freq + j, j < E // 2, 0.0))
    c = c * magnitude
    s = s * magnitude
    rotated_a = (a * c - b * s).to(kind).to(tl.float32)
    rotated_b = (b * c + a * s).to(kind).to(tl.float32)

    # Write the results.
    if RETURNS:
        _store_pairs(out, rotated_a, rotated_b, inside, E, INTERLEAVED, BLOCK_HALF)
        if E < D:
            tl.store(out + i, rest.to(kind), in_rest)
    if STORES:
        scaled_a = _scaled(rotated_a, scale, stored_kind)
        scaled_b = _scaled(rotated_b, scale, stored_kind)
        _store_pairs(stored, scaled_a, scaled_b, inside, E, INTERLEAVED, BLOCK_HALF)
        if E < D:
            tl.store(stored + i, _scaled(rest, scale, stored_kind).to(stored_kind), in_rest)


@triton.jit(do_not_specialize=["first_row", "row_stride", "num_nodes"])
def _rope_store(
    qkv,
    positions,
    inv_freq,
    magnitude,
    q_norm,
    k_norm,
    q,
    k,
    v,
    k_rows,
    v_rows,
    rows,
    first_row,
    row_stride,
    num_nodes,
    num_rows,
    eps,
    k_scale,
    v_scale,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    RETURNS: tl.constexpr,
    STORES: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm, rotate and store some heads of one token: query heads, then key heads, then value heads. Grid
    ``(T, blocks of heads)``; if COUNTS, rows follow the rule of ``WindowRows``."""
    wait_for_launch(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(positions + token).to(tl.float32)
    Q_PARTS: tl.constexpr = (HQ + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_PARTS: tl.constexpr = (HKV + BLOCK_HEADS - 1) // BLOCK_HEADS
    source = qkv + token * (HQ + 2 * HKV) * D
    block = tl.arange(0, BLOCK_HEADS)[:, None]
    if part < Q_PARTS:
        # Query heads.
        head = part * BLOCK_HEADS + block
        out = q + (token * HQ + head) * D
        _turn(
            source + head * D,
            out,
            out,
            head < HQ,
            position,
            inv_freq,
            magnitude,
            q_norm,
            eps,
            1.0,
            D,
            E,
            INTERLEAVED,
            HAS_NORM,
            True,
            False,
            BLOCK_HALF,
            BLOCK_REST,
        )
    else:
        # Where keys and values are returned and stored.
        head = (part - Q_PARTS) % KV_PARTS * BLOCK_HEADS + block
        returned = (token * HKV + head) * D
        stored = returned
        if STORES:
            if COUNTS:
                row = first_row + token // num_nodes * row_stride + token % num_nodes
            else:
                row = tl.load(rows + token)
            stored = (head.to(tl.int64) * num_rows + row) * D
        if part < Q_PARTS + KV_PARTS:
            # Key heads.
            _turn(
                source + (HQ + head) * D,
                k + returned,
                k_rows + stored,
                head < HKV,
                position,
                inv_freq,
                magnitude,
                k_norm,
                eps,
                k_scale,
                D,
                E,
                INTERLEAVED,
                HAS_NORM,
                RETURNS,
                STORES,
                BLOCK_HALF,
                BLOCK_REST,
            )
        else:
            # Value heads, copied.
            i = tl.arange(0, BLOCK_D)[None, :]
            inside = (head < HKV) & (i < D)
            value = tl.load(source + (HQ + HKV + head) * D + i, inside, 0.0)
            if RETURNS:
                tl.store(v + returned + i, value, inside)
            if STORES:
                kind: tl.constexpr = v_rows.dtype.element_ty
                tl.store(v_rows + stored + i, _scaled(value.to(tl.float32), v_scale, kind).to(kind), inside)


def _blocks(num_heads: int, head_dim: int, rotated: int) -> dict[str, int]:
    """Block sizes. 1,024 pairs per program are 16 bytes of each half per thread in half dtypes: one load
    each, and at 16 programs per multiprocessor enough in flight for an H200; a single token still uses
    several multiprocessors. What is not rotated counts as well: it is in registers too."""
    half = triton.next_power_of_2(max(1, rotated // 2))
    rest = triton.next_power_of_2(max(1, head_dim - rotated))
    heads = max(1, 1024 // (half + rest // 2))
    return {
        "BLOCK_HEADS": min(triton.next_power_of_2(num_heads), 1 << (heads.bit_length() - 1)),
        "BLOCK_HALF": half,
        "BLOCK_REST": rest,
        "BLOCK_D": triton.next_power_of_2(head_dim),
    }


def _num_warps(blocks: dict[str, int]) -> int:
    pairs = blocks["BLOCK_HALF"] + blocks["BLOCK_REST"] // 2
    return min(4, max(1, blocks["BLOCK_HEADS"] * pairs // 256))


def _outputs(
    qkv: torch.Tensor, num_heads: int, returns_kv: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_tokens, all_heads, head_dim = qkv.shape
    kv_shape = (num_tokens if returns_kv else 0, (all_heads - num_heads) // 2, head_dim)
    return qkv.new_empty((num_tokens, num_heads, head_dim)), qkv.new_empty(kv_shape), qkv.new_empty(kv_shape)


@custom_operator("eagle_kit::rope_store", mutates_args=("k_rows", "v_rows"))
def rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    magnitude: float,
    num_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    interleaved: bool,
    k_rows: torch.Tensor | None,
    v_rows: torch.Tensor | None,
    rows: torch.Tensor | None,
    rule: list[int],
    k_scale: float,
    v_scale: float,
    returns_kv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``qkv [T, Hq + 2 Hkv, D]``, ``positions [T]`` and ``inv_freq [E / 2]``, all contiguous -> q, k and v; k
    and v are written to ``k_rows`` and ``v_rows [Hkv, R, D]`` if given, at ``rows [T]`` or by the ``rule`` of
    :class:`~.plan.WindowRows` (first, stride, nodes)."""
    q, k, v = _outputs(qkv, num_heads, returns_kv)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    rotated = 2 * len(inv_freq)
    if num_tokens == 0:
        return q, k, v
    assert k_rows is None or v_rows is None or (k_rows.is_contiguous() and v_rows.is_contiguous())
    blocks = _blocks(num_heads, head_dim, rotated)
    heads = blocks["BLOCK_HEADS"]
    grid = (num_tokens, triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads))
    first_row, row_stride, num_nodes = rule or (0, 0, 0)

    # Norms, stores and rows that are not there are not read: any tensors do.
    _rope_store[grid](
        qkv,
        positions,
        inv_freq,
        magnitude,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        q,
        k,
        v,
        k if k_rows is None else k_rows,
        v if v_rows is None else v_rows,
        positions if rows is None else rows,
        first_row,
        row_stride,
        num_nodes,
        0 if k_rows is None else k_rows.shape[1],
        eps,
        k_scale,
        v_scale,
        HQ=num_heads,
        HKV=num_kv_heads,
        D=head_dim,
        E=rotated,
        INTERLEAVED=interleaved,
        HAS_NORM=q_norm is not None,
        RETURNS=returns_kv,
        STORES=k_rows is not None,
        COUNTS=bool(rule),
        **blocks,
        num_warps=_num_warps(blocks),
        **launch_options(qkv.device),
    )
    return q, k, v


@rope_store.register_fake
def _(qkv, positions, inv_freq, magnitude, num_heads, *others):
    return _outputs(qkv, num_heads, others[-1])
