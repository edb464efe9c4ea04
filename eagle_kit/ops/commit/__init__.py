"""Commit: copy accepted window nodes of a key-value store to their pages, in all layers and heads at once.

Every cycle calls it, once for all layers.

Legend: L layers, Hkv heads, R rows, D head size, B requests, P pages of a table, n rows per request. A store
is a pair ``k, v [L, Hkv, R, D]`` or, for latent attention, one tensor ``[L, R, D]`` and None; it is
contiguous.
"""

from typing import Any

import torch

from eagle_kit.ops.backend import Backend, uses_cpp, uses_triton
from eagle_kit.ops.commit import reference


def commit_path(
    k: torch.Tensor,
    v: torch.Tensor | None,
    page_table: torch.Tensor,
    page_size: int,
    nodes: torch.Tensor,
    first_position: torch.Tensor,
    num_committed: torch.Tensor,
    scratch_start: int,
    scratch_stride: int,
    *,
    backend: Backend | None = None,
) -> None:
    """Copy window nodes ``nodes [B, n]`` to positions ``first_position [B] + 0..n-1``, the first
    ``num_committed [B]`` of each request; nothing else is touched. All are int64.

    Node j of request b is row ``scratch_start + b * scratch_stride + j``; position p is row ``page_table[b, p
    // page_size] * page_size + p % page_size``, with ``page_table [B, P]``. Requests own their pages alone,
    except pages whose content does not matter.
    """
    assert k.is_contiguous(), "k must be contiguous"
    assert v is None or (v.is_contiguous() and v.shape == k.shape and v.dtype == k.dtype), (
        "v must have the shape and dtype of k"
    )
    if uses_cpp(k, v, backend=backend):
        table = page_table.contiguous()
        path = nodes.contiguous()
        first = first_position.contiguous()
        counts = num_committed.contiguous()
        for store in (k, v):
            if store is not None:
                torch.ops.eagle_kit_cpp.commit_rows(
                    store, table, page_size, path, first, counts, scratch_start, scratch_stride
                )
        return
    implementation: Any = reference
    if uses_triton("commit", k, backend):
        from eagle_kit.ops.commit import triton

        implementation = triton
    implementation.commit_path(
        k, v, page_table, page_size, nodes, first_position, num_committed, scratch_start, scratch_stride
    )
