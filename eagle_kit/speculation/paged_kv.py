"""The paged key-value store of one model: a pool of committed tokens and a scratch for window nodes.

Legend: L layers, R rows, B requests, N window nodes, Hkv heads, D head size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from eagle_kit.kernels.prefill_attention import prefill_attention
from eagle_kit.kernels.window_attention import WindowPlan, window_attention
from eagle_kit.models.layers import Attend


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
    writes, and one trash row where rejected tokens go.

    Only committed tokens are ever in the pool: a window writes its nodes into the scratch, :meth:`commit`
    copies the accepted ones. Slot ``page_table[b, p // page_size] * page_size + p % page_size`` belongs to
    position p. Page tables name the dummy page where a request has no page.
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
        device: torch.device | str = "cpu",
    ) -> None:
        self.page_size, self.window, self.first_slot = page_size, window, first_slot
        self.dummy_page = num_pages
        self.num_slots = (num_pages + 1) * page_size
        self.dummy_row = self.num_slots + max_batch_size * window
        self.trash_row = self.dummy_row + 1
        shape = (num_layers, num_heads, self.trash_row + 1, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
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

        The returned callable stores the nodes' keys and values into the scratch and attends to the first
        ``prefix_lens [B]`` slots (without those before ``first_slot``) and to the node's ``ancestors [B,
        N]``. ``num_columns`` bounds prefix + ``num_keys``.
        """
        b, n = ancestors.shape
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
            dtype=self.k.dtype,
        )
        written = self.scratch_rows(b, num_keys - n, num_keys).reshape(-1)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k_rows, v_rows = self.k[layer], self.v[layer]
            k_rows.index_copy_(1, written, k.transpose(0, 1))
            v_rows.index_copy_(1, written, v.transpose(0, 1))
            return window_attention(q.view(b, n, *q.shape[1:]), k_rows, v_rows, plan, self.scale).flatten(
                0, 1
            )

        return attend

    def prefill_attend(self, segments: Sequence[Segment]) -> Attend:
        """Attention for a forward over prompt tokens of one or several requests, packed in this order.

        The returned callable stores keys and values into the pool and attends causally from ``first_slot``
        on, every request by itself.
        """
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

    def commit(self, source_rows: torch.Tensor, target_rows: torch.Tensor) -> None:
        """Copy rows ``[n]`` to rows ``[n]`` in every layer; rejected ones are sent to the trash row."""
        self.k.index_copy_(2, target_rows, self.k.index_select(2, source_rows))
        self.v.index_copy_(2, target_rows, self.v.index_select(2, source_rows))

    def commit_window(
        self,
        page_table: torch.Tensor,
        nodes: torch.Tensor,
        first_position: torch.Tensor,
        num_committed: torch.Tensor,
    ) -> None:
        """Copy window ``nodes [B, n]`` to positions ``first_position [B] + 0..n-1``, the first
        ``num_committed [B]``."""
        b, n = nodes.shape
        offset = torch.arange(n, device=nodes.device)
        slots = self.slots(page_table, first_position[:, None] + offset)
        slots = torch.where(offset < num_committed[:, None], slots, self.trash_row)
        source = self.scratch_rows(b, 0, self.window).gather(1, nodes)
        self.commit(source.view(-1), slots.view(-1))
