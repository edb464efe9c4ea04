"""Paged store of keys and values.

Legend: L layers, R rows, B requests, N window nodes, Hkv heads, D head size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from eagle_kit.kv.store import PagedStore, PoolLayout, Segment
from eagle_kit.models.blocks.layers import Attend, KVSlots
from eagle_kit.ops.attention.prefill import (
    PrefillPlan,
    PromptAttention,
    chunk_attention,
    own_attention,
)
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.attention.window import WindowPlan, packed_window_attention, window_attention
from eagle_kit.ops.backend import uses_cpp, uses_triton
from eagle_kit.ops.cpu.summation import round_columns
from eagle_kit.ops.rope import Rows, WindowRows, rows_tensor
from eagle_kit.ops.rope.reference import store
from eagle_kit.ops.transfer import to_device


class PagedKV(PagedStore):
    """Keys and values ``[L, Hkv, R, D]``; rows and ``options`` are those of :class:`PagedStore`.

    Args:
        variants: how each layer attends; default plainly, with the usual scale.
        heads: of ``num_heads``, those that each layer uses; default all.

    Attributes:
        prompt_attention: attention of planned prompts in place of ours, set by who chooses among libraries.
    """

    prompt_attention: Callable[[PrefillPlan], PromptAttention] | None = None

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        layout: PoolLayout,
        *,
        variants: Sequence[AttentionVariant] | None = None,
        heads: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(layout, **options)
        shape = (num_layers, num_heads, self.num_rows, head_dim)
        self.k, self.v = self._empty(*shape), self._empty(*shape)
        self.variants = variants or [AttentionVariant(head_dim**-0.5)] * num_layers
        self.heads = heads or [num_heads] * num_layers
        assert len(self.variants) == len(self.heads) == num_layers

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[Hkv, R, D]`` of a layer."""
        return self.k[layer, : self.heads[layer]], self.v[layer, : self.heads[layer]]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, ``[L, Hkv, R, D]`` each."""
        return self.k, self.v

    def window_attend(
        self,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        ancestors: torch.Tensor,
        num_keys: int,
        num_columns: int,
    ) -> Attend:
        """See :class:`PagedStore`; the nodes' keys and values are written as soon as they are computed
        (:func:`~eagle_kit.models.blocks.layers.kv_slots_of`)."""
        return _WindowAttend(self, *self._window(page_table, prefix_lens, ancestors, num_keys, num_columns))

    def entering_attend(
        self,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        ancestors: torch.Tensor,
        num_keys: int,
        num_columns: int,
    ) -> Attend:
        """Make the attention of a forward over all ``[B * num_keys]`` rows of windows, of which the last N
        of each attend and the others are written only; arguments as of :meth:`window_attend`."""
        plan, rows = self._window(page_table, prefix_lens, ancestors, num_keys, num_columns)
        every = WindowRows(self.num_slots, self.window, rows.batch, num_keys, self.device)
        return _WindowAttend(self, plan, every)

    def prefill_attend(self, segments: Sequence[Segment]) -> Attend:
        """See :class:`PagedStore`. Kernels, libraries, and stores of another dtype read keys from the pool;
        otherwise those of earlier tokens are copied next to the new ones."""
        if self.prompt_attention is not None:
            rows, plan = self._prefill_plan(segments)
            return _PrefillAttend(self, rows, self.prompt_attention(plan))
        if uses_triton(self.k) or uses_cpp(self.k) or self.k.dtype != self.dtype:
            rows, plan = self._prefill_plan(segments)
            return _PrefillAttend(self, rows, own_attention(plan))
        target_rows, cached = self.prompt_rows(segments)
        sizes = [segment.stop - segment.start for segment in segments]
        _, heads, _, head_dim = self.k.shape
        spaces = []  # one for all layers: a new one would cost more than the copy
        for rows, size in zip(cached, sizes, strict=True):
            space = self.k.new_empty(2, heads, round_columns(len(rows) + size), head_dim)
            space[:, :, len(rows) + size :] = 0
            spaces.append(space)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k_rows, v_rows = self.layer(layer)
            k_rows.index_copy_(1, target_rows, k.transpose(0, 1))
            v_rows.index_copy_(1, target_rows, v.transpose(0, 1))
            out = []
            parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), cached, spaces, strict=True)
            for my_q, my_k, my_v, rows, space in parts:
                keys, values = space[:, : len(k_rows)]
                _join(k_rows, rows, my_k, keys)
                _join(v_rows, rows, my_v, values)
                out.append(chunk_attention(my_q, keys, values, self.variants[layer], start=len(rows)))
            return torch.cat(out) if len(out) > 1 else out[0]

        return attend

    def _prefill_plan(self, segments: Sequence[Segment]) -> tuple[torch.Tensor, PrefillPlan]:
        """Rows int64 ``[T]`` that the tokens' keys and values are written to, and the plan of those that they
        attend to."""
        bounds = [(segment.start, segment.stop, segment.write_from) for segment in segments]
        sizes = [segment.stop - segment.start for segment in segments]
        starts, stops, write_from = to_device(torch.tensor(bounds).t().contiguous(), self.k.device)
        cu_rows = torch.nn.functional.pad((stops - starts).cumsum(0), (1, 0))
        request = torch.repeat_interleave(stops - starts, output_size=sum(sizes))
        positions = torch.arange(sum(sizes), device=self.k.device) + (starts - cu_rows[:-1])[request]
        tables = torch.stack([segment.page_table for segment in segments])
        own = tables[request, positions // self.page_size] * self.page_size + positions % self.page_size
        rows = torch.where(positions >= write_from[request], own, self.trash_row)
        reaches = [(start, stop) for start, stop, _ in bounds]
        plan = PrefillPlan(tables, self.page_size, cu_rows, starts, self.first_slot, max(sizes), reaches)
        return rows, plan


def _join(store_rows: torch.Tensor, rows: torch.Tensor, new: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``rows [C]`` of ``store_rows [Hkv, R, D]``, then ``new [T, Hkv, D]``, to the front of ``out [Hkv,
    ..., D]``."""
    for head, mine in zip(store_rows, out, strict=True):
        torch.index_select(head, 0, rows, out=mine[: len(rows)])
    out[:, len(rows) : len(rows) + len(new)] = new.transpose(0, 1)


class _StoreAttend:
    """Attention over a store into whose rows keys and values are written as they are made."""

    def __init__(self, kv: PagedKV, rows: Rows) -> None:
        self.kv, self.rows = kv, rows

    def kv_slots(self, layer: int) -> KVSlots:
        """Store rows of the tokens."""
        return KVSlots(*self.kv.layer(layer), self.rows)

    def _stored(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``k`` and ``v`` -> the layer's keys and values, these included."""
        k_rows, v_rows, rows = self.kv_slots(layer)
        if len(k):
            store(k_rows, rows_tensor(rows), k, 1.0)
            store(v_rows, rows_tensor(rows), v, 1.0)
        return k_rows, v_rows


class _WindowAttend(_StoreAttend):
    """Attention of window nodes to the pool and the scratch."""

    def __init__(self, kv: PagedKV, plan: WindowPlan, rows: WindowRows) -> None:
        super().__init__(kv, rows)
        self.plan = plan

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k_rows, v_rows = self._stored(layer, k, v)
        b, n = self.plan.ancestors.shape
        nodes = q.unflatten(0, (b, -1))[:, -n:]
        return window_attention(nodes, k_rows, v_rows, self.plan, self.kv.variants[layer]).flatten(0, 1)

    def packed(self, rows: torch.Tensor, counts: torch.Tensor) -> Attend | None:
        """Make the attention of a forward over some nodes, ``rows`` int64 ``[T]`` of ``B * N``: the first
        ``counts`` int64 ``[B]`` of every window and some to spare; None where none takes them."""
        if not uses_cpp(self.kv.k) or type(self.plan) is not WindowPlan:
            return None
        return _PackedWindowAttend(self.kv, self.plan, rows_tensor(self.rows)[rows], counts)


class _PackedWindowAttend(_StoreAttend):
    """Attention of the first nodes of windows; the keys of others are not read."""

    def __init__(self, kv: PagedKV, plan: WindowPlan, rows: torch.Tensor, counts: torch.Tensor) -> None:
        super().__init__(kv, rows)
        self.plan, self.counts = plan, counts

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k_rows, v_rows = self._stored(layer, k, v)
        return packed_window_attention(q, k_rows, v_rows, self.plan, self.kv.variants[layer], self.counts)


class _PrefillAttend(_StoreAttend):
    """Attention of prompt tokens to the pool."""

    def __init__(self, kv: PagedKV, rows: torch.Tensor, attention: PromptAttention) -> None:
        super().__init__(kv, rows)
        self.attention = attention

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.attention(q, *self._stored(layer, k, v), self.kv.variants[layer])
