"""RMSNorm of query and key heads, rotary positions, and the store of keys and values, in one launch; where a
gradient is needed, the norms and the rotation of kernels that have one, and no store.

Every layer with RoPE calls it. The Triton kernel computes cosines and sines itself, so it reads no table.

Legend: T tokens, Hq / Hkv query / key-value heads, D head size, E rotated elements of a head, R rows of a
store.
"""

import torch

from eagle_kit.ops.backend import Backend, is_differentiated, uses_cpp, uses_triton
from eagle_kit.ops.norm import rms_norm
from eagle_kit.ops.rope import reference
from eagle_kit.ops.rope.plan import Rotation, Rows, WindowRows, rows_tensor

__all__ = ["Rotation", "Rows", "WindowRows", "rope_store", "rows_tensor"]


def rope_store(
    qkv: torch.Tensor,
    rotation: Rotation,
    *,
    num_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    k_rows: torch.Tensor | None = None,
    v_rows: torch.Tensor | None = None,
    rows: Rows | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    interleaved: bool = False,
    returns_kv: bool = True,
    backend: Backend | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split ``qkv [T, Hq + 2 Hkv, D]`` into q ``[T, Hq, D]``, k and v ``[T, Hkv, D]``, rotate q and k, store
    k and v.

    Args:
        rotation: positions ``[T]`` and frequencies ``[E / 2]``. The first E elements of a head are rotated,
            the others are copied.
        q_norm, k_norm: weights ``[D]`` of an RMSNorm of each head before its rotation, of the dtype of
            ``qkv`` or fp32.
        k_rows, v_rows: one layer of a store, ``[Hkv, R, D]`` contiguous; rows ``rows`` of both are
            overwritten. A row may repeat only where its content does not matter.
        k_scale, v_scale: divisors of the values of an fp8 store, which saturates.
        interleaved: pairs are ``(2i, 2i + 1)`` instead of ``(i, i + E/2)``.
        returns_kv: False returns k and v as ``[0, Hkv, D]``, for callers that read them from the store.
    """
    stores = k_rows is not None
    assert stores == (v_rows is not None) == (rows is not None), (
        "k_rows, v_rows and rows must be given together"
    )
    assert (q_norm is None) == (k_norm is None), "q_norm and k_norm must be given together"
    assert stores or returns_kv, "k and v must be stored or returned"
    is_fp8 = k_rows is not None and k_rows.element_size() == 1
    assert is_fp8 or k_scale == v_scale == 1.0, "only fp8 stores have scales"
    assert q_norm is None or q_norm.dtype in (qkv.dtype, torch.float32), "q_norm has another dtype than qkv"
    needs_gradient = is_differentiated(qkv, q_norm, k_norm)

    # Triton, with a gradient: the norms, then the rotation.
    if uses_triton("rope", qkv, backend) and needs_gradient and not stores:
        from eagle_kit.ops.rope import triton_backward

        if q_norm is not None and k_norm is not None:
            num_kv_heads = (qkv.shape[1] - num_heads) // 2
            q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
            q = rms_norm(q, q_norm, eps, backend=backend)
            k = rms_norm(k, k_norm, eps, backend=backend)
            qkv = torch.cat((q, k, v), 1)
        return triton_backward.rotate_heads(qkv, rotation.table, num_heads, interleaved)

    # Triton, in one launch.
    if uses_triton("rope", qkv, backend) and not needs_gradient:
        from eagle_kit.ops.rope import triton

        return triton.rope_store(
            qkv.contiguous(),
            rotation.positions.contiguous(),
            rotation.inv_freq,
            rotation.magnitude,
            num_heads,
            q_norm,
            k_norm,
            eps,
            interleaved,
            k_rows,
            v_rows,
            rows.contiguous() if isinstance(rows, torch.Tensor) else None,
            [rows.first, rows.stride, rows.nodes] if isinstance(rows, WindowRows) else [],
            k_scale,
            v_scale,
            returns_kv,
        )

    # C++.
    row_index = None if rows is None else rows_tensor(rows)
    has_positions = len(rotation.positions) == len(qkv)
    if has_positions and uses_cpp(qkv, q_norm, k_norm, k_rows, v_rows, backend=backend):
        cosines, sines = rotation.compiled_table
        rotated: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.eagle_kit_cpp.rope_store(
            qkv.contiguous(),
            cosines,
            sines,
            num_heads,
            q_norm,
            k_norm,
            eps,
            interleaved,
            k_rows,
            v_rows,
            None if row_index is None else row_index.contiguous(),
            returns_kv,
        )
        return rotated

    # torch.
    q, k, v = reference.rope(qkv, rotation.table, num_heads, q_norm, k_norm, eps, interleaved)
    if k_rows is not None and v_rows is not None and row_index is not None:
        reference.store(k_rows, row_index, k, k_scale)
        reference.store(v_rows, row_index, v, v_scale)
    return (q, k, v) if returns_kv else (q, k[:0], v[:0])
