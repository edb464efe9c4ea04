"""RMSNorm that is differentiable: the kernels of :mod:`eagle_kit.ops.norm.triton` and their gradient.

With s the normed row (``x``, or ``x + residual``), r = 1 / sqrt(mean(s^2) + eps), n = s r, out = n w, and the
gradients dy of out and dt of the sum,

    g = dy w,     ds = r (g - n mean(g n)) + dt,     dw = sum over rows of dy n,

and dx = dresidual = ds. n is computed again of s, which is kept. A program takes every P-th row and adds up
its part of dw in registers; the parts ``[P, H]`` are summed by torch in a fixed order: no atomics, the same
bits every time. Everything inside is fp32, whatever autocast says.

Bytes: 3 T H elements (4 T H with dt), and 8 P H for dw. After Zhang and Sennrich (arXiv 1910.07467).

Legend: T rows, H size, P programs.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from eagle_kit.ops.capability import device_facts
from eagle_kit.ops.custom_operator import custom_operator
from eagle_kit.ops.norm.triton import add_rms_norm, rms_norm


@triton.jit(do_not_specialize=["rows"])
def _backward(
    dy, dtotal, x, weight, dx, parts, eps, size, rows, HAS_TOTAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Gradients of every P-th row, and their part of dw, ``parts [P, H]``. Grid ``(P,)``."""
    program = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < size
    factor = tl.load(weight + i, inside, 0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        # Compute n again.
        row_at = tl.cast(row, tl.int64) * size + i
        value = tl.load(x + row_at, inside, 0.0).to(tl.float32)
        upstream = tl.load(dy + row_at, inside, 0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / size + eps)
        normed = value * inverse

        # dx = r (g - n mean(g n)) + dt.
        gradient = upstream * factor
        mean = tl.sum(gradient * normed, 0) / size
        gradient = (gradient - normed * mean) * inverse
        if HAS_TOTAL:
            gradient += tl.load(dtotal + row_at, inside, 0.0).to(tl.float32)
        tl.store(dx + row_at, gradient.to(dx.dtype.element_ty), inside)

        # dw, by n as it was rounded in the forward.
        if weight.dtype.element_ty != tl.float32:
            normed = normed.to(x.dtype.element_ty).to(tl.float32)
        dweight += upstream * normed
    tl.store(parts + tl.cast(program, tl.int64) * size + i, dweight, inside)


def _num_warps(block: int) -> int:
    """16 elements a thread, of which six arrays are alive."""
    return min(32, max(1, block // 512))


def _num_programs(rows: int, block: int, device: torch.device) -> int:
    """Two programs of a large row a multiprocessor, or as many small ones as hide the latency."""
    return min(rows, device_facts(device).multiprocessors * min(64, max(2, 8192 // block)))


@custom_operator("eagle_kit::rms_norm_backward")
def rms_norm_backward(
    dy: torch.Tensor, dtotal: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the normed rows ``x`` and of ``weight``; ``dy``, ``dtotal`` and ``x`` ``[..., H]``
    contiguous. ``dtotal`` is the gradient of ``x`` from other uses, or None."""
    size = x.shape[-1]
    rows = x.numel() // size if size else 0
    dx = torch.empty_like(x)
    if rows == 0:
        return dx, torch.zeros_like(weight)
    block = triton.next_power_of_2(size)
    programs = _num_programs(rows, block, x.device)
    parts = x.new_empty(programs, size, dtype=torch.float32)
    _backward[(programs,)](
        dy,
        dy if dtotal is None else dtotal,
        x,
        weight,
        dx,
        parts,
        eps,
        size,
        rows,
        HAS_TOTAL=dtotal is not None,
        BLOCK=block,
        num_warps=_num_warps(block),
    )
    return dx, parts.sum(0).to(weight.dtype)


@rms_norm_backward.register_fake
def _(dy, dtotal, x, weight, eps):
    return torch.empty_like(x), torch.empty_like(weight)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dx, dw = rms_norm_backward(dy.contiguous(), None, x, weight, ctx.eps)
    return dx, dw, None


def _setup_context_of_sum(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    _, _, weight, ctx.eps = inputs
    ctx.save_for_backward(output[1], weight)


def _gradients_of_sum(ctx: Any, dy: torch.Tensor, dtotal: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    total, weight = ctx.saved_tensors
    dx, dw = rms_norm_backward(dy.contiguous(), dtotal.contiguous(), total, weight, ctx.eps)
    return dx, dx, dw, None


rms_norm.register_autograd(_gradients, setup_context=_setup_context)
add_rms_norm.register_autograd(_gradients_of_sum, setup_context=_setup_context_of_sum)


def differentiable_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`eagle_kit.ops.norm.triton.rms_norm`."""
    return rms_norm(x, weight, eps)


def differentiable_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`eagle_kit.ops.norm.triton.add_rms_norm`."""
    return add_rms_norm(x, residual, weight, eps)
