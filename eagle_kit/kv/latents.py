"""Paged store of multi-head latent attention (``models/blocks/mla.py``): one row for each token and layer.

Windows attend in the absorbed form, which reads a row once for all heads and nodes. Prompts attend in the
expanded form with their earlier tokens, so the chunks of a prompt give the results of the whole prompt.

Legend: L layers, R rows of the store, C rows before a prompt, D = latent + RoPE size, H heads, Dk / Dv sizes
of an expanded key / value, T prompt tokens.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from eagle_kit.kv.store import PagedStore, PoolLayout, Segment
from eagle_kit.models.blocks.mla import LatentAttend, LatentHeads, Queries
from eagle_kit.models.cache_specs import LatentSpec
from eagle_kit.ops.attention.mla import mla_window_attention
from eagle_kit.ops.attention.prefill import PrefillPlan, chunk_attention, paged_prefill_attention
from eagle_kit.ops.attention.window import WindowPlan
from eagle_kit.ops.backend import uses_triton
from eagle_kit.ops.cpu.summation import round_columns
from eagle_kit.ops.rope import WindowRows
from eagle_kit.ops.rope.reference import store
from eagle_kit.ops.transfer import to_device

EXPANDED_PAGE_SIZE = 16
"""Number of rows of a page of expanded keys."""

PACKED_TOKENS = 8192
"""Largest number of tokens, cached tokens included, of prompts that are expanded together. With the 128 heads
of DeepSeek-V3 their keys take half a gigabyte."""


class PagedLatents(PagedStore):
    """Rows of latents and RoPE parts of keys.

    Args:
        spec: sizes of the rows and scale of the scores.
        layout: sizes of the store.
        options: further arguments of :class:`PagedStore`.

    Attributes:
        rows: ``[L, R, D]``, the latent first, then the RoPE part.
    """

    def __init__(self, spec: LatentSpec, layout: PoolLayout, **options: Any) -> None:
        super().__init__(layout, **options)
        self.spec = spec
        self.rows = self._empty(spec.num_layers, self.num_rows, spec.latent_dim + spec.rope_dim)

    @property
    def tensors(self) -> tuple[torch.Tensor, None]:
        """Rows ``[L, R, D]``, and None for values."""
        return self.rows, None

    def window_attend(
        self,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        ancestors: torch.Tensor,
        num_keys: int,
        num_columns: int,
    ) -> LatentAttend:
        """See :class:`PagedStore`."""
        plan, rows = self._window(page_table, prefix_lens, ancestors, num_keys, num_columns)
        return _WindowAttend(self, plan, rows)

    def prefill_attend(self, segments: Sequence[Segment]) -> LatentAttend:
        """See :class:`PagedStore`."""
        return _PrefillAttend(self, segments)

    def write_prompt(self, layer: int, indices: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Store the rows of prompt tokens and round them to the dtype of the store.

        A later chunk of the prompt reads the rounded rows, so the current chunk attends to them as well.

        Args:
            layer: layer whose rows are written.
            indices: int64 ``[T]``, rows of the store that are written.
            rows: ``[T, D]``.

        Returns:
            The rounded rows ``[T, D]``, with the dtype of ``rows``.
        """
        stored = self.rows[layer]
        _put(stored, indices, rows)
        if stored.dtype == rows.dtype:
            return rows
        rounded = torch.empty_like(rows, dtype=stored.dtype)
        _put(rounded, torch.arange(len(rows), device=rows.device), rows)
        return rounded.to(rows.dtype)


class _LatentAttend:
    """Base that refuses the keys and values of other layers."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a store of latents was given keys and values")


class _WindowAttend(_LatentAttend):
    """Absorbed attention of window nodes.

    Args:
        store: the store.
        plan: plan of the window.
        rows: scratch rows of the nodes.
    """

    def __init__(self, store: PagedLatents, plan: WindowPlan, rows: WindowRows) -> None:
        self.store = store
        self.plan = plan
        self.rows = rows

    def latents(self, layer: int, q: Queries, rows: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.mla.LatentAttend`."""
        stored = self.store.rows[layer]
        spec = self.store.spec
        _put(stored, self.rows.tensor, rows)
        nodes = heads.absorb(q).unflatten(0, self.plan.ancestors.shape[:2])  # [B, N, H, D]
        out = mla_window_attention(nodes, stored, self.plan, spec.scale, latent_dim=spec.latent_dim)
        return heads.project(out.flatten(0, 1))


class _PrefillAttend(_LatentAttend):
    """Expanded attention of prompts: several prompts in a launch of the kernel, one at a time in torch.

    Args:
        store: the store.
        segments: tokens of each request, in the order of packing.
    """

    def __init__(self, store: PagedLatents, segments: Sequence[Segment]) -> None:
        self.store = store
        self.written, self.cached = store.prompt_rows(segments)
        self.sizes = [segment.stop - segment.start for segment in segments]
        self.packs: list[_Pack] = []
        if uses_triton("attention/prefill", store.rows):
            self.packs = _make_packs(self.sizes, self.cached)

    def latents(self, layer: int, q: Queries, rows: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.mla.LatentAttend`."""
        stored = self.store.rows[layer]
        new_rows = self.store.write_prompt(layer, self.written, rows)
        if self.packs:
            out = self._attend_packs(stored, q, new_rows, heads)
        else:
            out = self._attend_each(stored, q, new_rows, heads)
        if len(out) == 1:
            return out[0]
        return torch.cat(out)

    def _attend_packs(
        self, stored: torch.Tensor, q: Queries, new_rows: torch.Tensor, heads: LatentHeads
    ) -> list[torch.Tensor]:
        """Attend with one launch for each pack; outputs ``[T, H, Dv]`` of each."""
        out: list[torch.Tensor] = []
        for pack in self.packs:
            # Keys and values of all prompts of the pack, in the order of its pages.
            cached = _take(stored, pack.cached, new_rows.dtype)
            rows = torch.cat((cached, new_rows[pack.first : pack.stop]))
            keys, values = heads.expand(rows[pack.order])

            queries = q.whole[pack.first : pack.stop]
            out.append(_attend_packed(queries, keys, values, pack.plan, self.store.spec.scale))
        return out

    def _attend_each(
        self, stored: torch.Tensor, q: Queries, new_rows: torch.Tensor, heads: LatentHeads
    ) -> list[torch.Tensor]:
        """Attend in torch, request by request; outputs ``[T, H, Dv]`` of each."""
        out: list[torch.Tensor] = []
        requests = zip(q.whole.split(self.sizes), new_rows.split(self.sizes), self.cached, strict=True)
        for request_q, request_rows, cached_indices in requests:
            # Earlier rows, new rows, and zeros up to a number of columns whose sums do not depend on chunks.
            cached = _take(stored, cached_indices, new_rows.dtype)
            num_rows = len(cached) + len(request_rows)
            padding = request_rows.new_zeros(round_columns(num_rows) - num_rows, request_rows.shape[1])
            k, v = heads.expand(torch.cat((cached, request_rows, padding)))

            keys = k.transpose(0, 1)
            values = v.transpose(0, 1)
            scale = self.store.spec.scale
            out.append(chunk_attention(request_q, keys, values, scale, start=len(cached)))
        return out


class _Pack(NamedTuple):
    """Prompts that attend in one launch.

    Attributes:
        first: first token of the pack among those of the forward.
        stop: token after the last one of the pack.
        cached: int64 ``[C]``, rows of the store before the prompts, prompt after prompt.
        order: int64, for each row of the pages of ``plan`` an index into the cached rows followed by the new
            rows. Rows behind the tokens of a prompt have index 0 and are not attended to.
        plan: plan of the launch, whose pages are those of the expanded keys.
    """

    first: int
    stop: int
    cached: torch.Tensor
    order: torch.Tensor
    plan: PrefillPlan


def _make_packs(sizes: Sequence[int], cached: Sequence[torch.Tensor]) -> list[_Pack]:
    """Group consecutive prompts, each group with at most :data:`PACKED_TOKENS` or of one prompt.

    Args:
        sizes: number of new tokens of each prompt.
        cached: int64 rows of the store before each prompt.
    """
    # Indices of the prompts of each group.
    groups: list[list[int]] = []
    num_tokens = 0
    for i, size in enumerate(sizes):
        prompt_tokens = size + len(cached[i])
        num_tokens += prompt_tokens
        if not groups or num_tokens > PACKED_TOKENS:
            groups.append([])
            num_tokens = prompt_tokens
        groups[-1].append(i)

    # A pack for each group.
    packs: list[_Pack] = []
    first = 0
    for group in groups:
        pack = _make_pack(first, [sizes[i] for i in group], [cached[i] for i in group])
        packs.append(pack)
        first = pack.stop
    return packs


def _make_pack(first: int, sizes: Sequence[int], cached: Sequence[torch.Tensor]) -> _Pack:
    """Lay out the prompts of a pack in pages; arguments as in :func:`_make_packs` and :class:`_Pack`."""
    starts = [len(rows) for rows in cached]
    num_cached = sum(starts)

    # Each prompt begins with a new page.
    order: list[int] = []
    tables: list[list[int]] = []
    next_cached = 0
    next_new = num_cached
    for start, size in zip(starts, sizes, strict=True):
        num_pages = -(-(start + size) // EXPANDED_PAGE_SIZE)
        first_page = len(order) // EXPANDED_PAGE_SIZE
        tables.append(list(range(first_page, first_page + num_pages)))
        order += range(next_cached, next_cached + start)
        order += range(next_new, next_new + size)
        order += [0] * (num_pages * EXPANDED_PAGE_SIZE - start - size)
        next_cached += start
        next_new += size

    # Page tables of equal length.
    max_pages = max(len(table) for table in tables)
    padded: list[int] = []
    for table in tables:
        padded += table
        padded += [0] * (max_pages - len(table))

    device = cached[0].device
    plan = PrefillPlan(
        page_tables=to_device(padded, device).view(len(sizes), max_pages),
        page_size=EXPANDED_PAGE_SIZE,
        cu_rows=to_device([0, *itertools.accumulate(sizes)], device),
        starts=to_device(starts, device),
        first_position=0,
        max_rows=max(sizes),
    )
    return _Pack(first, first + sum(sizes), torch.cat(list(cached)), to_device(order, device), plan)


def _attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PrefillPlan, scale: float
) -> torch.Tensor:
    """Attend to expanded keys and values in the pages of ``plan``.

    The kernel has one head size for keys and values, so the smaller ones are padded with zeros.

    Args:
        q: ``[T, H, Dk]``.
        k: ``[S, H, Dk]``, S rows of the plan's pages.
        v: ``[S, H, Dv]``.
        plan: plan of the pack.
        scale: factor of the scores.

    Returns:
        ``[T, H, Dv]``.
    """
    value_size = v.shape[-1]
    size = max(k.shape[-1], value_size)
    queries = _padded(q, size)
    keys = _padded(k.transpose(0, 1), size).contiguous()
    values = _padded(v.transpose(0, 1), size).contiguous()
    out = paged_prefill_attention(queries, keys, values, plan, scale)
    return out[..., :value_size]


def _padded(x: torch.Tensor, size: int) -> torch.Tensor:
    """Pad the last dimension of ``x`` with zeros up to ``size``; returns ``x`` if it has that size."""
    if x.shape[-1] == size:
        return x
    return F.pad(x, (0, size - x.shape[-1]))


def _put(stored: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor) -> None:
    """Write ``stored[indices] = rows``, rounded to the dtype of ``stored``."""
    if stored.dtype == rows.dtype:
        stored.index_copy_(0, indices, rows)
    else:
        store(stored[None], indices, rows[:, None], 1.0)


def _take(stored: torch.Tensor, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gather ``stored[indices]`` as ``dtype``. Torch cannot index fp8, so its bytes are gathered."""
    raw = stored
    if stored.element_size() == 1:
        raw = stored.view(torch.uint8)
    return raw[indices].view(stored.dtype).to(dtype)
