"""Window attention of several requests as one recorded operation: the groups by length, which differ from
replay to replay, are made inside (``engine/graphs/cpu_graph.py``).

One operation makes the columns of a plan and returns their key; the operations of the layers take the key.
The columns of the last few plans are kept by thread, since the plans of a cycle are used one after
another.
"""

import itertools
import threading
from collections import OrderedDict

import torch

from eagle_kit.ops.attention.variant import AttentionVariant, Limits
from eagle_kit.ops.attention.window.plan import Columns, WindowPlan, column_counts, first_columns
from eagle_kit.ops.attention.window.reference import window_attention
from eagle_kit.ops.cpu.guards import VIEWED_TYPES, library

NUM_KEPT = 8
"""Plans of a thread whose columns are kept."""

_keys = itertools.count()
_local = threading.local()


class PlannedColumns:
    """Columns of a plan in groups of requests, and those within the limits of layers."""

    def __init__(self, plan: WindowPlan) -> None:
        self._plan = plan
        self._lengths = plan.prefix_lens.tolist()
        self._all_columns = plan.in_groups(column_counts(plan.num_keys, self._lengths))
        self._limited = {Limits(): self._all_columns}

    def within(self, limits: Limits) -> list[Columns]:
        """See :meth:`WindowPlan.within`."""
        if limits not in self._limited:
            firsts = first_columns(limits, self._lengths)
            self._limited[limits] = [
                self._plan.limit(columns, limits, firsts) for columns in self._all_columns
            ]
        return self._limited[limits]


def _kept() -> OrderedDict[int, PlannedColumns]:
    """Columns of this thread's last plans, by their keys."""
    if not hasattr(_local, "columns"):
        _local.columns = OrderedDict()
    columns: OrderedDict[int, PlannedColumns] = _local.columns
    return columns


def columns_of(columns_key: torch.Tensor) -> list[Columns]:
    """Return the columns that :meth:`WindowPlan.record_columns` made."""
    return _kept()[int(columns_key)].within(Limits())


def _window_columns(
    page_table: torch.Tensor, prefix_lens: torch.Tensor, ancestors: torch.Tensor, sizes: list[int]
) -> torch.Tensor:
    """Make and keep the columns of a plan -> their key, see :meth:`WindowPlan.record_columns`."""
    page_size, first_position, scratch_start, scratch_stride, num_keys, dummy_row, kind = sizes
    plan = WindowPlan(
        page_table=page_table,
        page_size=page_size,
        prefix_lens=prefix_lens,
        first_position=first_position,
        scratch_start=scratch_start,
        scratch_stride=scratch_stride,
        num_keys=num_keys,
        ancestors=ancestors,
        num_columns=0,  # groups have their own
        dummy_row=dummy_row,
        dtype=VIEWED_TYPES[kind],
    )
    columns = _kept()
    key = next(_keys)
    columns[key] = PlannedColumns(plan)
    if len(columns) > NUM_KEPT:
        columns.popitem(last=False)
    return torch.tensor(key)


def _window_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    columns_key: torch.Tensor,
    scale: float,
    v_scale: float,
    limits: list[int],
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Window attention with the columns that are kept under ``columns_key``."""
    columns = _kept()[int(columns_key)]
    variant = AttentionVariant(scale, Limits(*limits), soft_cap, sinks)
    return window_attention(q, k_rows, v_rows, columns.within(variant.limits), variant, v_scale=v_scale)


library.define(
    "window_columns(Tensor page_table, Tensor prefix_lens, Tensor ancestors, int[] sizes) -> Tensor"
)
library.impl("window_columns", _window_columns, "CPU")
library.define(
    "window_attention(Tensor q, Tensor k_rows, Tensor v_rows, Tensor columns_key, float scale, "
    "float v_scale, int[] limits, float? soft_cap, Tensor? sinks) -> Tensor"
)
library.impl("window_attention", _window_attention, "CPU")
