"""Linear layers of at most 64 rows with the operands swapped, the sum split over K, and no atomics.

``y^T = W x^T``: 64 rows of the weight are the M side of the dot and the few rows of x its N side, so that
matrix instructions multiply little padding. A program sums one run of K for one block of outputs; with S > 1
runs it stores fp32 partial sums, and a second launch adds them in their order. e4m3 weights are widened in
registers on their way into the dot, where the GPU has no instruction for it by their bits. With a scale for
each output (SCALED) ``y_n = scale_n sum_k w8_nk x_k`` is scaled after the sum; with scales of blocks
(GROUPED; DeepSeek-V3, arXiv 2412.19437, section 3.3) the product of each tile, whose columns share them, is
scaled in fp32 before it is added. No scaled weight is rounded.

GATED layers are gate and up of SwiGLU, one below the other. Their rows alternate in a block, so that a
program, or the second launch, has gate and up of an output and writes ``silu(gate) up`` only, rounded as the
separate activation rounds it.

Bytes: the weight once, x once per block of outputs (out of L2), and 8 S M N for partial sums. S depends on N
and K only, so that K is summed in the same runs for any M.

Legend: M rows, N outputs, K inputs, S runs. In kernels: ``m`` rows, ``n`` outputs, ``k`` inputs of a tile.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

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
from eagle_kit.ops.fp8 import E4M3
from eagle_kit.ops.fp8_bits import widened
from eagle_kit.ops.small_linear.reference import MAX_ROWS

PROGRAMS = 2
"""Programs of ``_multiply`` that fit on a multiprocessor."""
AHEAD = tl.constexpr(4)
"""Tiles of the weight that a program brings to the cache before it waits: 64 KB in bf16, 17 MB of an H200's
50 for all that are there at once."""


@triton.jit
def _finish(value, scales, bias, n, inside, SCALED: tl.constexpr, BIASED: tl.constexpr):
    """Apply the scales and the bias of the outputs ``n`` to their sums."""
    if SCALED:
        value *= tl.load(scales + n, inside, 0.0)
    if BIASED:
        value += tl.load(bias + n, inside, 0.0).to(tl.float32)
    return value


@triton.jit
def _activated(gate, up, kind: tl.constexpr):
    """``silu(gate) up``, rounded to ``kind`` as separate operations round it."""
    gate = gate.to(kind).to(tl.float32)
    up = up.to(kind).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up


@triton.jit(do_not_specialize=["num_rows", "splits"])
def _multiply(
    x, weight, scales, bias, out, num_rows, num_outputs, size, weight_stride, splits, group_rows, group_size,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, GROUPED: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a block of outputs and a run of K, for all rows. Grid ``(blocks of N, S)``.

    EVEN if K is a multiple of BLOCK. With PDL, the first tiles of the weight are brought to the cache while
    the launch before still runs.
    """
    # The outputs of this block; of GATED layers gate and up alternate.
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = n < num_outputs
    if GATED:
        n = n // 2 + n % 2 * (num_outputs // 2)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)
    run = tl.cdiv(tl.cdiv(size, BLOCK), splits) * BLOCK
    first = tl.program_id(1) * run

    # Addresses of the weight, whose first tiles are brought to the cache, and of x. Outputs behind the last
    # repeat it.
    n_clamped = tl.minimum(n, num_outputs - 1)
    w_rows = weight + n_clamped.to(tl.int64) * weight_stride
    if PDL:
        gdc_launch_dependents()
        LINES: tl.constexpr = AHEAD * BLOCK * (weight.dtype.element_ty.primitive_bitwidth // 8) // LINE
        prefetch_rows(w_rows, first, size, LINES)
        gdc_wait()
    w_at = w_rows[:, None] + k[None, :]
    if GROUPED:
        scale_at = scales + n_clamped // group_rows * tl.cdiv(size, group_size)
    x_at = x + m[:, None] * size + k[None, :]
    is_row = (m < num_rows)[:, None]

    # The product, transposed, a tile of K at a time.
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(first, tl.minimum(first + run, size), BLOCK):
        if EVEN:
            w = tl.load(w_at + start)
            rows = tl.load(x_at + start, is_row, 0.0)
        else:
            is_input = (start + k < size)[None, :]
            w = tl.load(w_at + start, is_input, 0.0)
            rows = tl.load(x_at + start, is_row & is_input, 0.0)
        if weight.dtype.element_ty == tl.int8:
            w = widened(w)
        if GROUPED:
            scale = tl.load(scale_at + start // group_size)
            acc += tl.dot(w.to(rows.dtype), tl.trans(rows)) * scale[:, None]
        else:
            acc = tl.dot(w.to(rows.dtype), tl.trans(rows), acc)

    # Partial sums are stored as they are, [S, M, N]; whole ones are finished, and activated in pairs.
    row_at = m.to(tl.int64)
    if SPLIT:
        row_at += tl.program_id(1) * num_rows
    else:
        acc = _finish(acc, scales, bias, n[:, None], is_output[:, None], SCALED, BIASED)
    if GATED and not SPLIT:
        pairs = tl.permute(tl.reshape(acc, [OUTPUTS // 2, 2, ROWS]), [0, 2, 1])
        gate, up = tl.split(pairs)
        acc = _activated(gate, up, out.dtype.element_ty)
        num_outputs = num_outputs // 2
        n = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        is_output = n < num_outputs
    out_at = out + row_at[None, :] * num_outputs + n[:, None]
    tl.store(out_at, acc.to(out.dtype.element_ty), (m < num_rows)[None, :] & is_output[:, None])


@triton.jit
def _sum_of_runs(
    partial, scales, bias, n, inside, num_rows, num_outputs, splits,
    SCALED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Sum of the runs of the outputs ``n`` of a program's row, finished."""
    first = tl.program_id(1).to(tl.int64) * num_outputs + n
    run_stride = tl.cast(num_rows, tl.int64) * num_outputs
    total = n * 0.0
    for split in range(splits):
        total += tl.load(partial + split * run_stride + first, inside, 0.0)
    return _finish(total, scales, bias, n, inside, SCALED, BIASED)


@triton.jit(do_not_specialize=["num_rows", "splits"])
def _add_up(
    partial, scales, bias, out, num_rows, num_outputs, splits,
    SCALED: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of some outputs of one row in the order of K. Grid ``(blocks of outputs, M)``."""
    wait_for_launch(PDL)
    size = num_outputs // 2 if GATED else num_outputs
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < size
    total = _sum_of_runs(partial, scales, bias, n, inside, num_rows, num_outputs, splits, SCALED, BIASED)
    if GATED:
        up = _sum_of_runs(
            partial, scales, bias, n + size, inside, num_rows, num_outputs, splits, SCALED, BIASED
        )  # fmt: skip
        total = _activated(total, up, out.dtype.element_ty)
    out_at = tl.program_id(1).to(tl.int64) * size + n
    tl.store(out + out_at, total.to(out.dtype.element_ty), inside)


class LinearBlocks(NamedTuple):
    """Tile sizes in outputs and inputs, and launch options."""

    outputs: int
    block: int
    num_warps: int
    num_stages: int


def row_bucket(m: int) -> int:
    """Number of rows computed for M: 16, 32 or 64."""
    return max(16, 1 << max(0, m - 1).bit_length())


def choose_blocks(rows: int, itemsize: int, facts: DeviceFacts) -> LinearBlocks:
    """Tiles for a bucket of M.

    A tile is 16 KB of bf16 weights or 8 KB of fp8, and 4, 8 or 16 KB of x. There are as many stages as fit
    ``PROGRAMS`` times on a multiprocessor. An H200's latency needs 23 KB in flight; these are over 70 there.
    """
    stages = 4 if rows < 64 else 3
    if itemsize == 1:
        stages = 6 if rows < 64 else 4
    block = 64 if facts.is_small and itemsize == 2 else 128
    block, stages = facts.fit(block, stages, 64 * itemsize + 2 * rows, programs=PROGRAMS)
    return LinearBlocks(64, block, 4, stages)


@cache
def choose_splits(programs: int, tiles: int, slots: int) -> int:
    """Number of runs of K for ``programs`` blocks of outputs of ``tiles`` tiles each, where ``slots`` fit on
    the GPU.

    The cost in tiles (1 microsecond on an H200): the number of waves times the tiles of a program and one for
    its startup; and three for the second launch.
    """

    def cost(splits: int) -> int:
        waves = triton.cdiv(programs * splits, slots)
        return waves * (triton.cdiv(tiles, splits) + 1) + (3 if splits > 1 else 0)

    return min(range(1, max(1, min(tiles, 32)) + 1), key=cost)


@custom_operator("eagle_kit::small_linear")
def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    block: Sequence[int],
) -> torch.Tensor:
    """``x [M, K]`` contiguous, ``weight [N, K]`` with contiguous rows, in the dtype of ``x`` or in e4m3 with
    ``scales`` of rows ``[N, 1]`` or of a ``block`` of rows and columns; ``bias [N]`` -> ``[M, N]``."""
    return _launch(x, weight, scales, bias, block, x.new_empty(x.shape[0], weight.shape[0]), False)


@custom_operator("eagle_kit::small_linear_swiglu")
def small_linear_swiglu(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    block: Sequence[int],
) -> torch.Tensor:
    """:func:`small_linear` of gate above up, ``weight [2 I, K]`` -> ``silu(gate) up [M, I]``."""
    return _launch(x, weight, scales, bias, block, x.new_empty(x.shape[0], weight.shape[0] // 2), True)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    block: Sequence[int],
    out: torch.Tensor,
    gated: bool,
) -> torch.Tensor:
    """Multiply into ``out``, and return it."""
    # Check the operands.
    m, k = x.shape
    n = weight.shape[0]
    assert m <= MAX_ROWS and x.element_size() == 2 and weight.stride(1) == 1
    assert (weight.dtype == x.dtype) == (scales is None)
    group_rows, group_size = block or (1, k)
    if scales is not None:
        assert weight.dtype == E4M3 and scales.dtype == torch.float32 and scales.is_contiguous()
        assert scales.shape == (triton.cdiv(n, group_rows), triton.cdiv(k, group_size))
    if m == 0:
        return out

    # Tiles, and the number of runs of K, whose partial sums need memory.
    rows = row_bucket(m)
    facts = device_facts(x.device)
    blocks = choose_blocks(rows, weight.element_size(), facts)
    programs = triton.cdiv(n, blocks.outputs)
    tiles = triton.cdiv(k, blocks.block)
    splits = choose_splits(programs, tiles, PROGRAMS * facts.multiprocessors)
    sums = out if splits == 1 else x.new_empty(splits, m, n, dtype=torch.float32)
    assert not block or group_size % blocks.block == 0

    # Scales and biases that are not there are not read: any tensors do.
    scales_or_any = x if scales is None else scales
    bias_or_any = x if bias is None else bias
    finish = {"SCALED": scales is not None and not block, "BIASED": bias is not None, "GATED": gated}
    finish |= launch_options(x.device)
    _multiply[(programs, splits)](
        x,
        weight if scales is None or facts.converts_fp8 else weight.view(torch.int8),
        scales_or_any,
        bias_or_any,
        sums,
        m,
        n,
        k,
        weight.stride(0),
        splits,
        group_rows,
        group_size,
        ROWS=rows,
        OUTPUTS=blocks.outputs,
        BLOCK=blocks.block,
        EVEN=k % blocks.block == 0,
        GROUPED=bool(block),
        SPLIT=splits > 1,
        **finish,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )
    if splits > 1:
        _add_up[(triton.cdiv(out.shape[1], 512), m)](
            sums, scales_or_any, bias_or_any, out, m, n, splits, **finish, BLOCK=512, num_warps=4
        )
    return out


@small_linear.register_fake
def _(x, weight, scales, bias, block):
    return x.new_empty(x.shape[0], weight.shape[0])


@small_linear_swiglu.register_fake
def _(x, weight, scales, bias, block):
    return x.new_empty(x.shape[0], weight.shape[0] // 2)
