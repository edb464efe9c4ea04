"""The paged key-value store of one model: a pool of committed tokens and a scratch for window nodes.

Legend: L layers, R rows, B requests, N window nodes, Hkv heads, D head size.
"""

import torch

from eagle_kit.kernels.prefill_attention import prefill_attention
from eagle_kit.kernels.window_attention import plan_window, window_attention
from eagle_kit.models.layers import Attend


class PagedKV:
    """Keys and values ``[L, Hkv, R, D]``; rows are ``num_slots`` pool slots, then a scratch of ``window``
    rows per request of a batch, then one dummy row that padding reads and nobody writes, and one trash
    row where rejected tokens go.

    Only committed tokens are ever in the pool: a window writes its nodes into the scratch, :meth:`commit`
    copies the accepted ones. Slot ``page_table[b, p // page_size] * page_size + p % page_size`` belongs to
    position p.
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
        self.num_slots = num_pages * page_size
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
        scratch = self.scratch_rows(b, 0, num_keys)
        plan = plan_window(
            page_table,
            self.page_size,
            prefix_lens,
            self.first_slot,
            scratch,
            ancestors,
            num_columns,
            self.dummy_row,
            self.k.dtype,
        )
        written = scratch[:, num_keys - n :].reshape(-1)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k_rows, v_rows = self.k[layer], self.v[layer]
            k_rows.index_copy_(1, written, k.transpose(0, 1))
            v_rows.index_copy_(1, written, v.transpose(0, 1))
            return window_attention(q.view(b, n, *q.shape[1:]), k_rows, v_rows, plan, self.scale).flatten(
                0, 1
            )

        return attend

    def prefill_attend(self, page_table: torch.Tensor, start: int, stop: int) -> Attend:
        """Attention for a forward over the prompt tokens that own slots start..stop-1 of one request.

        The returned callable stores their keys and values into the pool and attends causally from
        ``first_slot`` on. ``page_table`` is ``[1, P]``.
        """
        positions = torch.arange(self.first_slot, stop, device=self.k.device)[None]
        rows = self.slots(page_table, positions)[0]
        written = rows[start - self.first_slot :]
        cached = rows[: start - self.first_slot]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k_rows, v_rows = self.k[layer], self.v[layer]
            k_rows.index_copy_(1, written, k.transpose(0, 1))
            v_rows.index_copy_(1, written, v.transpose(0, 1))
            if cached.numel():
                k, v = (
                    torch.cat((rows[:, cached].transpose(0, 1), new))
                    for rows, new in ((k_rows, k), (v_rows, v))
                )
            return prefill_attention(q, k, v, self.scale)

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
