"""The paged key-value store of one model: a pool of committed tokens and a scratch for window nodes.

Legend: L layers, R rows, B requests, N window nodes, Hkv heads, D head size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from eagle_kit.kernels.backend import uses_triton
from eagle_kit.kernels.commit import commit_path
from eagle_kit.kernels.prefill_attention import PrefillPlan, paged_prefill_attention, prefill_attention
from eagle_kit.kernels.rope.reference import store
from eagle_kit.kernels.window_attention import WindowPlan, window_attention
from eagle_kit.models.layers import Attend, Place


class Segment(NamedTuple):
    """Prompt tokens of one request that own slots start..stop-1 under ``page_table [P]``. Those before
    ``write_from`` lie in pages shared with other requests and are computed again without being stored."""

    page_table: torch.Tensor
    start: int
    stop: int
    write_from: int


class PagedKV:
    """Keys and values ``[L, Hkv, R, D]``; rows are the slots of ``num_pages`` pages and of one *dummy page*,
    then a scratch of ``window`` rows per request of a batch, then one dummy row that padding reads and nobody
    writes, and one trash row for what is not to be kept.

    Only committed tokens are ever in the pool: a window writes its nodes into the scratch, :meth:`commit`
    copies the accepted ones. Slot ``page_table[b, p // page_size] * page_size + p % page_size`` belongs to
    position p. Page tables name the dummy page where a request has no page.

    Args:
        dtype: of queries, keys and values.
        store_dtype: of the store when it is another one: fp8 e4m3, which saturates.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        *,
        num_pages: int,
        page_size: int,
        max_batch_size: int,
        window: int,
        first_slot: int = 0,
        dtype: torch.dtype = torch.float32,
        store_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.dtype = dtype
        self.page_size, self.window, self.first_slot = page_size, window, first_slot
        self.dummy_page = num_pages
        self.num_slots = (num_pages + 1) * page_size
        self.dummy_row = self.num_slots + max_batch_size * window
        self.trash_row = self.dummy_row + 1
        shape = (num_layers, num_heads, self.trash_row + 1, head_dim)
        self.k = torch.zeros(shape, dtype=store_dtype or dtype, device=device)
        self.v = torch.zeros(shape, dtype=store_dtype or dtype, device=device)
        self.scale = head_dim**-0.5

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one committed token occupies, keys and values of all layers."""
        return 2 * self.k.shape[0] * self.k.shape[1] * self.k.shape[3] * self.k.element_size()

    def slots(self, page_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Pool rows of ``positions`` int64 ``[B, n]`` under ``page_table [B, P]`` -> ``[B, n]``."""
        page = (positions // self.page_size).clamp(max=page_table.shape[1] - 1)
        return page_table.gather(1, page) * self.page_size + positions % self.page_size

    def scratch_rows(self, batch_size: int, start: int, stop: int) -> torch.Tensor:
        """Scratch rows start..stop-1 of each request -> int64 ``[B, stop - start]``."""
        request = torch.arange(batch_size, device=self.k.device)[:, None] * self.window
        return self.num_slots + request + torch.arange(start, stop, device=self.k.device)

    def window_attend(
        self,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        ancestors: torch.Tensor,
        num_keys: int,
        num_columns: int,
    ) -> Attend:
        """Attention for a forward over ``[B * N]`` window nodes, the last N of ``num_keys`` window keys.

        The nodes' keys and values go into the scratch (`Attend.place`); each node attends to the first
        ``prefix_lens [B]`` slots (without those before ``first_slot``) and to the node's ``ancestors [B,
        N]``. ``num_columns`` bounds prefix + ``num_keys``.
        """
        b, n = ancestors.shape
        rows = self.scratch_rows(b, num_keys - n, num_keys).reshape(-1)
        plan = WindowPlan(
            page_table=page_table,
            page_size=self.page_size,
            prefix_lens=prefix_lens,
            first_slot=self.first_slot,
            scratch_start=self.num_slots,
            scratch_stride=self.window,
            num_keys=num_keys,
            ancestors=ancestors,
            num_columns=num_columns,
            dummy_row=self.dummy_row,
            dtype=self.dtype,
        )
        return _WindowAttend(self, rows, plan)

    def prefill_attend(self, segments: Sequence[Segment]) -> Attend:
        """Attention for a forward over prompt tokens of one or several requests, packed in this order.

        The returned callable stores keys and values into the pool and attends causally from ``first_slot``
        on, every request by itself. Kernels read keys from the pool, as anybody does where it is of another
        dtype; elsewhere those of earlier tokens are copied next to the new ones.
        """
        if uses_triton(self.k) or self.k.dtype != self.dtype:
            return _PrefillAttend(self, *self._prefill_plan(segments))
        written, cached = [], []
        for table, start, stop, write_from in segments:
            positions = torch.arange(self.first_slot, stop, device=self.k.device)
            rows = self.slots(table[None], positions[None])[0]
            own = rows[start - self.first_slot :]
            keep = positions[start - self.first_slot :] >= write_from
            written.append(torch.where(keep, own, self.trash_row))
            cached.append(rows[: start - self.first_slot])
        target_rows = torch.cat(written)
        sizes = [segment.stop - segment.start for segment in segments]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k_rows, v_rows = self.k[layer], self.v[layer]
            k_rows.index_copy_(1, target_rows, k.transpose(0, 1))
            v_rows.index_copy_(1, target_rows, v.transpose(0, 1))
            out = []
            parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), cached, strict=True)
            for my_q, my_k, my_v, rows in parts:
                if rows.numel():
                    my_k = torch.cat((k_rows[:, rows].transpose(0, 1), my_k))
                    my_v = torch.cat((v_rows[:, rows].transpose(0, 1), my_v))
                out.append(prefill_attention(my_q, my_k, my_v, self.scale))
            return torch.cat(out) if len(out) > 1 else out[0]

        return attend

    def _prefill_plan(self, segments: Sequence[Segment]) -> tuple[torch.Tensor, PrefillPlan]:
        """Rows that the tokens' keys and values go to, int64 ``[T]``, and where those lie that they attend
        to."""
        numbers = torch.tensor([segment[1:] for segment in segments]).t().contiguous()
        sizes = [segment.stop - segment.start for segment in segments]
        if self.k.is_cuda:
            numbers = numbers.pin_memory()
        starts, stops, write_from = numbers.to(self.k.device, non_blocking=True)
        cu_rows = torch.nn.functional.pad((stops - starts).cumsum(0), (1, 0))
        request = torch.repeat_interleave(stops - starts, output_size=sum(sizes))
        positions = torch.arange(sum(sizes), device=self.k.device) + (starts - cu_rows[:-1])[request]
        tables = torch.stack([segment.page_table for segment in segments])
        own = tables[request, positions // self.page_size] * self.page_size + positions % self.page_size
        rows = torch.where(positions >= write_from[request], own, self.trash_row)
        plan = PrefillPlan(tables, self.page_size, cu_rows, starts, self.first_slot, max(sizes))
        return rows, plan

    def commit_window(
        self,
        page_table: torch.Tensor,
        nodes: torch.Tensor,
        first_position: torch.Tensor,
        num_committed: torch.Tensor,
    ) -> None:
        """Copy window ``nodes [B, n]`` to positions ``first_position [B] + 0..n-1``, the first
        ``num_committed [B]``."""
        commit_path(
            self.k,
            self.v,
            page_table,
            self.page_size,
            nodes,
            first_position,
            num_committed,
            self.num_slots,
            self.window,
        )


class _StoreAttend:
    """Attention over a store that keys and values are written into as they are made, to ``rows [T]``."""

    def __init__(self, kv: PagedKV, rows: torch.Tensor) -> None:
        self.kv, self.rows = kv, rows

    def place(self, layer: int) -> Place:
        """The tokens' rows of the store."""
        return Place(self.kv.k[layer], self.kv.v[layer], self.rows)

    def _stored(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's keys and values, these included."""
        k_rows, v_rows, rows = self.place(layer)
        if len(k):
            store(k_rows, rows, k, 1.0)
            store(v_rows, rows, v, 1.0)
        return k_rows, v_rows


class _WindowAttend(_StoreAttend):
    """Attention of a window's nodes, over the pool and the scratch."""

    def __init__(self, kv: PagedKV, rows: torch.Tensor, plan: WindowPlan) -> None:
        super().__init__(kv, rows)
        self.plan = plan

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k_rows, v_rows = self._stored(layer, k, v)
        b, n = self.plan.ancestors.shape
        nodes = q.view(b, n, *q.shape[1:])
        return window_attention(nodes, k_rows, v_rows, self.plan, self.kv.scale).flatten(0, 1)


class _PrefillAttend(_StoreAttend):
    """Attention of prompt tokens, over the pool."""

    def __init__(self, kv: PagedKV, rows: torch.Tensor, plan: PrefillPlan) -> None:
        super().__init__(kv, rows)
        self.plan = plan

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return paged_prefill_attention(q, *self._stored(layer, k, v), self.plan, self.kv.scale)
