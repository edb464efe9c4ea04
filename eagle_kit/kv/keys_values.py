"""Paged store of keys and values, for attention with heads.

Legend: L layers, R rows, B requests, N window nodes, T tokens of a forward, C cached tokens, Hq / Hkv query /
key heads, D head size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from eagle_kit.kv.store import PaddedSegments, PagedStore, PoolLayout, Segment
from eagle_kit.models.blocks.layers import Attend, KVRows
from eagle_kit.ops.attention.prefill import (
    PrefillPlan,
    PromptAttention,
    chunk_attention,
    own_attention,
)
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.attention.window import WindowPlan, window_attention
from eagle_kit.ops.backend import uses_cpp, uses_triton
from eagle_kit.ops.cpu.summation import round_columns
from eagle_kit.ops.rope import Rows, WindowRows, rows_tensor
from eagle_kit.ops.rope.reference import store
from eagle_kit.ops.transfer import to_device


class PagedKV(PagedStore):
    """Keys and values ``[L, Hkv, R, D]`` of every layer.

    Args:
        num_layers: L.
        num_heads: Hkv, the largest number of key heads of a layer.
        head_dim: D.
        layout: sizes of the store.
        variants: variant of attention of each layer; None for plain attention with scale D ** -0.5.
        heads: number of key heads of each layer; None for ``num_heads`` in all.
        options: further arguments of :class:`PagedStore`.

    Attributes:
        k: keys ``[L, Hkv, R, D]``.
        v: values ``[L, Hkv, R, D]``.
        prompt_attention: makes the attention of a prompt from its plan; None for the package's own kernels.
            The prefill backends of the engine set it.
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
        self.k = self._empty(*shape)
        self.v = self._empty(*shape)
        self.variants = variants or [AttentionVariant(head_dim**-0.5)] * num_layers
        self.heads = heads or [num_heads] * num_layers
        assert len(self.variants) == len(self.heads) == num_layers

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, ``[Hkv, R, D]`` each; Hkv is the number of key heads of that layer."""
        num_heads = self.heads[layer]
        return self.k[layer, :num_heads], self.v[layer, :num_heads]

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
        """See :class:`PagedStore`. The projection may write keys and values to the store itself
        (:func:`~eagle_kit.models.blocks.layers.kv_rows_of`)."""
        plan, rows = self._window(page_table, prefix_lens, ancestors, num_keys, num_columns)
        return _WindowAttend(self, plan, rows)

    def entering_attend(
        self,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        ancestors: torch.Tensor,
        num_keys: int,
        num_columns: int,
    ) -> Attend:
        """Make the attention of a forward over all ``[B * num_keys]`` window keys.

        The forward stores all of them. Only the last N keys of each window attend. The arguments are those of
        :meth:`window_attend`.
        """
        plan, rows = self._window(page_table, prefix_lens, ancestors, num_keys, num_columns)
        all_rows = WindowRows(self.scratch_start, self.window, rows.batch, num_keys, self.device)
        return _WindowAttend(self, plan, all_rows)

    def prefill_attend(self, segments: Sequence[Segment]) -> Attend:
        """See :class:`PagedStore`. Kernels, libraries, and stores with another dtype than the model's read
        the keys from the pool. In torch, cached keys are copied in front of the new ones."""
        # Attention that reads the pool.
        if self.prompt_attention is not None:
            rows, plan = self._prefill_plan(segments)
            return _PrefillAttend(self, rows, self.prompt_attention(plan))
        reads_pool = (
            uses_triton("attention/prefill", self.k) or uses_cpp(self.k) or self.k.dtype != self.dtype
        )
        if reads_pool:
            rows, plan = self._prefill_plan(segments)
            return _PrefillAttend(self, rows, own_attention(plan))

        # Attention of each request to a buffer of its keys and values.
        return _CopiedPrefillAttend(self, segments)

    def padded_prefill_attend(self, segments: PaddedSegments) -> Attend:
        """Make the attention of a forward over prompt tokens of fixed shape; the host reads no tensor.

        The forward stores the tokens in the pool. The package's own kernel computes it, whatever
        :attr:`prompt_attention` is.
        """
        plan = PrefillPlan(
            page_tables=segments.page_tables,
            page_size=self.page_size,
            cu_rows=segments.cu_rows,
            starts=segments.starts,
            first_position=self.first_position,
            max_rows=len(segments.segments),
        )
        return _PrefillAttend(self, self.padded_rows(segments), own_attention(plan))

    def _prefill_plan(self, segments: Sequence[Segment]) -> tuple[torch.Tensor, PrefillPlan]:
        """Plan the attention of prompt tokens to the pool.

        Returns:
            Rows int64 ``[T]`` that the tokens are written to, the trash row for tokens that are not stored,
            and the plan.
        """
        # Bounds of the segments, on the host and on the device.
        device = self.k.device
        bounds = [(segment.start, segment.stop) for segment in segments]
        sizes = [stop - start for start, stop in bounds]
        num_tokens = sum(sizes)
        on_host = torch.tensor([(segment.start, segment.stop, segment.write_from) for segment in segments])
        starts, stops, write_from = to_device(on_host.t().contiguous(), device)
        cu_rows = torch.nn.functional.pad((stops - starts).cumsum(0), (1, 0))

        # Request and position of every token.
        request = torch.repeat_interleave(stops - starts, output_size=num_tokens)
        positions = torch.arange(num_tokens, device=device) + (starts - cu_rows[:-1])[request]

        # Rows that the tokens are written to.
        tables = torch.stack([segment.page_table for segment in segments])
        pages = tables[request, positions // self.page_size]
        pool_rows = pages * self.page_size + positions % self.page_size
        rows = torch.where(positions >= write_from[request], pool_rows, self.trash_row)

        plan = PrefillPlan(tables, self.page_size, cu_rows, starts, self.first_position, max(sizes), bounds)
        return rows, plan


class _CopiedPrefillAttend:
    """Attention of prompt tokens in torch, request by request, to copies of the cached keys and the new keys.

    Args:
        kv: the store.
        segments: tokens of each request, in the order of packing.
    """

    def __init__(self, kv: PagedKV, segments: Sequence[Segment]) -> None:
        self._kv = kv
        self._written, self._cached = kv.prompt_rows(segments)
        self._sizes = [segment.stop - segment.start for segment in segments]

        # One buffer ``[2, Hkv, columns, D]`` for each request. All layers use it, because an allocation in
        # each layer would take longer than the copy. Columns behind the keys are zero.
        num_heads = kv.k.shape[1]
        head_dim = kv.k.shape[3]
        self._buffers: list[torch.Tensor] = []
        for rows, size in zip(self._cached, self._sizes, strict=True):
            num_keys = len(rows) + size
            buffer = kv.k.new_empty(2, num_heads, round_columns(num_keys), head_dim)
            buffer[:, :, num_keys:] = 0
            self._buffers.append(buffer)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Store the new keys and values.
        k_rows, v_rows = self._kv.layer(layer)
        k_rows.index_copy_(1, self._written, k.transpose(0, 1))
        v_rows.index_copy_(1, self._written, v.transpose(0, 1))

        # Attend within each request.
        requests = zip(
            q.split(self._sizes),
            k.split(self._sizes),
            v.split(self._sizes),
            self._cached,
            self._buffers,
            strict=True,
        )
        out: list[torch.Tensor] = []
        for request_q, request_k, request_v, cached, buffer in requests:
            keys, values = buffer[:, : len(k_rows)]
            _join(k_rows, cached, request_k, keys)
            _join(v_rows, cached, request_v, values)
            variant = self._kv.variants[layer]
            out.append(chunk_attention(request_q, keys, values, variant, start=len(cached)))
        if len(out) == 1:
            return out[0]
        return torch.cat(out)


def _join(store_rows: torch.Tensor, cached: torch.Tensor, new: torch.Tensor, out: torch.Tensor) -> None:
    """Write cached keys, then new ones, to the front of ``out``.

    Args:
        store_rows: ``[Hkv, R, D]``, a layer of the store.
        cached: int64 ``[C]``, rows of the cached tokens.
        new: ``[T, Hkv, D]``, keys of the new tokens.
        out: ``[Hkv, columns, D]``, written in place.
    """
    num_cached = len(cached)
    for head_rows, head_out in zip(store_rows, out, strict=True):
        torch.index_select(head_rows, 0, cached, out=head_out[:num_cached])
    out[:, num_cached : num_cached + len(new)] = new.transpose(0, 1)


class _StoreAttend:
    """Base of attention that first writes the new keys and values to the store.

    Args:
        kv: the store.
        rows: store row of each token of the forward.
    """

    def __init__(self, kv: PagedKV, rows: Rows) -> None:
        self.kv = kv
        self.rows = rows

    def kv_rows(self, layer: int) -> KVRows:
        """Keys and values of a layer, and the rows of the tokens in them."""
        keys, values = self.kv.layer(layer)
        return KVRows(keys, values, self.rows)

    def _stored(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``k`` and ``v`` ``[T, Hkv, D]``, unless they are empty because the projection wrote them.

        Returns:
            Keys and values of the layer, ``[Hkv, R, D]`` each.
        """
        k_rows, v_rows, rows = self.kv_rows(layer)
        if len(k) > 0:
            store(k_rows, rows_tensor(rows), k, 1.0)
            store(v_rows, rows_tensor(rows), v, 1.0)
        return k_rows, v_rows


class _WindowAttend(_StoreAttend):
    """Attention of window nodes to the pool and the scratch.

    Args:
        kv: the store.
        plan: plan of the window.
        rows: scratch row of each token of the forward.
    """

    def __init__(self, kv: PagedKV, plan: WindowPlan, rows: WindowRows) -> None:
        super().__init__(kv, rows)
        self.plan = plan

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k_rows, v_rows = self._stored(layer, k, v)
        batch, num_nodes = self.plan.ancestors.shape[:2]
        nodes = q.unflatten(0, (batch, -1))[:, -num_nodes:]  # [B, N, Hq, D]
        out = window_attention(nodes, k_rows, v_rows, self.plan, self.kv.variants[layer])
        return out.flatten(0, 1)


class _PrefillAttend(_StoreAttend):
    """Attention of prompt tokens to the pool.

    Args:
        kv: the store.
        rows: int64 ``[T]``, row that each token is written to.
        attention: attention for the plan of these tokens.
    """

    def __init__(self, kv: PagedKV, rows: torch.Tensor, attention: PromptAttention) -> None:
        super().__init__(kv, rows)
        self.attention = attention

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k_rows, v_rows = self._stored(layer, k, v)
        return self.attention(q, k_rows, v_rows, self.kv.variants[layer])
