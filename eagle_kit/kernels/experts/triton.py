"""Routed experts in four launches, with nothing read on the host: the routing sorted by expert, gate and up
with SwiGLU, down, and the weighted sum over a token's experts.

The pairs (token, expert) are put in the order of their experts. An expert's pairs are cut into blocks of
rows; how many there are is known on the device only, so the grid has as many programs as there can be, and
those beyond the last block end at once. A program finds its expert from the number of pairs of every expert.

Bytes: the weights of the experts that are chosen once for each of their blocks of rows, ``x`` and the inner
states once for each block of outputs (out of L2), and 3 T K H + 2 T K I elements in between.

Legend: T tokens, E experts, K experts of a token, H hidden size, I intermediate size of an expert.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from eagle_kit.kernels.aot import Variant

ALIGN_BLOCK, COMBINE_BLOCK, COMBINE_WARPS = 1024, 512, 2  # 8 values a thread: loads of 16 bytes


@triton.jit(do_not_specialize=["count"])
def _sort_by_expert(ids, order, starts, count, BLOCK: tl.constexpr):
    """Program e writes where the pairs of expert e begin, and the numbers of these pairs, ascending."""
    expert, lane = tl.program_id(0), tl.arange(0, BLOCK)
    begin = 0
    for first in range(0, count, BLOCK):
        chosen = tl.load(ids + first + lane, first + lane < count, 1 << 30)
        begin += tl.sum((chosen < expert).to(tl.int32), 0)
    tl.store(starts + expert, begin)
    for first in range(0, count, BLOCK):
        mine = tl.load(ids + first + lane, first + lane < count, -1) == expert
        place = begin + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + place, first + lane, mine)
        begin += tl.sum(mine.to(tl.int32), 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts + expert + 1, begin)


@triton.jit
def _find_rows(order, starts, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Find the expert of a program, its places in the order, which of them are its own, and the pairs there.
    Beyond the last block the expert is ``num_experts`` or more, and the rest means nothing."""
    e, number = tl.arange(0, EXPERTS), tl.program_id(0)
    begins = tl.load(starts + e, e < num_experts, 0)
    blocks = (tl.load(starts + e + 1, e < num_experts, 0) - begins + ROWS - 1) // ROWS
    ends = tl.cumsum(blocks, 0)
    expert = tl.sum((ends <= number).to(tl.int32), 0)
    block = number - tl.sum(tl.where(ends <= number, blocks, 0), 0)
    known = tl.minimum(expert, num_experts - 1)
    places = tl.load(starts + known) + block * ROWS + tl.arange(0, ROWS)
    mine = places < tl.load(starts + known + 1)
    return expert, places, mine, tl.load(order + places, mine, 0)


@triton.jit
def _gate_up(
    x, order, starts, weight, inner, num_experts, chosen, hidden, size,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply rows of an expert by its gate and its up, and keep ``silu(gate) up`` in the sorted order."""
    expert, places, mine, pairs = _find_rows(order, starts, num_experts, EXPERTS, ROWS)
    if expert >= num_experts:
        return
    n, k = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, BLOCK)
    x_at = x + (pairs // chosen).to(tl.int64)[:, None] * hidden + k[None, :]
    step = tl.cast(size, tl.int64) * hidden
    w_at = weight + 2 * expert.to(tl.int64) * step + n.to(tl.int64)[:, None] * hidden + k[None, :]
    gate = tl.zeros((ROWS, OUTPUTS), tl.float32)
    up = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, hidden, BLOCK):
        inside = (first + k < hidden)[None, :]
        rows = tl.load(x_at + first, mine[:, None] & inside, 0.0)
        present = (n < size)[:, None] & inside
        gate = tl.dot(rows, tl.trans(tl.load(w_at + first, present, 0.0)), gate, input_precision="ieee")
        up = tl.dot(rows, tl.trans(tl.load(w_at + step + first, present, 0.0)), up, input_precision="ieee")
    to = inner + places.to(tl.int64)[:, None] * size + n[None, :]
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(to, value.to(inner.dtype.element_ty), mine[:, None] & (n < size)[None, :])


@triton.jit
def _down(
    inner, order, starts, weight, out, num_experts, hidden, size,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply inner states of an expert by its down, each into the row of its pair."""
    expert, places, mine, pairs = _find_rows(order, starts, num_experts, EXPERTS, ROWS)
    if expert >= num_experts:
        return
    n, k = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, BLOCK)
    x_at = inner + places.to(tl.int64)[:, None] * size + k[None, :]
    w_at = weight + (expert.to(tl.int64) * hidden + n)[:, None] * size + k[None, :]
    acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, size, BLOCK):
        inside = (first + k < size)[None, :]
        rows = tl.load(x_at + first, mine[:, None] & inside, 0.0)
        columns = tl.load(w_at + first, (n < hidden)[:, None] & inside, 0.0)
        acc = tl.dot(rows, tl.trans(columns), acc, input_precision="ieee")
    to = out + pairs.to(tl.int64)[:, None] * hidden + n[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mine[:, None] & (n < hidden)[None, :])


@triton.jit
def _combine(parts, weights, out, chosen, hidden, BLOCK: tl.constexpr):
    """Add up the weighted outputs of a token's experts, in their order."""
    token, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(chosen):
        part = tl.load(parts + (token * chosen + k) * hidden + h, h < hidden, 0.0).to(tl.float32)
        total += part * tl.load(weights + token * chosen + k)
    tl.store(out + token * hidden + h, total.to(out.dtype.element_ty), h < hidden)


class ExpertBlocks(NamedTuple):
    """Tile sizes in rows, outputs and inputs, and launch options. At most 72 KB of tiles, which fit anywhere:
    one program a multiprocessor of 99 KB, two or more elsewhere."""

    rows: int
    outputs: int
    block: int
    num_warps: int
    num_stages: int


def choose_blocks(pairs_per_expert: float, itemsize: int) -> ExpertBlocks:
    """Tiles for a number of rows of an expert: few rows are a matter of reading weights."""
    rows = 16 if pairs_per_expert <= 16 else 32 if pairs_per_expert <= 64 else 64
    return ExpertBlocks(rows, 64, 128 // itemsize, 4, 3)


@torch.library.custom_op("eagle_kit::routed_experts", mutates_args=())
def routed_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """``x [T, H]``, ``ids`` int64 and ``weights`` fp32 ``[T, K]``, ``gate_up [E, 2 I, H]`` and ``down [E, H,
    I]``, all contiguous -> ``[T, H]``."""
    (tokens, hidden), chosen = x.shape, ids.shape[1]
    experts, size, pairs = len(down), down.shape[2], tokens * chosen
    out = torch.empty_like(x)
    if pairs == 0:
        return out.zero_()
    order = ids.new_empty(pairs, dtype=torch.int32)
    starts = ids.new_empty(experts + 1, dtype=torch.int32)
    _sort_by_expert[(experts,)](ids, order, starts, pairs, BLOCK=ALIGN_BLOCK, num_warps=4)
    blocks = choose_blocks(pairs / experts, x.element_size())
    constants = {
        "EXPERTS": triton.next_power_of_2(experts),
        "ROWS": blocks.rows,
        "OUTPUTS": blocks.outputs,
        "BLOCK": blocks.block,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }
    most = pairs // blocks.rows + min(experts, pairs)
    inner, parts = x.new_empty(pairs, size), x.new_empty(pairs, hidden)
    grid = (most, triton.cdiv(size, blocks.outputs))
    _gate_up[grid](x, order, starts, gate_up, inner, experts, chosen, hidden, size, **constants)
    grid = (most, triton.cdiv(hidden, blocks.outputs))
    _down[grid](inner, order, starts, down, parts, experts, hidden, size, **constants)
    grid = (tokens, triton.cdiv(hidden, COMBINE_BLOCK))
    _combine[grid](parts, weights, out, chosen, hidden, BLOCK=COMBINE_BLOCK, num_warps=COMBINE_WARPS)
    return out


@routed_experts.register_fake
def _(x, ids, weights, gate_up, down):
    return torch.empty_like(x)


def variants() -> list[Variant]:
    """Kernels to compile ahead of time: Mixtral's 8 experts and DeepSeek-V3's 256, few rows and many, for the
    GPUs whose grouped matmul reads on the host, and for Hopper in other dtypes than bf16."""
    integers = ("num_experts", "chosen", "hidden", "size", "count")
    made = []

    def add(name, kernel, kinds, constants, **options):
        types = {
            each: kinds.get(each, "i32" if each in integers else f"*{kinds['']}")
            for each in kernel.arg_names
            if not each.isupper()
        }
        aligned = tuple(each for each in ("hidden", "size") if each in types)
        made.append(Variant(f"experts {name}", kernel, types, constants, aligned=aligned, **options))

    routing = {"order": "*i32", "starts": "*i32", "ids": "*i64", "weights": "*fp32"}
    add(
        "sort",
        _sort_by_expert,
        {"": "i32", **routing},
        {"BLOCK": ALIGN_BLOCK},
        narrow="ids of a few hundred bytes",
    )
    for kind, experts, rows in (("bf16", 8, 2), ("bf16", 256, 2), ("bf16", 8, 400), ("fp16", 64, 40)):
        blocks = choose_blocks(rows, 2)
        constants = {
            "EXPERTS": experts,
            "ROWS": blocks.rows,
            "OUTPUTS": blocks.outputs,
            "BLOCK": blocks.block,
        }
        options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
        for name, kernel in (("gate up", _gate_up), ("down", _down)):
            add(
                f"{name} {kind} E{experts} rows {blocks.rows}",
                kernel,
                {"": kind, **routing},
                constants,
                **options,
            )
    add("combine", _combine, {"": "bf16", **routing}, {"BLOCK": COMBINE_BLOCK}, num_warps=COMBINE_WARPS)
    return made
