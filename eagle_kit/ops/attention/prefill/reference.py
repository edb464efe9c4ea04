"""Causal attention of a prompt chunk in torch.

Legend: T chunk tokens, C cached tokens before them, Hq / Hkv heads, D head size, B requests, R rows of the
store.
"""

from dataclasses import replace
from itertools import pairwise

import torch
from torch.nn import functional as F

from eagle_kit.ops.attention.prefill.plan import PrefillPlan
from eagle_kit.ops.attention.variant import AttentionVariant, as_variant
from eagle_kit.ops.attention.window.reference import attend_dense, take_rows
from eagle_kit.ops.cpu.summation import SPLIT_TERMS, round_columns

BLOCK = 32
"""Queries of a chunk that are computed together: few enough that their scores stay in the cache of a core."""
LIMITED_BLOCK = 256
"""Queries that share a mask where attention is not plain."""


def prefill_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: AttentionVariant | float
) -> torch.Tensor:
    """Causal attention: query t attends to keys 0..C + t, as far as the variant's limits let it;
    differentiable.

    Args:
        q: ``[T, Hq, D]``.
        k, v: ``[C + T, Hkv, D]``, cached tokens first.
        variant: how the layer attends; a number is the scale of plain attention.

    Returns:
        ``[T, Hq, D]``.
    """
    variant = as_variant(variant)
    if variant.is_plain:
        return _causal_attention(q, k, v, variant.scale)

    # Blocks of queries, with the keys that any of a block attends to.
    out = []
    start = len(k) - len(q)
    for block in q.split(LIMITED_BLOCK):
        first = variant.limits.first(start)
        stop = start + len(block)
        positions = torch.arange(start, stop, device=q.device)
        key_positions = torch.arange(first, stop, device=q.device)
        seen = key_positions <= positions[:, None]
        seen = seen & (key_positions >= variant.limits.firsts(positions)[:, None])
        out.append(_masked_attention(block, k[first:stop], v[first:stop], seen, variant))
        start = stop
    return torch.cat(out) if out else q[..., : v.shape[-1]]


def _masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, variant: AttentionVariant
) -> torch.Tensor:
    """Attention of ``q [t, Hq, D]`` to ``k [c, Hkv, D]`` and ``v [c, Hkv, E]`` where ``seen [t, c]`` -> ``[t,
    Hq, E]``; scores are explicit where the variant is no ordinary softmax."""
    group = q.shape[1] // k.shape[1]
    if variant.is_softmax:
        k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=seen, scale=variant.scale)
        return out.transpose(0, 1)

    # Scores, capped and masked; a sink is one more column, which has no value.
    queries = q.unflatten(1, (-1, group)).float()
    scores = torch.einsum("thgd,chd->hgtc", queries, k.float()) * variant.scale
    if variant.soft_cap is not None:
        scores = variant.soft_cap * torch.tanh(scores / variant.soft_cap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if variant.sinks is not None:
        sinks = variant.sinks.float().view(-1, group, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hgtc,chd->thgd", weights, v.float()).flatten(1, 2).to(q.dtype)


def _causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of query t to keys 0..C + t."""
    t, hq, _ = q.shape
    hkv = k.shape[1]
    num_cached = k.shape[0] - t
    # KV heads are the batch, so that their keys are not copied for every query head of a group.
    queries = q.unflatten(1, (hkv, hq // hkv)).permute(1, 2, 0, 3)
    keys, values = (x.transpose(0, 1)[:, None].expand(-1, hq // hkv, -1, -1) for x in (k, v))
    mask = None
    if num_cached:
        positions = torch.arange(num_cached, num_cached + t, device=q.device)
        mask = torch.arange(num_cached + t, device=q.device)[None] <= positions[:, None]
    out = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def chunk_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: AttentionVariant, start: int
) -> torch.Tensor:
    """See :func:`eagle_kit.ops.attention.prefill.chunk_attention`."""
    out = []
    for block in q.split(BLOCK):
        # The mask of the block's positions, from start on.
        stop = start + len(block)
        num_columns = round_columns(stop)
        mask = torch.full((len(block), num_columns), float("-inf"), device=q.device).triu_(start + 1)
        if any(variant.limits):
            firsts = variant.limits.firsts(torch.arange(start, stop, device=q.device))
            mask.masked_fill_(torch.arange(num_columns, device=q.device) < firsts[:, None], float("-inf"))

        # Columns before all limits are left out by whole runs, so that sums keep their order.
        columns = slice(variant.limits.first(start) // SPLIT_TERMS * SPLIT_TERMS, num_columns)
        attended = attend_dense(block[None], k[:, columns], v[:, columns], mask[None, :, columns], variant)
        out.append(attended[0])
        start = stop
    return torch.cat(out)


def paged_prefill_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    plan: PrefillPlan,
    variant: AttentionVariant,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Attend request by request; their sizes are read on the host.

    Args:
        q: ``[T, Hq, D]``.
        k_rows, v_rows: ``[Hkv, R, D]``, the whole store of one layer; these rows' keys are already in it.
        plan: location of the keys.
        k_scale, v_scale: factors of keys and values, other than 1 for an fp8 store.

    Returns:
        ``[T, Hq, D]``.
    """
    out = torch.empty_like(q)
    scaled = replace(variant, scale=variant.scale * k_scale)
    chunks = pairwise(plan.cu_rows.tolist())
    for table, start, (begin, end) in zip(plan.page_tables, plan.starts.tolist(), chunks, strict=True):
        if begin == end:
            continue
        if start < 0:
            out[begin:end] = 0.0
            continue

        # Keys and values of the request up to the chunk's last position.
        stop = start + end - begin
        positions = torch.arange(min(plan.first_position, start), stop, device=q.device)
        rows = table[positions // plan.page_size] * plan.page_size + positions % plan.page_size
        k = take_rows(k_rows, rows, q.dtype).transpose(0, 1)
        v = take_rows(v_rows, rows, q.dtype).transpose(0, 1)

        # Positions without a key attend to themselves only, the others to all but those.
        if start < plan.first_position:
            num_unused = min(plan.first_position, stop) - start
            out[begin : begin + num_unused] = v[:num_unused].repeat_interleave(q.shape[1] // v.shape[1], 1)
            begin += num_unused
            k = k[num_unused:]
            v = v[num_unused:]
        if begin < end:
            out[begin:end] = prefill_attention(q[begin:end], k, v, scaled)
    return out if v_scale == 1.0 else out * v_scale
