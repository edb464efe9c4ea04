"""Window attention in torch, the reference of every faster implementation.

Legend: B requests, N query nodes, C columns (prefix then window keys), Hq / Hkv heads, G = Hq / Hkv, D head
size, R rows of the store (head-major, so that a gathered store is a batch of matrices without another copy).
"""

from dataclasses import replace

import torch
from torch.nn import functional as F

from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.attention.window.plan import Columns, attend_in_groups
from eagle_kit.ops.cpu.summation import least_nodes, weighted_sum


def window_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    columns: list[Columns],
    variant: AttentionVariant,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """``softmax(q k^T * scale + mask) v`` over each request's prefix and the ancestors of each node;
    ``variant`` may cap the scores or add sinks.

    Args:
        q: ``[B, N, Hq, D]``.
        k_rows, v_rows: ``[Hkv, R, D]``, the whole store of one layer; this window's keys are already in it.
        columns: location and visibility of the keys, for all requests or in groups, within the variant's
            limits.
        k_scale, v_scale: factors of keys and values, other than 1 for an fp8 store.

    Returns:
        ``[B, N, Hq, D]``.
    """
    scaled = replace(variant, scale=variant.scale * k_scale)

    def attend(q: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shape = (k_rows.shape[0] * len(q), rows.shape[1], q.shape[-1])
        k = take_rows(k_rows, rows.reshape(-1), q.dtype).view(shape)
        v = take_rows(v_rows, rows.reshape(-1), q.dtype).view(shape)
        out = attend_dense(q, k, v, mask, scaled)
        return out if v_scale == 1.0 else out * v_scale

    return attend_in_groups(columns, q, q.shape[-1], attend)


def attend_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, variant: AttentionVariant
) -> torch.Tensor:
    """Attention of ``q [B, N, Hq, D]`` to ``k [Hkv * B, C, D]`` and ``v [Hkv * B, C, E]`` under ``mask [B, N,
    C]`` -> ``[B, N, Hq, E]``.

    The (N x G) query rows that share a KV head are one matmul, so that every key is read once per window.
    Windows of few nodes are padded (:func:`least_nodes`), for plain decoding must equal speculation bit for
    bit.
    """
    b, n, hq, d = q.shape
    hkv = len(k) // b
    g = hq // hkv

    # Pad a window of few nodes.
    missing = least_nodes(g, d, hkv * b) - n
    if missing > 0:
        q = F.pad(q, (0, 0, 0, 0, 0, missing))
        mask = F.pad(mask, (0, 0, 0, missing))
    m = q.shape[1]

    # The query rows of a KV head and request are a matrix.
    queries = (q.float() * variant.scale).view(b, m, hkv, g, d)
    queries = queries.permute(2, 0, 1, 3, 4).reshape(hkv * b, m * g, d)
    sinks = None if variant.sinks is None else variant.sinks.view(hkv, 1, 1, g)
    shape = (hkv, b, m, g, k.shape[1])
    out = attend_matrices(queries, k, v, mask[None, :, :, None], shape, variant.soft_cap, sinks)
    return out.view(hkv, b, m, g, -1).permute(1, 2, 0, 3, 4).reshape(b, m, hq, -1)[:, :n]


def attend_matrices(
    queries: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    shape: tuple[int, ...],
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of scaled ``queries [M, n, D]`` to ``k [M, C, D]`` and ``v [M, C, E]`` -> ``[M, n, E]``, in
    products that :mod:`eagle_kit.ops.cpu.summation` keeps in one order.

    Args:
        mask: broadcasts to ``shape``, a view of the scores ``[M, n, C]``.
        sinks: broadcasts to ``shape[:-1]``. They take their share of the result afterwards, so that sums keep
            their order.
    """
    scores = torch.bmm(queries, k.float().transpose(1, 2)).view(shape)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores + mask
    weights = scores.view(*queries.shape[:2], k.shape[1]).softmax(-1)
    out = weighted_sum(weights.to(v.dtype), v)
    if sinks is None:
        return out

    # The share of the keys: exp(logsumexp) is exp(best score) over the best weight. Torch's log and sigmoid
    # would have other bits at other places of a tensor.
    best_weight = weights.amax(-1).view(shape[:-1])
    share = 1.0 / (1.0 + torch.exp(sinks.float() - scores.amax(-1)) * best_weight)
    return (out * share.view(*out.shape[:2], 1)).to(out.dtype)


def take_rows(store: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``store [Hkv, R, D]``, ``rows`` int64 ``[n]`` -> ``[Hkv, n, D]``; fp8 as ``dtype``."""
    if store.element_size() > 1:
        return store.index_select(1, rows)
    taken = store.view(torch.uint8).index_select(1, rows)  # torch cannot index fp8
    return taken.view(store.dtype).to(dtype)
