"""Paged store of latent attention.

A token is one row a layer, from which all heads' keys and values are made (``models/blocks/mla.py``).
Windows attend in the absorbed form, which reads each row once for all heads and nodes. Prompts attend in the
expanded form: earlier tokens are expanded with them, so that a prompt in chunks, or one with a cached prefix,
is computed as if it were whole.

Legend: L layers, R rows, D = latent + RoPE size, H heads, T prompt tokens.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from eagle_kit.kv.store import PagedStore, PoolLayout, Segment
from eagle_kit.models.blocks.mla import LatentAttend, LatentHeads, Queries
from eagle_kit.models.config_parts import LatentSpec
from eagle_kit.ops.attention.mla import mla_window_attention
from eagle_kit.ops.attention.prefill import PrefillPlan, chunk_attention, paged_prefill_attention
from eagle_kit.ops.attention.window import WindowPlan
from eagle_kit.ops.backend import uses_triton
from eagle_kit.ops.cpu.summation import round_columns
from eagle_kit.ops.rope import WindowRows
from eagle_kit.ops.rope.reference import store
from eagle_kit.ops.transfer import to_device

PAGE, PACKED_TOKENS = 16, 8192
"""Slots of a page of expanded keys, and most tokens, cached ones included, of prompts that are expanded
together: 128 heads of DeepSeek-V3 are half a gigabyte of keys."""


class PagedLatents(PagedStore):
    """Rows ``[L, R, D]``, the latent first; rows and ``options`` are those of :class:`PagedStore`."""

    def __init__(self, spec: LatentSpec, layout: PoolLayout, **options: Any) -> None:
        super().__init__(layout, **options)
        self.spec = spec
        self.rows = self._empty(spec.num_layers, self.num_rows, spec.latent_dim + spec.rope_dim)

    @property
    def tensors(self) -> tuple[torch.Tensor, None]:
        """Rows ``[L, R, D]``, and None."""
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
        return _WindowAttend(self, *self._window(page_table, prefix_lens, ancestors, num_keys, num_columns))

    def prefill_attend(self, segments: Sequence[Segment]) -> LatentAttend:
        """See :class:`PagedStore`."""
        return _PrefillAttend(self, segments)

    def taken_in(self, layer: int, at: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Write ``rows`` of a layer to ``at``, and return them as they will be read: chunks of a prompt give
        the results of a whole prompt."""
        held = self.rows[layer]
        _put(held, at, rows)
        if held.dtype == rows.dtype:
            return rows
        rounded = torch.empty_like(rows, dtype=held.dtype)
        _put(rounded, torch.arange(len(rows), device=rows.device), rows)
        return rounded.to(rows.dtype)


class _LatentAttend:
    """Base that refuses the keys and values of other layers."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a store of latents was given keys and values")


class _WindowAttend(_LatentAttend):
    """Absorbed attention of window nodes."""

    def __init__(self, store: PagedLatents, plan: WindowPlan, rows: WindowRows) -> None:
        self.store, self.plan, self.rows = store, plan, rows

    def latents(self, layer: int, q: Queries, rows: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        held, spec = self.store.rows[layer], self.store.spec
        _put(held, self.rows.tensor, rows)
        nodes = heads.absorb(q).unflatten(0, self.plan.ancestors.shape)
        out = mla_window_attention(nodes, held, self.plan, spec.scale, latent_dim=spec.latent_dim)
        return heads.project(out.flatten(0, 1))


class _PrefillAttend(_LatentAttend):
    """Expanded attention of prompts: request by request in torch, or several in one launch of the kernel."""

    def __init__(self, store: PagedLatents, segments: Sequence[Segment]) -> None:
        self.store = store
        self.written, self.cached = store.prompt_rows(segments)
        self.sizes = [segment.stop - segment.start for segment in segments]
        self.packs = _packs(self.sizes, self.cached) if uses_triton(store.rows) else []

    def latents(self, layer: int, q: Queries, rows: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        held = self.store.rows[layer]
        rows = self.store.taken_in(layer, self.written, rows)
        out = []
        if self.packs:
            for pack in self.packs:
                found = torch.cat((_take(held, pack.cached, rows.dtype), rows[pack.first : pack.stop]))
                keys, values = heads.expand(found[pack.order])
                mine, scale = q.whole[pack.first : pack.stop], self.store.spec.scale
                out.append(_attend_packed(mine, keys, values, pack.plan, scale))
            return torch.cat(out) if len(out) > 1 else out[0]
        parts = zip(q.whole.split(self.sizes), rows.split(self.sizes), self.cached, strict=True)
        for my_q, my_rows, before in parts:
            known = len(before) + len(my_rows)
            unused = my_rows.new_zeros(round_columns(known) - known, my_rows.shape[1])
            k, v = heads.expand(torch.cat((_take(held, before, rows.dtype), my_rows, unused)))
            keys, values = k.transpose(0, 1), v.transpose(0, 1)
            out.append(chunk_attention(my_q, keys, values, self.store.spec.scale, start=len(before)))
        return torch.cat(out) if len(out) > 1 else out[0]


class _Pack(NamedTuple):
    """Prompts in one launch: their rows ``first`` to ``stop``, the pool's rows ``cached`` before them, and
    the ``order`` in which these and the new ones, behind them, lie as pages of the ``plan``."""

    first: int
    stop: int
    cached: torch.Tensor
    order: torch.Tensor
    plan: PrefillPlan


def _packs(sizes: Sequence[int], cached: Sequence[torch.Tensor]) -> list[_Pack]:
    """Put prompts together as long as they have at most ``PACKED_TOKENS``, cached ones included."""
    groups: list[list[int]] = []
    tokens = 0
    for i, (size, before) in enumerate(zip(sizes, cached, strict=True)):
        tokens += size + len(before)
        if not groups or tokens > PACKED_TOKENS:
            groups.append([])
            tokens = size + len(before)
        groups[-1].append(i)
    first, packs = 0, []
    for group in groups:
        stop = first + sum(sizes[i] for i in group)
        packs.append(_pack(first, [sizes[i] for i in group], [cached[i] for i in group]))
        first = stop
    return packs


def _pack(first: int, sizes: Sequence[int], cached: Sequence[torch.Tensor]) -> _Pack:
    starts = [len(before) for before in cached]
    order: list[int] = []
    num_cached, tables, before, new = sum(starts), [], 0, 0
    for start, size in zip(starts, sizes, strict=True):
        pages = -(-(start + size) // PAGE)
        tables.append([len(order) // PAGE + page for page in range(pages)])
        order += range(before, before + start)
        order += range(num_cached + new, num_cached + new + size)
        order += [0] * (pages * PAGE - start - size)  # never attended to
        before, new = before + start, new + size
    device, most = cached[0].device, max(map(len, tables))
    tables = [[*table, *[0] * (most - len(table))] for table in tables]
    numbers = [0, *itertools.accumulate(sizes)]
    page_tables, cu_rows, begins, places = (
        to_device(values, device) for values in (list(itertools.chain(*tables)), numbers, starts, order)
    )
    plan = PrefillPlan(page_tables.view(len(sizes), most), PAGE, cu_rows, begins, 0, max(sizes))
    return _Pack(first, first + new, torch.cat(list(cached)), places, plan)


def _attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PrefillPlan, scale: float
) -> torch.Tensor:
    """Attention of ``q [T, H, Dk]`` to keys ``[R, H, Dk]`` and values ``[R, H, Dv]`` in the pages of a plan
    -> ``[T, H, Dv]``; the kernel has one size of head."""
    out_size = v.shape[-1]
    size = max(k.shape[-1], out_size)
    keys = _padded(k.transpose(0, 1), size).contiguous()
    values = _padded(v.transpose(0, 1), size).contiguous()
    return paged_prefill_attention(_padded(q, size), keys, values, plan, scale)[..., :out_size]


def _padded(x: torch.Tensor, size: int) -> torch.Tensor:
    """``x`` with zeros behind its last dimension up to ``size``; itself where it is as large."""
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def _put(held: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> None:
    """Write ``held[at] = rows``, rounded to the store's type."""
    if held.dtype == rows.dtype:
        held.index_copy_(0, at, rows)
    else:
        store(held[None], at, rows[:, None], 1.0)


def _take(held: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gather ``held[rows]`` as ``dtype``; torch cannot index fp8."""
    raw = held.view(torch.uint8) if held.element_size() == 1 else held
    return raw[rows].view(held.dtype).to(dtype)
