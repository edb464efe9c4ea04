"""Keys and values of running requests side by side, kept from cycle to cycle.

A CPU's matmuls read matrices, and the keys of a request lie in pages: copying them together in every cycle
takes as long as the attention itself. Here they stay together in the order of attention, one space a request
of the batch, and a cycle copies only what is new since the one before: the tokens that were committed, and
the window.

What is kept of a request holds for the pages that it was read from, as long as no prompt has been written
into them since; tokens behind those that were known are always read again, and columns that an earlier window
had filled are emptied.

Legend: B requests, N query nodes, C columns, Hq / Hkv heads, D head size, R rows of the store, P pages.
"""

import itertools
import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn import functional as F

from eagle_kit.kernels.summation import least_nodes
from eagle_kit.kernels.variant import AttentionVariant, Limits, seen_within
from eagle_kit.kernels.window_attention.plan import WindowPlan, column_counts, first_columns
from eagle_kit.kernels.window_attention.reference import attend_matrices

MAX_BYTES = 1 << 30
"""Most memory of a store's gathered keys and values; larger batches and contexts are read from the pages."""
GROWTH = 256
"""Columns are allocated in multiples of this."""

RUN_BYTES = 3 << 18
"""Keys and values whose reading takes as long as the operations of one run, as measured on a CPU."""

_stores: "weakref.WeakValueDictionary[int, GatheredRows]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class Run(NamedTuple):
    """Requests ``first`` to ``stop``, of which the columns from ``column`` on are read as far as the longest
    needs them, and their ``mask [b, 1, N, 1, C]``."""

    first: int
    stop: int
    mask: torch.Tensor
    column: int = 0


class Update:
    """Columns to attend to, and what must be read before: rows ``source`` int64 ``[n]`` of the store, to go
    to the spaces of ``requests`` int64 ``[n]``, into ``columns`` int64 ``[n]``."""

    def __init__(
        self,
        rows: "GatheredRows",
        plan: WindowPlan,
        lengths: list[int],
        runs: list[Run],
        reads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        self.rows, self._plan, self._lengths, self._runs = rows, plan, lengths, runs
        self.source, self.requests, self.columns = reads
        self._made: dict[tuple[Limits, int], list[Run]] = {}

    def runs(self, limits: Limits, missing: int) -> list[Run]:
        """Runs within the limits of a layer, with ``missing`` more nodes, which attend to everything."""
        key = limits, missing
        if key not in self._made:
            found = [self._limit(run, limits) for run in self._runs] if any(limits) else self._runs
            if missing > 0:
                found = [run._replace(mask=F.pad(run.mask, (0, 0, 0, 0, 0, missing))) for run in found]
            self._made[key] = found
        return self._made[key]

    def _limit(self, run: Run, limits: Limits) -> Run:
        mine = slice(run.first, run.stop)
        column = min(first_columns(limits, self._lengths[mine]))
        held = torch.arange(column, run.mask.shape[-1])
        seen = seen_within(
            limits, self._plan.prefix_lens[mine], self._plan.ancestors[mine], self._plan.num_keys, held
        )
        mask = run.mask[..., column:].masked_fill(~seen[:, None, :, None], float("-inf"))
        return run._replace(mask=mask, column=column)


class GatheredRows:
    """Gathered keys ``[layers, B, Hkv, D, C]`` and values ``[layers, B, Hkv, C, D]`` of a store. (BLAS
    multiplies few queries by keys that lie so in two thirds of the time.)

    Args:
        num_pages: the dummy page included.

    Attributes:
        number: by which recorded operations find it.
    """

    def __init__(
        self, num_layers: int, num_heads: int, head_dim: int, num_pages: int, dtype: torch.dtype
    ) -> None:
        self.num_heads, self._dtype, self.number = num_heads, dtype, next(_numbers)
        self._num_layers, self._head_dim = num_layers, head_dim
        self._stamps = torch.zeros(num_pages, dtype=torch.int64)
        self._allocate(0, 0)
        self._tables = self._read_stamps = torch.zeros(0, 0, dtype=torch.int64)
        self._known: list[int] = []
        self._filled: list[int] = []
        _stores[self.number] = self

    @staticmethod
    def of(number: int) -> "GatheredRows":
        """Return the rows of a store that is in use."""
        return _stores[number]

    def note_prompt(self, rows: torch.Tensor, page_size: int) -> None:
        """Forget what was read from the pages of ``rows``, into which a prompt is written."""
        self._stamps[(rows // page_size).clamp(max=len(self._stamps) - 1)] += 1

    def update(self, plan: WindowPlan) -> Update | None:
        """Compare a plan with what is known -> what must be read; None where there is no room."""
        lengths: list[int] = plan.prefix_lens.tolist()
        sizes = column_counts(plan.num_keys, lengths)
        count = len(lengths)
        if not self._make_room(count, max(sizes), plan.page_table.shape[1]):
            return None
        begins = self._begins(plan, lengths)
        ends = [length + plan.num_keys for length in lengths]
        stops = [max(pair) for pair in zip(ends, self._filled[:count], strict=True)]
        self._filled[:count] = ends
        rows, mask = replace(plan, num_columns=max(*sizes, *stops)).layout
        per_column = 2 * self.num_heads * self._head_dim * self._dtype.itemsize
        runs = [
            Run(first, stop, mask[first:stop, None, :, None, : max(sizes[first:stop])])
            for first, stop in itertools.pairwise(run_bounds(sizes, RUN_BYTES / per_column))
        ]
        counts = torch.tensor([stop - begin for begin, stop in zip(begins, stops, strict=True)])
        requests = torch.arange(count).repeat_interleave(counts)
        columns = torch.cat([torch.arange(*span) for span in zip(begins, stops, strict=True)])
        return Update(self, plan, lengths, runs, (rows[requests, columns], requests, columns))

    def _make_room(self, batch_size: int, num_columns: int, num_table_pages: int) -> bool:
        """Have spaces of at least these sizes; False where they would be larger than ``MAX_BYTES``."""
        count, columns = self._keys.shape[1], self._keys.shape[4]
        if count >= batch_size and columns >= num_columns:
            return True
        num_columns = -(-num_columns // GROWTH) * GROWTH
        for size in ((max(count, batch_size), max(columns, num_columns)), (batch_size, num_columns)):
            per_column = 2 * self._num_layers * self.num_heads * self._head_dim * self._dtype.itemsize
            if math.prod(size) * per_column <= MAX_BYTES:
                self._allocate(*size)
                self._tables = torch.full((size[0], num_table_pages), -1)
                self._read_stamps = torch.zeros_like(self._tables)
                self._known, self._filled = [0] * size[0], [0] * size[0]
                return True
        return False

    def _allocate(self, count: int, num_columns: int) -> None:
        spaces = self._num_layers, count, self.num_heads
        self._keys = torch.zeros(*spaces, self._head_dim, num_columns, dtype=self._dtype)
        self._values = torch.zeros(*spaces, num_columns, self._head_dim, dtype=self._dtype)

    def _begins(self, plan: WindowPlan, lengths: list[int]) -> list[int]:
        """First column of each request that must be read; all before its window is known from now on."""
        count = len(lengths)
        tables, stamps = plan.page_table, self._stamps[plan.page_table]
        differs = (tables != self._tables[:count]) | (stamps != self._read_stamps[:count])
        firsts = torch.where(differs.any(1), differs.int().argmax(1), tables.shape[1]).tolist()
        numbers = zip(self._known[:count], lengths, firsts, strict=True)
        begins = [min(known, length, first * plan.page_size) for known, length, first in numbers]
        self._known[:count] = lengths
        self._tables[:count], self._read_stamps[:count] = tables, stamps
        return begins

    def layer(
        self, k_rows: torch.Tensor, v_rows: torch.Tensor, update: Update
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read what is new of a layer -> keys and values ``[B * Hkv, C, D]`` of all spaces."""
        layer, places = k_rows.storage_offset() // k_rows.numel(), (update.requests, update.columns)
        keys, values = self._keys[layer].transpose(2, 3), self._values[layer]
        for store, space in ((k_rows, keys), (v_rows, values)):
            new = store.index_select(1, update.source)
            space.transpose(1, 2).index_put_(places, new.transpose(0, 1))
        return keys.flatten(0, 1), values.flatten(0, 1)


def run_bounds(sizes: Sequence[int], run_cost: float) -> list[int]:
    """Cut requests into runs of least cost -> first request of each run, and the end.

    Args:
        sizes: columns that each request needs; all requests of a run read as many as its longest.
        run_cost: what a run costs beside, in columns of a request.
    """
    costs, begins = [0.0], [0]
    for stop in range(1, len(sizes) + 1):
        best, begin, longest = math.inf, 0, 0
        for first in reversed(range(stop)):
            longest = max(longest, sizes[first])
            cost = costs[first] + run_cost + longest * (stop - first)
            if cost < best:
                best, begin = cost, first
        costs.append(best)
        begins.append(begin)
    bounds = [len(sizes)]
    while bounds[-1]:
        bounds.append(begins[bounds[-1]])
    return bounds[::-1]


def attend(
    q: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, update: Update, variant: AttentionVariant
) -> torch.Tensor:
    """:func:`~.reference.window_attention` over gathered rows, with the same bits."""
    b, n, hq, d = q.shape
    hkv = update.rows.num_heads
    g = hq // hkv
    k, v = update.rows.layer(k_rows, v_rows, update)
    if (missing := least_nodes(g, d, hkv * b) - n) > 0:
        q = F.pad(q, (0, 0, 0, 0, 0, missing))
    m = q.shape[1]
    sinks = None if variant.sinks is None else variant.sinks.view(1, hkv, 1, g)
    queries = (
        (q.float() * variant.scale).view(b, m, hkv, g, d).permute(0, 2, 1, 3, 4).reshape(b * hkv, m * g, d)
    )
    parts = []
    for first, stop, mask, column in update.runs(variant.limits, missing):
        mine, held = slice(first * hkv, stop * hkv), slice(column, column + mask.shape[-1])
        shape = stop - first, hkv, m, g, mask.shape[-1]
        keys, values = k[mine, held], v[mine, held]
        parts.append(attend_matrices(queries[mine], keys, values, mask, shape, variant.soft_cap, sinks))
    out = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out.view(b, hkv, m, g, d).permute(0, 2, 1, 3, 4).reshape(b, m, hq, d)[:, :n]
