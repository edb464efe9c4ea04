"""What FlashAttention and FlashInfer document of prompts over pages, in torch and fp64.

Written after their docstrings, without this library's code: parameters by their names and defaults, page
tables, lengths in int32, masks aligned to the last key, windows, soft caps. What they refuse is refused.
Each call is noted in ``calls``: the pages that were handed over.
"""

import math
from itertools import pairwise

import torch


def attention(q, k, v, scale, left, right, cap):
    """``q [t, Hq, D]``, ``k`` and ``v [c, Hkv, D]``; query i attends to keys ``i + c - t - left`` to ``i + c
    - t + right``, a negative number being no limit. A row without keys is 0."""
    out_dtype, (t, heads, _), c = q.dtype, q.shape, k.shape[0]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,chd->htc", q, k) * scale
    if cap:
        scores = cap * (scores / cap).tanh()
    at = torch.arange(t)[:, None] + c - t
    keys = torch.arange(c)[None]
    seen = torch.ones(t, c, dtype=torch.bool)
    if left >= 0:
        seen &= keys >= at - left
    if right >= 0:
        seen &= keys <= at + right
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("htc,chd->thd", weights, v).to(out_dtype)


def over_pages(q, k_pages, v_pages, table, borders, lens, scale, window, cap, causal):
    """NHD pages ``[P, page_size, Hkv, D]``; request b has the queries ``borders[b]..borders[b + 1] - 1`` and
    the first ``lens[b]`` slots of its pages ``table[b]``."""
    outs, (left, right) = [], window
    for b, length in enumerate(lens):
        pages = table[b].long()[: -(-length // k_pages.shape[1])]
        k, v = (x[pages].flatten(0, 1)[:length] for x in (k_pages, v_pages))
        mine = q[borders[b] : borders[b + 1]]
        outs.append(attention(mine, k, v, scale, left, 0 if causal else right, cap))
    return torch.cat(outs)


class FlashAttention3:
    """``flash_attn_interface.flash_attn_with_kvcache``, as much of it as is for paged prompts."""

    def __init__(self):
        self.calls = []

    def flash_attn_with_kvcache(
        self,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        cache_seqlens=None,
        page_table=None,
        cu_seqlens_q=None,
        max_seqlen_q=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
    ):
        assert k is None and v is None, "what is new is in the pages already"
        assert k_cache.stride(-1) == v_cache.stride(-1) == 1
        assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
        assert page_table.stride(-1) == 1 and q.dtype == k_cache.dtype == v_cache.dtype
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        self.calls.append((k_cache, v_cache))
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        places = page_table, cu_seqlens_q.tolist(), cache_seqlens.tolist()
        return over_pages(q, k_cache, v_cache, *places, scale, window_size, softcap, causal)


class FlashAttention2:
    """``flash_attn.flash_attn_varlen_func`` with a block table."""

    def __init__(self):
        self.calls = []

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        assert block_table.dtype == cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == block_table.stride(-1) == 1
        assert q.dtype == k.dtype == v.dtype and not dropout_p and alibi_slopes is None
        lens = cu_seqlens_k.diff().tolist()
        assert max_seqlen_k >= max(lens) and max_seqlen_q >= int(cu_seqlens_q.diff().max())
        self.calls.append((k, v))
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        places = block_table, cu_seqlens_q.tolist(), lens
        return over_pages(q, k, v, *places, scale, window_size, softcap, causal)


class FlashInfer:
    """``flashinfer``: a module whose class of wrappers notes plans and calls here."""

    def __init__(self):
        self.calls, self.plans, self.workspaces = [], [], []
        library = self

        class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
            def __init__(self, float_workspace_buffer, kv_layout="NHD"):
                super().__init__(library, float_workspace_buffer, kv_layout)

        self.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper


class Wrapper:
    """``flashinfer.BatchPrefillWithPagedKVCacheWrapper``."""

    def __init__(self, library, float_workspace_buffer, kv_layout):
        assert kv_layout in ("NHD", "HND") and float_workspace_buffer.numel() >= 128 << 20
        self.library, self.layout = library, kv_layout
        library.workspaces.append(float_workspace_buffer.data_ptr())

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        causal=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type=torch.float16,
        kv_data_type=None,
    ):
        on_host = qo_indptr, paged_kv_indptr, paged_kv_last_page_len
        assert all(x.device.type == "cpu" for x in on_host), "else the host waits for the device"
        assert all(x.dtype == torch.int32 for x in (*on_host, paged_kv_indices))
        last = paged_kv_last_page_len.tolist()
        assert all(1 <= filled <= page_size for filled in last)
        borders, begins = qo_indptr.tolist(), paged_kv_indptr.tolist()
        assert begins[-1] == len(paged_kv_indices)
        table = [paged_kv_indices[a:b] for a, b in pairwise(begins)]
        lens = [(len(t) - 1) * page_size + filled for t, filled in zip(table, last, strict=True)]
        scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self.sizes = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self.dtypes = q_data_type, q_data_type if kv_data_type is None else kv_data_type
        self.rest = table, borders, lens, scale, (window_left, -1), logits_soft_cap or 0.0, causal
        self.library.plans.append(self)

    def run(self, q, paged_kv_cache, k_scale=None, v_scale=None):
        k, v = paged_kv_cache
        self.library.calls.append((k, v))
        assert k.stride() == v.stride() and k.stride(-1) == 1 and k_scale is None and v_scale is None
        if self.layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        assert (q.shape[1], k.shape[2], q.shape[2], k.shape[1]) == self.sizes
        assert (q.dtype, k.dtype) == self.dtypes
        return over_pages(q, k, v, *self.rest)
