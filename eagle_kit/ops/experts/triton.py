"""Routed experts in four launches, with nothing read on the host: the routing sorted by expert, gate and up
with SwiGLU, down, and the weighted sum over a token's experts.

The pairs (token, expert) are sorted by expert. An expert's pairs are cut into blocks of rows. The number of
blocks is known on the device only, so the grid has as many programs as there can be blocks, and programs
beyond the last block end at once. A program finds its expert from the number of pairs of every expert.

e4m3 weights are widened in registers on their way into the dot. With a scale for each output (SCALED) they
are scaled after the sum over K; with scales of blocks (GROUPED) the product of each tile, whose columns share
them, is scaled in fp32 before it is added. No scaled weight is rounded.

Bytes: the weights of the experts that are chosen once for each of their blocks of rows, ``x`` and the inner
states once for each block of outputs (out of L2), and 3 T K H + 2 T K I elements in between.

Legend: T tokens, E experts, K experts of a token, H hidden size, I intermediate size of an expert. In
kernels: ``pair`` the number t K + k of a token's k-th expert, ``n`` outputs of a tile, ``k`` its inputs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from eagle_kit.ops.capability import device_facts
from eagle_kit.ops.custom_operator import custom_operator
from eagle_kit.ops.fp8 import E4M3
from eagle_kit.ops.fp8_bits import widened

ALIGN_BLOCK = 1024
"""Pairs that a program of ``_sort_by_expert`` reads at a time."""
COMBINE_BLOCK = 512
"""Outputs of a program of ``_combine``."""
COMBINE_WARPS = 2
"""Warps of ``_combine``: 8 values a thread, so loads of 16 bytes."""


@triton.jit(do_not_specialize=["count"])
def _sort_by_expert(ids, order, starts, count, BLOCK: tl.constexpr):
    """Sort the pairs of one expert: where they begin goes to ``starts [E + 1]``, their numbers, ascending, to
    ``order [T K]``. Grid ``(E,)``."""
    # Count the pairs of the experts before this one.
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    begin = 0
    for first in range(0, count, BLOCK):
        chosen = tl.load(ids + first + lane, first + lane < count, 1 << 30)
        begin += tl.sum((chosen < expert).to(tl.int32), 0)
    tl.store(starts + expert, begin)

    # Store its own ones behind them.
    for first in range(0, count, BLOCK):
        is_own = tl.load(ids + first + lane, first + lane < count, -1) == expert
        place = begin + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order + place, first + lane, is_own)
        begin += tl.sum(is_own.to(tl.int32), 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts + expert + 1, begin)


@triton.jit
def _find_rows(order, starts, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Find the expert of a program, the places of its rows in the order, which of them are the expert's, and
    the pairs there. Beyond the last block the expert is ``num_experts`` or more, and the rest is
    meaningless."""
    # The expert: the first whose blocks end behind this program's.
    e = tl.arange(0, EXPERTS)
    number = tl.program_id(0)
    begins = tl.load(starts + e, e < num_experts, 0)
    blocks = (tl.load(starts + e + 1, e < num_experts, 0) - begins + ROWS - 1) // ROWS
    ends = tl.cumsum(blocks, 0)
    expert = tl.sum((ends <= number).to(tl.int32), 0)

    # Its rows.
    block = number - tl.sum(tl.where(ends <= number, blocks, 0), 0)
    known = tl.minimum(expert, num_experts - 1)
    places = tl.load(starts + known) + block * ROWS + tl.arange(0, ROWS)
    is_row = places < tl.load(starts + known + 1)
    return expert, places, is_row, tl.load(order + places, is_row, 0)


@triton.jit
def _add_product(acc, rows, weight, scale_at, is_output, GROUPED: tl.constexpr):
    """Add ``rows`` times ``weight`` transposed; if GROUPED, times the scales ``scale_at`` of its outputs."""
    if weight.dtype == tl.int8:
        weight = widened(weight)
    columns = tl.trans(weight.to(rows.dtype))
    if GROUPED:
        product = tl.dot(rows, columns, input_precision="ieee")
        return acc + product * tl.load(scale_at, is_output, 0.0)[None, :]
    return tl.dot(rows, columns, acc, input_precision="ieee")


@triton.jit
def _gate_up(
    x, order, starts, weight, scales, inner, num_experts, chosen, hidden, size, group_rows, group_size,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Multiply a block of rows of an expert by a tile of its gate and its up, and store ``silu(gate) up`` in
    the sorted order, ``inner [T K, I]``. Grid ``(most blocks, tiles of I)``."""
    expert, places, is_row, pairs = _find_rows(order, starts, num_experts, EXPERTS, ROWS)
    if expert >= num_experts:
        return

    # Addresses of the rows, of the gate's weights, and of the scales. The up's weights are ``up_offset`` on.
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, BLOCK)
    x_at = x + (pairs // chosen).to(tl.int64)[:, None] * hidden + k[None, :]
    up_offset = tl.cast(size, tl.int64) * hidden
    w_at = weight + 2 * expert.to(tl.int64) * up_offset + n.to(tl.int64)[:, None] * hidden + k[None, :]
    groups = tl.cdiv(hidden, group_size)
    first_scale = expert.to(tl.int64) * tl.cdiv(2 * size, group_rows)
    gate_scale = scales + (first_scale + n // group_rows) * groups
    up_scale = scales + (first_scale + (size + n) // group_rows) * groups

    # Both products, a block of inputs at a time.
    gate = tl.zeros((ROWS, OUTPUTS), tl.float32)
    up = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, hidden, BLOCK):
        is_input = (first + k < hidden)[None, :]
        rows = tl.load(x_at + first, is_row[:, None] & is_input, 0.0)
        w_mask = (n < size)[:, None] & is_input
        w = tl.load(w_at + first, w_mask, 0.0)
        group = first // group_size
        gate = _add_product(gate, rows, w, gate_scale + group, n < size, GROUPED)
        w = tl.load(w_at + up_offset + first, w_mask, 0.0)
        up = _add_product(up, rows, w, up_scale + group, n < size, GROUPED)
    if SCALED:
        gate *= tl.load(gate_scale, n < size, 0.0)[None, :]
        up *= tl.load(up_scale, n < size, 0.0)[None, :]

    # The activation.
    inner_at = inner + places.to(tl.int64)[:, None] * size + n[None, :]
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(inner_at, value.to(inner.dtype.element_ty), is_row[:, None] & (n < size)[None, :])


@triton.jit
def _down(
    inner, order, starts, weight, scales, out, num_experts, hidden, size, group_rows, group_size,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Multiply a block of inner states of an expert by a tile of its down; a result goes to the row of its
    pair in ``out [T K, H]``. Grid ``(most blocks, tiles of H)``."""
    expert, places, is_row, pairs = _find_rows(order, starts, num_experts, EXPERTS, ROWS)
    if expert >= num_experts:
        return

    # Addresses of the rows, the weights and the scales.
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, BLOCK)
    x_at = inner + places.to(tl.int64)[:, None] * size + k[None, :]
    w_at = weight + (expert.to(tl.int64) * hidden + n)[:, None] * size + k[None, :]
    first_scale = expert.to(tl.int64) * tl.cdiv(hidden, group_rows)
    scale_at = scales + (first_scale + n // group_rows) * tl.cdiv(size, group_size)

    # The product, a block of inputs at a time.
    acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, size, BLOCK):
        is_input = (first + k < size)[None, :]
        rows = tl.load(x_at + first, is_row[:, None] & is_input, 0.0)
        w = tl.load(w_at + first, (n < hidden)[:, None] & is_input, 0.0)
        acc = _add_product(acc, rows, w, scale_at + first // group_size, n < hidden, GROUPED)
    if SCALED:
        acc *= tl.load(scale_at, n < hidden, 0.0)[None, :]
    out_at = out + pairs.to(tl.int64)[:, None] * hidden + n[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), is_row[:, None] & (n < hidden)[None, :])


@triton.jit
def _combine(parts, ids, weights, out, num_experts, chosen, hidden, BLOCK: tl.constexpr):
    """Add up the weighted outputs of a token's experts, in their order. Grid ``(T, blocks of H)``."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(chosen):
        # The rows of other processes' experts were not written, and are not read.
        width = tl.where(tl.load(ids + token * chosen + k) < num_experts, hidden, 0)
        part = tl.load(parts + (token * chosen + k) * hidden + h, h < width, 0.0).to(tl.float32)
        total += part * tl.load(weights + token * chosen + k)
    tl.store(out + token * hidden + h, total.to(out.dtype.element_ty), h < hidden)


class ExpertBlocks(NamedTuple):
    """Tile sizes in rows, outputs and inputs, and launch options. The tiles take at most 72 KB: one program
    fits on a multiprocessor of 99 KB, two or more on others."""

    rows: int
    outputs: int
    block: int
    num_warps: int
    num_stages: int


def choose_blocks(pairs_per_expert: float, itemsize: int, *, narrow: bool = False) -> ExpertBlocks:
    """Tiles for a number of rows of an expert. With few rows, reading the weights takes the time: ``narrow``
    weights, in fp8, then have twice as many inputs in a tile. With many rows they have half as many outputs,
    since widening takes registers."""
    if pairs_per_expert <= 16:
        rows = 16
    elif pairs_per_expert <= 64:
        rows = 32
    else:
        rows = 64
    if not narrow:
        return ExpertBlocks(rows, 64, 128 // itemsize, 4, 3)
    outputs, width = (64, 256) if rows < 64 else (32, 128)
    return ExpertBlocks(rows, outputs, width // itemsize, 4, 3)


def _operands(
    weight: torch.Tensor, scales: torch.Tensor | None, block: Sequence[int], x: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, int], dict[str, bool]]:
    """Weight ``[E, N, K]`` and scales, rows and columns that share a scale, and the constants of the way in
    which scales are applied."""
    experts, rows, columns = weight.shape
    group_rows, group_size = block or (1, columns)
    assert weight.is_contiguous() and (weight.dtype == x.dtype) == (scales is None)
    if scales is None:
        return (weight, x), (group_rows, group_size), {"SCALED": False, "GROUPED": False}
    assert weight.dtype == E4M3 and scales.dtype == torch.float32 and scales.is_contiguous()
    assert scales.shape == (experts, triton.cdiv(rows, group_rows), triton.cdiv(columns, group_size))
    values = weight if device_facts(x.device).converts_fp8 else weight.view(torch.int8)
    return (values, scales), (group_rows, group_size), {"SCALED": not block, "GROUPED": bool(block)}


@custom_operator("eagle_kit::routed_experts")
def routed_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor | None,
    gate_up_block: Sequence[int],
    down: torch.Tensor,
    down_scales: torch.Tensor | None,
    down_block: Sequence[int],
) -> torch.Tensor:
    """``x [T, H]``, ``ids`` int64 (E: of another process) and ``weights`` fp32 ``[T, K]``, ``gate_up
    [E, 2 I, H]`` and ``down [E, H, I]`` in the dtype of ``x`` or in e4m3 with scales of rows ``[E, N, 1]`` or
    of a block of rows and columns, all contiguous -> ``[T, H]``."""
    tokens, hidden = x.shape
    chosen = ids.shape[1]
    experts = len(down)
    size = down.shape[2]
    pairs = tokens * chosen
    out = torch.empty_like(x)
    if pairs == 0:
        return out.zero_()

    # Sort the routing by expert.
    order = ids.new_empty(pairs, dtype=torch.int32)
    starts = ids.new_empty(experts + 1, dtype=torch.int32)
    _sort_by_expert[(experts,)](ids, order, starts, pairs, BLOCK=ALIGN_BLOCK, num_warps=4)
    blocks = choose_blocks(pairs / experts, x.element_size(), narrow=gate_up_scales is not None)
    constants = {
        "EXPERTS": triton.next_power_of_2(experts),
        "ROWS": blocks.rows,
        "OUTPUTS": blocks.outputs,
        "BLOCK": blocks.block,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }
    most_blocks = pairs // blocks.rows + min(experts, pairs)

    # Gate and up, with their activation.
    inner = x.new_empty(pairs, size)
    grid = (most_blocks, triton.cdiv(size, blocks.outputs))
    operands, group, scaling = _operands(gate_up, gate_up_scales, gate_up_block, x)
    assert not scaling["GROUPED"] or group[1] % blocks.block == 0
    _gate_up[grid](
        x, order, starts, *operands, inner, experts, chosen, hidden, size, *group, **scaling, **constants
    )

    # Down.
    parts = x.new_empty(pairs, hidden)
    grid = (most_blocks, triton.cdiv(hidden, blocks.outputs))
    operands, group, scaling = _operands(down, down_scales, down_block, x)
    assert not scaling["GROUPED"] or group[1] % blocks.block == 0
    _down[grid](inner, order, starts, *operands, parts, experts, hidden, size, *group, **scaling, **constants)

    # The weighted sum.
    grid = (tokens, triton.cdiv(hidden, COMBINE_BLOCK))
    _combine[grid](
        parts, ids, weights, out, experts, chosen, hidden, BLOCK=COMBINE_BLOCK, num_warps=COMBINE_WARPS
    )
    return out


@routed_experts.register_fake
def _(x, ids, weights, gate_up, gate_up_scales, gate_up_block, down, down_scales, down_block):
    return torch.empty_like(x)
