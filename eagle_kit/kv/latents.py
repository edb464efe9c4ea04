"""Paged store of latent attention.

A token is one row a layer, from which all heads' keys and values are made (``models/blocks/mla.py``).
Windows attend in the absorbed form, which reads each row once for all heads and nodes. Prompts attend in the
expanded form: earlier tokens are expanded with them, so that a prompt in chunks, or one with a cached prefix,
is computed as if it were whole.

Legend: L layers, R rows, D = latent + RoPE size, H heads, T prompt tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch

from eagle_kit.kernels.mla_attention import mla_window_attention
from eagle_kit.kernels.prefill_attention import chunk_attention
from eagle_kit.kernels.rope.reference import store
from eagle_kit.kernels.summation import round_columns
from eagle_kit.kernels.window_attention import WindowPlan
from eagle_kit.kv.store import PagedStore, PoolLayout, Segment
from eagle_kit.models.blocks.mla import LatentAttend, LatentHeads, Queries
from eagle_kit.models.config_parts import LatentSpec


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


class _LatentAttend:
    """Base that refuses the keys and values of other layers."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a store of latents was given keys and values")


class _WindowAttend(_LatentAttend):
    """Absorbed attention of window nodes."""

    def __init__(self, store: PagedLatents, plan: WindowPlan, rows: torch.Tensor) -> None:
        self.store, self.plan, self.rows = store, plan, rows

    def latents(self, layer: int, q: Queries, rows: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        held, spec = self.store.rows[layer], self.store.spec
        _put(held, self.rows, rows)
        nodes = heads.absorb(q).unflatten(0, self.plan.ancestors.shape)
        out = mla_window_attention(nodes, held, self.plan, spec.scale, latent_dim=spec.latent_dim)
        return heads.project(out.flatten(0, 1))


class _PrefillAttend(_LatentAttend):
    """Expanded attention of prompts, request by request."""

    def __init__(self, store: PagedLatents, segments: Sequence[Segment]) -> None:
        self.store = store
        self.written, self.cached = store.prompt_rows(segments)
        self.sizes = [segment.stop - segment.start for segment in segments]

    def latents(self, layer: int, q: Queries, rows: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        held = self.store.rows[layer]
        _put(held, self.written, rows)
        if held.dtype != rows.dtype:  # chunks of a prompt give the results of a whole prompt
            rounded = torch.empty_like(rows, dtype=held.dtype)
            _put(rounded, torch.arange(len(rows), device=rows.device), rows)
            rows = rounded.to(rows.dtype)
        out = []
        parts = zip(q.whole.split(self.sizes), rows.split(self.sizes), self.cached, strict=True)
        for my_q, my_rows, before in parts:
            known = len(before) + len(my_rows)
            unused = my_rows.new_zeros(round_columns(known) - known, my_rows.shape[1])
            k, v = heads.expand(torch.cat((_take(held, before, rows.dtype), my_rows, unused)))
            keys, values = k.transpose(0, 1), v.transpose(0, 1)
            out.append(chunk_attention(my_q, keys, values, self.store.spec.scale, start=len(before)))
        return torch.cat(out) if len(out) > 1 else out[0]


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
