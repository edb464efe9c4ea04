"""Window attention of several requests as one recorded operation: the groups by length, which differ from
replay to replay, are made inside (``serve/cpu_graph.py``).

An operation makes the columns of a plan and gives their number; those of the layers take it. Columns are kept
by thread until a few plans later: the plans of a cycle are used one after another.
"""

import itertools
import threading
from collections import OrderedDict

import torch

from eagle_kit.kernels.recording import VIEWED_TYPES, library
from eagle_kit.kernels.window_attention import gathered
from eagle_kit.kernels.window_attention.gathered import GatheredRows, Update
from eagle_kit.kernels.window_attention.plan import Columns, WindowPlan, column_counts
from eagle_kit.kernels.window_attention.reference import window_attention

NUM_KEPT = 8

_numbers = itertools.count()
_local = threading.local()


def _kept() -> OrderedDict[int, list[Columns] | Update]:
    if not hasattr(_local, "columns"):
        _local.columns = OrderedDict()
    columns: OrderedDict[int, list[Columns] | Update] = _local.columns
    return columns


def columns_of(number: torch.Tensor) -> list[Columns]:
    """Return the columns of :attr:`WindowPlan.number` of a store that gathers nothing."""
    columns = _kept()[int(number)]
    assert isinstance(columns, list)
    return columns


def _window_columns(
    page_table: torch.Tensor, prefix_lens: torch.Tensor, ancestors: torch.Tensor, sizes: list[int]
) -> torch.Tensor:
    page_size, first_slot, scratch_start, scratch_stride, num_keys, dummy_row, kind, store = sizes
    plan = WindowPlan(
        page_table=page_table,
        page_size=page_size,
        prefix_lens=prefix_lens,
        first_slot=first_slot,
        scratch_start=scratch_start,
        scratch_stride=scratch_stride,
        num_keys=num_keys,
        ancestors=ancestors,
        num_columns=0,  # groups have their own
        dummy_row=dummy_row,
        dtype=VIEWED_TYPES[kind],
    )
    kept, number = _kept(), next(_numbers)
    update = GatheredRows.of(store).update(plan) if store else None
    kept[number] = update or plan.in_groups(column_counts(num_keys, prefix_lens.tolist()))
    if len(kept) > NUM_KEPT:
        kept.popitem(last=False)
    return torch.tensor(number)


def _window_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    number: torch.Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    columns = _kept()[int(number)]
    if isinstance(columns, Update):
        return gathered.attend(q, k_rows, v_rows, columns, scale)
    return window_attention(q, k_rows, v_rows, columns, scale, k_scale, v_scale)


library.define(
    "window_columns(Tensor page_table, Tensor prefix_lens, Tensor ancestors, int[] sizes) -> Tensor"
)
library.impl("window_columns", _window_columns, "CPU")
library.define(
    "window_attention(Tensor q, Tensor k_rows, Tensor v_rows, Tensor number, float scale, float k_scale, "
    "float v_scale) -> Tensor"
)
library.impl("window_attention", _window_attention, "CPU")
