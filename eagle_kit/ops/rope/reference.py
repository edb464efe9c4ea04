"""Rotary positions in torch, the reference of the kernel.

Legend: T tokens, D head size, E elements rotated.
"""

import torch

from eagle_kit.ops.norm.reference import rms_norm


def rotate(
    x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor], interleaved: bool = False
) -> torch.Tensor:
    """Rotate the first E elements of ``x [T, heads, D]`` by ``table [T, 1, E]`` -> the same shape and
    dtype."""
    cos, sin = table
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], table, interleaved), x[..., size:]), -1)
    if interleaved:
        halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2)
        cos = cos.unflatten(-1, (2, -1))
        sin = sin.unflatten(-1, (2, -1))
        turned = torch.addcmul(halves * cos, halves.flip(-2), sin)
        return turned.transpose(-1, -2).flatten(-2).to(x.dtype)
    half = size // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), -1)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


def rope(
    qkv: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor],
    num_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split ``qkv [T, Hq + 2 Hkv, D]`` into q ``[T, Hq, D]``, k and v ``[T, Hkv, D]``, q and k normed and
    rotated."""
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    sizes = (num_heads, num_kv_heads)
    rotated, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), 1)
    if q_norm is not None and k_norm is not None:
        q, k = rotated.split(sizes, 1)
        rotated = torch.cat((rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)), 1).to(qkv.dtype)
    q, k = rotate(rotated, table, interleaved).split(sizes, 1)
    return q, k, v


def store(target: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, scale: float) -> None:
    """Write ``values [T, Hkv, D]`` to rows ``rows [T]`` of ``target [Hkv, R, D]``; fp8 saturates."""
    if target.element_size() == 1:
        top = torch.finfo(target.dtype).max
        values = (values.float() / scale).clamp(-top, top).to(target.dtype).view(torch.uint8)
        target = target.view(torch.uint8)  # torch cannot index fp8
    target.index_copy_(1, rows, values.transpose(0, 1).to(target.dtype))
