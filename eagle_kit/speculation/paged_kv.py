"""The paged store of keys and values.

Legend: L layers, R rows, B requests, N window nodes, Hkv heads, D head size.
"""

from collections.abc import Sequence

import torch

from eagle_kit.kernels.prefill_attention import prefill_attention
from eagle_kit.kernels.window_attention import WindowPlan, window_attention
from eagle_kit.models.layers import Attend, Place
from eagle_kit.speculation.paged_store import PagedStore, Segment


class PagedKV(PagedStore):
    """Keys and values ``[L, Hkv, R, D]``; see :class:`PagedStore` for the rows."""

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
        super().__init__(
            num_pages=num_pages,
            page_size=page_size,
            max_batch_size=max_batch_size,
            window=window,
            first_slot=first_slot,
            device=device,
        )
        shape = (num_layers, num_heads, self.num_rows, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.scale = head_dim**-0.5

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values."""
        return self.k, self.v

    def window_attend(
        self,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        ancestors: torch.Tensor,
        num_keys: int,
        num_columns: int,
    ) -> Attend:
        """See :class:`PagedStore`; the nodes' keys and values are written as they are made
        (:class:`~eagle_kit.models.layers.StoringAttend`)."""
        return _WindowAttend(self, *self._window(page_table, prefix_lens, ancestors, num_keys, num_columns))

    def prefill_attend(self, segments: Sequence[Segment]) -> Attend:
        """See :class:`PagedStore`."""
        target_rows, cached = self._prompt_rows(segments)
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


class _WindowAttend:
    """Attention of a window's nodes, whose keys and values are written into the scratch as they are made."""

    def __init__(self, kv: PagedKV, plan: WindowPlan, rows: torch.Tensor) -> None:
        self.kv, self.plan, self.rows = kv, plan, rows

    def place(self, layer: int) -> Place:
        """The nodes' rows of the scratch."""
        return Place(self.kv.k[layer], self.kv.v[layer], self.rows)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k_rows, v_rows, rows = self.place(layer)
        if len(k):
            k_rows.index_copy_(1, rows, k.transpose(0, 1))
            v_rows.index_copy_(1, rows, v.transpose(0, 1))
        b, n = self.plan.ancestors.shape
        nodes = q.view(b, n, *q.shape[1:])
        return window_attention(nodes, k_rows, v_rows, self.plan, self.kv.scale).flatten(0, 1)
