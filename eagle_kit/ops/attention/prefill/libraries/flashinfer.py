"""Prompt attention by FlashInfer: ``BatchPrefillWithPagedKVCacheWrapper``, planned once for a kind of layer
and forward, and run in every layer.

After the docstrings of ``flashinfer/prefill.py`` (https://github.com/flashinfer-ai/flashinfer): ``plan``
reads its three arrays of lengths on the host, so they are made there; the numbers of pages stay on the
device. A causal mask is aligned to the last key, and ``window_left`` counts keys before a query's own. Pages
are views of the layout HND, whose strides are free but the same for keys and values.
"""

from itertools import accumulate
from typing import Any, NamedTuple

import torch

from eagle_kit.ops.attention.prefill.libraries.library import (
    PrefillLibrary,
    PromptAttention,
    StoreFacts,
    pages_hnd,
)
from eagle_kit.ops.attention.prefill.plan import PrefillPlan
from eagle_kit.ops.attention.variant import AttentionVariant

HEAD_DIMS = (64, 128, 256)
"""Head sizes that its paged kernels are made for."""
MOST_VALUES = 1 << 32
"""Values of a head from which on their stride does not fit 32 bits, which FlashInfer uses."""
WORKSPACE_BYTES = 128 << 20
"""Size of the workspace that its documentation recommends; all wrappers share one, since layers run one after
another."""
PLAN_BYTES = 8 << 20
"""Bytes that each wrapper allocates for its plan."""


class _Kind(NamedTuple):
    """Properties of layers that share a plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    window: int
    soft_cap: float | None


class FlashInfer(PrefillLibrary):
    """``wrapper`` is the library's class."""

    title = "FlashInfer"

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.wrapper = wrapper
        self.device = device
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[_Kind, Any] = {}
        self._plans: dict[_Kind, PrefillPlan] = {}
        self._planned: torch.cuda.Event | None = None

    def reason_against(self, store: StoreFacts, variant: AttentionVariant) -> str | None:
        """See :class:`PrefillLibrary`."""
        if store.head_dim not in HEAD_DIMS:
            return f"takes the head sizes 64, 128 and 256, not {store.head_dim}"
        if store.num_values >= MOST_VALUES:
            return "counts the values of a head in 32 bits, and the pool has more"
        return super().reason_against(store, variant)

    def attention(self, plan: PrefillPlan) -> PromptAttention:
        """See :class:`PrefillLibrary`."""
        arrays = self._arrays(plan)

        def attend(
            q: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, variant: AttentionVariant
        ) -> torch.Tensor:
            kind = _Kind(
                num_heads=q.shape[1],
                num_kv_heads=k_rows.shape[0],
                head_dim=q.shape[2],
                dtype=q.dtype,
                scale=variant.scale,
                window=variant.limits.window,
                soft_cap=variant.soft_cap,
            )
            if self._plans.get(kind) is not plan:
                self._plan(kind, plan, arrays)
            pages = (pages_hnd(k_rows, plan.page_size), pages_hnd(v_rows, plan.page_size))
            out: torch.Tensor = self._wrappers[kind].run(q, pages)
            return out

        return attend

    def _arrays(self, plan: PrefillPlan) -> tuple[torch.Tensor, ...]:
        """The first arguments of ``plan``, int32: ``qo_indptr`` and ``paged_kv_indptr``, on the host,
        ``paged_kv_indices``, and ``paged_kv_last_page_len``, on the host."""
        assert plan.bounds is not None
        num_queries = [stop - start for start, stop in plan.bounds]
        num_pages = [-(-stop // plan.page_size) for _, stop in plan.bounds]
        tables = [table[:count] for table, count in zip(plan.page_tables, num_pages, strict=True)]
        last_lens = [
            stop - (count - 1) * plan.page_size
            for (_, stop), count in zip(plan.bounds, num_pages, strict=True)
        ]
        return (
            self._on_host([0, *accumulate(num_queries)]),
            self._on_host([0, *accumulate(num_pages)]),
            torch.cat(tables).int(),
            self._on_host(last_lens),
        )

    def _on_host(self, numbers: list[int]) -> torch.Tensor:
        tensor = torch.tensor(numbers, dtype=torch.int32)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def _plan(self, kind: _Kind, plan: PrefillPlan, arrays: tuple[torch.Tensor, ...]) -> None:
        """Plan for a kind of layer. A plan is copied to the device out of host memory that the next plan
        overwrites, so the host first waits for the copy before."""
        if self._planned is not None:
            self._planned.synchronize()
        if kind not in self._wrappers:
            if self._workspace is None:
                self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
            self._wrappers[kind] = self.wrapper(self._workspace, "HND")
        self._wrappers[kind].plan(
            *arrays,
            kind.num_heads,
            kind.num_kv_heads,
            kind.head_dim,
            plan.page_size,
            causal=True,
            sm_scale=kind.scale,
            window_left=kind.window - 1 if kind.window else -1,
            logits_soft_cap=kind.soft_cap,
            q_data_type=kind.dtype,
            kv_data_type=kind.dtype,
        )
        self._plans[kind] = plan
        if self.device.type == "cuda":
            self._planned = torch.cuda.Event()
            self._planned.record()
