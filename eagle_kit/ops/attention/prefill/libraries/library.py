"""Interface of libraries for prompt attention, the layers that none of them can compute, and views of pages.

Legend: Hq / Hkv heads, R rows of the store, D head size, P pages, T tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch

from eagle_kit.ops.attention.prefill.plan import PrefillPlan
from eagle_kit.ops.attention.variant import AttentionVariant

PromptAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionVariant], torch.Tensor]
"""Attention ``(q [T, Hq, D], k_rows, v_rows [Hkv, R, D], variant) -> [T, Hq, D]`` of planned prompts, whose
keys and values are already in the store."""


class StoreFacts(NamedTuple):
    """Properties of a store of keys and values.

    Attributes:
        dtype: of the queries.
        store_dtype: of the keys and values.
        num_values: of one head, R * D.
    """

    head_dim: int
    dtype: torch.dtype
    store_dtype: torch.dtype
    page_size: int
    first_position: int
    num_values: int


class PrefillLibrary(ABC):
    """Prompt attention by another library.

    Attributes:
        title: the library's name in messages.
    """

    title: ClassVar[str]

    def reason_against(self, store: StoreFacts, variant: AttentionVariant) -> str | None:
        """Why the library cannot compute a layer, as the end of a sentence; None if it can."""
        if store.dtype not in (torch.float16, torch.bfloat16):
            return f"takes float16 and bfloat16, not {_name(store.dtype)}"
        if store.store_dtype != store.dtype:
            return f"reads pages of the queries' dtype, not {_name(store.store_dtype)} without scales"
        if store.first_position:
            return "attends to every slot of a request, and the first ones are unused here"
        if variant.sinks is not None:
            return "has no attention sinks"
        if variant.limits.chunk:
            return "has no attention within chunks"
        return None

    @abstractmethod
    def attention(self, plan: PrefillPlan) -> PromptAttention:
        """Lay out prompts for the layers of one forward; ``plan.bounds`` must be given."""


def pages_nhd(rows: torch.Tensor, page_size: int) -> torch.Tensor:
    """View rows ``[Hkv, R, D]`` as pages ``[P, page_size, Hkv, D]``. Rows behind the last whole page, which
    no page table names, are left out."""
    return _pages(rows, page_size).permute(1, 2, 0, 3)


def pages_hnd(rows: torch.Tensor, page_size: int) -> torch.Tensor:
    """View rows ``[Hkv, R, D]`` as pages ``[P, Hkv, page_size, D]``, as :func:`pages_nhd` does."""
    return _pages(rows, page_size).transpose(0, 1)


def _pages(rows: torch.Tensor, page_size: int) -> torch.Tensor:
    whole = rows.shape[1] // page_size
    return rows[:, : whole * page_size].unflatten(1, (whole, page_size))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
