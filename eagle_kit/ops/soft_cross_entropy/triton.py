"""Linear layer and soft cross-entropy: matmuls by torch, everything between them in one launch per chunk of
rows.

For a row with logits z, teacher p (sum 1) and weight c,

    loss = log sum exp z - p . z,       dz = c (softmax(z) - p).

A program has a row and goes over it twice, in blocks. In the first pass each lane keeps a running maximum t,
its place, the sum s of exp(z - t) and the dot p . z,

    z > t:  s <- s exp(t - z) + 1, t <- z;          else:  s <- s + exp(z - t),

so one exponential is computed per element and lanes are merged once, at the end; the second pass writes dz
over z. A block is 2,048 logits of 128 threads, 16 per thread, for any Vd: no row is ever held in registers.
Ties go to the lowest id. The chunks are after Liger (arXiv 2410.10989), the running sum after Milakov and
Gimelshein (arXiv 1805.02867).

Bytes per row, e those of a logit: (3 e + 8) Vd, of which (e + 4) Vd are read a second time, out of L2.

Memory: e Vd bytes for each row of one chunk; for every row 12 bytes, its gradient of h, and h once more where
autocast changes its type; the gradient of the weight once, and the product that is added to it.

Legend: M rows, H hidden, Vd draft vocabulary, P teacher positions. In the kernel: ``i`` ids of a block, ``z``
their logits.
"""

import torch
import triton
import triton.language as tl

from eagle_kit.ops.custom_operator import custom_operator

BLOCK = 2048
NUM_WARPS = 4
CHUNK_ROWS = 4096
"""Rows per chunk of logits: adding to the weight's gradient then costs about a tenth of the matmuls (Vd
32,000, H 4,096, H200), and the logits of a chunk take 262 MB."""


@triton.jit
def _soft_cross_entropy(logits, probs, index, row_weights, losses, best, vocab, BLOCK: tl.constexpr):
    """Loss and most likely id of one row, and its gradient, which replaces the logits. Grid ``(M,)``."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0)
    z_row = logits + row.to(tl.int64) * vocab
    p_row = probs + tl.load(index + row).to(tl.int64) * vocab

    # First pass: maximum, its place, sum of exponentials and p . z of each lane.
    lane = tl.arange(0, BLOCK)
    lane_max = tl.full([BLOCK], -1e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    dot = tl.zeros([BLOCK], tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab, BLOCK):
        i = first + lane
        inside = i < vocab
        z = tl.load(z_row + i, inside, float("-inf")).to(tl.float32)
        dot += tl.load(p_row + i, inside, 0.0) * tl.where(inside, z, 0.0)
        rise = (z - lane_max) * LOG2_E
        e = tl.exp2(-tl.abs(rise))
        total = tl.where(rise > 0, total * e + 1.0, total + e)
        place = tl.where(rise > 0, i, place)
        lane_max = tl.where(rise > 0, z, lane_max)

    # Merge the lanes, and store the loss and the most likely id.
    row_max = tl.max(lane_max, 0)
    row_sum = tl.sum(total * tl.exp2((lane_max - row_max) * LOG2_E), 0)
    tl.store(losses + row, row_max + tl.log(row_sum) - tl.sum(dot, 0))
    tl.store(best + row, tl.min(tl.where(lane_max == row_max, place, vocab - 1), 0).to(tl.int64))

    # Second pass: the gradient.
    weight = tl.load(row_weights + row)
    for first in range(0, vocab, BLOCK):
        i = first + lane
        inside = i < vocab
        z = tl.load(z_row + i, inside, float("-inf")).to(tl.float32)
        dz = weight * (tl.exp2((z - row_max) * LOG2_E) / row_sum - tl.load(p_row + i, inside, 0.0))
        tl.store(z_row + i, dz.to(logits.dtype.element_ty), inside)


@custom_operator("eagle_kit::soft_cross_entropy_", mutates_args=("logits",))
def soft_cross_entropy_(
    logits: torch.Tensor, probs: torch.Tensor, index: torch.Tensor, row_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace ``logits [M, Vd]`` by the gradient of the weighted sum of losses.

    ``probs`` fp32 ``[P, Vd]``, ``index`` int64 ``[M]`` and ``row_weights`` fp32 ``[M]``; all contiguous.

    Returns:
        The losses, unweighted, fp32 ``[M]``, and the most likely draft ids, int64 ``[M]``.
    """
    rows, vocab = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    best = logits.new_empty(rows, dtype=torch.int64)
    if rows:
        _soft_cross_entropy[(rows,)](
            logits, probs, index, row_weights, losses, best, vocab, BLOCK=BLOCK, num_warps=NUM_WARPS
        )
    return losses, best


@soft_cross_entropy_.register_fake
def _(logits, probs, index, row_weights):
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.int64)


@custom_operator("eagle_kit::linear_soft_cross_entropy_", mutates_args=("dw",))
def linear_soft_cross_entropy_(
    h: torch.Tensor,
    weight: torch.Tensor,
    probs: torch.Tensor,
    index: torch.Tensor,
    row_weights: torch.Tensor,
    dw: torch.Tensor,
    dtype: torch.dtype,
    chunk_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reference's loss with matmuls in ``dtype`` and logits of ``chunk_rows`` rows at a time.

    The gradient of ``weight`` is added to ``dw``, of its shape, or left out when ``dw`` is empty.

    Returns:
        The losses of rows, the most likely ids, and the gradient of ``h``.
    """
    rows = h.shape[0]
    vocab = weight.shape[0]
    dh = torch.empty_like(h)
    losses = h.new_empty(rows, dtype=torch.float32)
    best = h.new_empty(rows, dtype=torch.int64)
    h = h.to(dtype)
    weight = weight.to(dtype)
    logits = h.new_empty(min(chunk_rows, rows), vocab)
    for start in range(0, rows, chunk_rows):
        chunk = slice(start, min(start + chunk_rows, rows))
        z = torch.mm(h[chunk], weight.t(), out=logits[: chunk.stop - start])
        losses[chunk], best[chunk] = soft_cross_entropy_(z, probs, index[chunk], row_weights[chunk])
        dh[chunk] = z @ weight
        if dw.numel():
            dw += z.t() @ h[chunk]
    return losses, best, dh


@linear_soft_cross_entropy_.register_fake
def _(h, weight, probs, index, row_weights, dw, dtype, chunk_rows):
    losses = h.new_empty(h.shape[0], dtype=torch.float32)
    best = h.new_empty(h.shape[0], dtype=torch.int64)
    return losses, best, torch.empty_like(h)
