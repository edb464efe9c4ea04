"""Rotation of query and key heads that is differentiable: forward and backward are one kernel.

At a position with angle a, a pair turns by ``R(a) = [[cos a, -sin a], [sin a, cos a]]``. The gradient of a
rotation is its transpose, the rotation by the negative angle: ``dx = R(a)^T dy = R(-a) dy``. So the backward
pass is the forward with the sines negated, and keeps nothing but the tables. Values, and elements of a head
past the rotated ones, are copied.

Bytes: 2 T N D elements, and the tables once for each token. After RoFormer (arXiv 2104.09864).

Legend: T tokens, N heads of which the first M are rotated, D head size, E rotated elements of a head.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from eagle_kit.ops.custom_operator import custom_operator

HEADS = 8
"""Heads of a program."""


@triton.jit
def _rotate(
    x, cos, sin, out, heads, num_rotated,
    D: tl.constexpr, E: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of one token. Grid ``(T, blocks of heads)``."""
    # Each element's partner in its pair, and its place in the tables.
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    if INTERLEAVED:
        partner = d ^ 1
        place = (d % 2) * (E // 2) + d // 2
    else:
        partner = tl.where(d < E // 2, d + E // 2, d - E // 2)
        place = d

    # Load the elements, their partners, cosines and sines.
    in_table = d < E
    row = (token * heads + head)[:, None] * D
    inside = (head < heads)[:, None] & (d < D)[None, :]
    is_rotated = inside & (head < num_rotated)[:, None] & in_table[None, :]
    value = tl.load(x + row + d[None, :], inside, 0.0)
    other = tl.load(x + row + partner[None, :], is_rotated, 0.0).to(tl.float32)
    c = tl.load(cos + token * E + place, in_table, 1.0)
    s = tl.load(sin + token * E + place, in_table, 0.0)
    if INVERSE:
        s = -s

    # Rotate; other elements are copied.
    result = value.to(tl.float32) * c[None, :] + other * s[None, :]
    result = tl.where(is_rotated, result, value.to(tl.float32))
    tl.store(out + row + d[None, :], result.to(out.dtype.element_ty), inside)


@custom_operator("eagle_kit::rope_rotate")
def rope_rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_rotated: int,
    interleaved: bool,
    inverse: bool,
) -> torch.Tensor:
    """Rotate the first ``num_rotated`` heads of ``x [T, N, D]``, and copy the others.

    Args:
        x, cos, sin: contiguous; the tables fp32 ``[T, 1, E]``, see ``rope_store``.
        interleaved: pairs are ``(2i, 2i + 1)`` instead of ``(i, i + E/2)``.
        inverse: rotate by the negative angles.
    """
    out = torch.empty_like(x)
    tokens, heads, size = x.shape
    if x.numel() == 0:
        return out
    _rotate[(tokens, triton.cdiv(heads, HEADS))](
        x,
        cos,
        sin,
        out,
        heads,
        num_rotated,
        D=size,
        E=cos.shape[-1],
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        BLOCK_H=HEADS,
        BLOCK_D=triton.next_power_of_2(size),
    )
    return out


@rope_rotate.register_fake
def _(x, cos, sin, num_rotated, interleaved, inverse):
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, cos, sin, ctx.num_rotated, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    dx = rope_rotate(dy.contiguous(), cos, sin, ctx.num_rotated, ctx.interleaved, not ctx.inverse)
    return dx, None, None, None, None, None


rope_rotate.register_autograd(_gradients, setup_context=_setup_context)


def rotate_heads(
    qkv: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor], num_heads: int, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split ``qkv [T, Hq + 2 Hkv, D]`` into q, k, both rotated, and v; differentiable in ``qkv``."""
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    cos, sin = (part.contiguous() for part in table)
    turned = rope_rotate(qkv.contiguous(), cos, sin, num_heads + num_kv_heads, interleaved, False)
    q, k, v = turned.split((num_heads, num_kv_heads, num_kv_heads), 1)
    return q, k, v
