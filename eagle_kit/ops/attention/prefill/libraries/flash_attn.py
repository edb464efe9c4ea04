"""Prompt attention by FlashAttention: version 3, which reads pages of any size, and version 2.

After the signatures and docstrings of ``hopper/flash_attn_interface.py`` and
``flash_attn/flash_attn_interface.py`` (https://github.com/Dao-AILab/flash-attention): a causal mask is
aligned to the last key, a window ``(left, right)`` counts keys besides a query's own, and page tables and
lengths are int32. Strides of pages, rows and heads are free; values of a head lie together.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from eagle_kit.ops.attention.prefill.libraries.library import (
    PrefillLibrary,
    PromptAttention,
    StoreFacts,
    pages_nhd,
)
from eagle_kit.ops.attention.prefill.plan import PrefillPlan
from eagle_kit.ops.attention.variant import AttentionVariant

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8
PAGE_STEP = 256
"""FlashAttention-2 takes pages whose size is a multiple of this."""


class _FlashAttention(PrefillLibrary):
    """Common base of both versions; ``call`` is the library's function."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def reason_against(self, store: StoreFacts, variant: AttentionVariant) -> str | None:
        """See :class:`PrefillLibrary`."""
        if store.head_dim > MAX_HEAD_DIM or store.head_dim % HEAD_DIM_STEP:
            return f"takes head sizes up to 256 that are multiples of 8, not {store.head_dim}"
        return super().reason_against(store, variant)

    def attention(self, plan: PrefillPlan) -> PromptAttention:
        """See :class:`PrefillLibrary`."""
        locations = self.locations(plan)

        def attend(
            q: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, variant: AttentionVariant
        ) -> torch.Tensor:
            k, v = (pages_nhd(rows, plan.page_size) for rows in (k_rows, v_rows))
            out: torch.Tensor = self.call(q, k, v, **locations, **_options(variant))
            return out

        return attend

    @abstractmethod
    def locations(self, plan: PrefillPlan) -> dict[str, Any]:
        """Arguments of the call for the locations of prompts and their keys."""


def _options(variant: AttentionVariant) -> dict[str, Any]:
    """Arguments of the call for a layer."""
    window = variant.limits.window
    return {
        "softmax_scale": variant.scale,
        "causal": True,
        "window_size": (window - 1, 0) if window else (-1, -1),
        "softcap": variant.soft_cap or 0.0,
    }


class FlashAttention3(_FlashAttention):
    """``flash_attn_interface.flash_attn_with_kvcache`` with a page table."""

    title = "FlashAttention-3"

    def locations(self, plan: PrefillPlan) -> dict[str, Any]:
        """See :class:`_FlashAttention`."""
        return {
            "cache_seqlens": (plan.starts + plan.cu_rows.diff()).int(),
            "page_table": plan.page_tables.int(),
            "cu_seqlens_q": plan.cu_rows.int(),
            "max_seqlen_q": plan.max_rows,
        }


class FlashAttention2(_FlashAttention):
    """``flash_attn.flash_attn_varlen_func`` with a block table."""

    title = "FlashAttention-2"

    def reason_against(self, store: StoreFacts, variant: AttentionVariant) -> str | None:
        """See :class:`PrefillLibrary`."""
        if store.page_size % PAGE_STEP:
            return f"takes pages of a multiple of {PAGE_STEP} slots (--page-size), not {store.page_size}"
        return super().reason_against(store, variant)

    def locations(self, plan: PrefillPlan) -> dict[str, Any]:
        """See :class:`_FlashAttention`."""
        assert plan.bounds is not None
        stops = plan.starts + plan.cu_rows.diff()
        return {
            "cu_seqlens_q": plan.cu_rows.int(),
            "cu_seqlens_k": torch.nn.functional.pad(stops.cumsum(0), (1, 0)).int(),
            "max_seqlen_q": plan.max_rows,
            "max_seqlen_k": max(stop for _, stop in plan.bounds),
            "block_table": plan.page_tables.int(),
        }
