"""Location and visibility of the keys of a window: computed once per forward, shared by its layers.

Legend: B requests, N query nodes, M window keys, W words of 64 of them, C columns, P pages of a request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch

from eagle_kit.ops.attention.variant import NO_LIMITS, Limits, key_bits, seen_within
from eagle_kit.ops.backend import Backend
from eagle_kit.ops.cpu.guards import VIEWED_TYPES, guarded_choice, is_recording
from eagle_kit.ops.cpu.summation import COLUMNS, SPLIT_TERMS, round_columns


class Columns(NamedTuple):
    """Keys of some requests of a plan: ``requests`` int64 ``[b]``, None for all in order; ``rows`` int64
    ``[b, c]`` of the store; ``mask [b, N, c]``, 0 or -inf."""

    requests: torch.Tensor | None
    rows: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class WindowPlan:
    """Keys of B windows in a store of rows.

    Attributes:
        page_table: int64 ``[B, P]``, page of each run of ``page_size`` positions; a page's rows are those
            from ``page * page_size``.
        page_size: rows per page.
        prefix_lens: int64 ``[B]``, positions before the window.
        first_position: first position with a key; the ones before it are not attended to.
        scratch_start, scratch_stride: window key j of request b is row ``scratch_start + b * scratch_stride +
            j``.
        num_keys: M; the queries are the last N of the window's keys.
        ancestors: int64 ``[B, N]``, bit j set when window key j is an ancestor of the node or the node
            itself; ``[B, N, W]`` for windows of more than 64 keys, whose key j is bit j % 64 of word j // 64.
        num_columns: C, an upper bound on prefix + M known to the host.
        dummy_row: a row of the store that holds finite values.
        dtype: dtype of the queries.
        arrivals: int32, one counter for each tile of a key head and request, 0 outside of a launch: number of
            programs that have written their part. All launches of a store share it, as they follow one
            another. None: parts are merged by a second launch.
    """

    page_table: torch.Tensor
    page_size: int
    prefix_lens: torch.Tensor
    first_position: int
    scratch_start: int
    scratch_stride: int
    num_keys: int
    ancestors: torch.Tensor
    num_columns: int
    dummy_row: int
    dtype: torch.dtype
    arrivals: torch.Tensor | None = field(default=None, kw_only=True)
    _limited: dict[Limits, list[Columns]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def layout(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns for the reference: ``rows`` int64 ``[B, C]`` of the store, and ``mask [B, N, C]``, 0 or
        -inf.

        Columns are in the order of attention: the request's prefix, then its window keys directly behind it,
        so that a token has the same column in a window of any size. Unused ones point at the dummy row.
        """
        # The row of the store of each column.
        device = self.page_table.device
        column = torch.arange(self.num_columns, device=device).expand(len(self.page_table), -1)
        key = column - self.prefix_lens[:, None]
        in_prefix = key < 0
        in_window = (key >= 0) & (key < self.num_keys)
        key = key.clamp(0, self.num_keys - 1)
        request = torch.arange(len(column), device=device)[:, None]
        scratch = self.scratch_start + request * self.scratch_stride + key
        rows = torch.where(in_prefix, self.page_rows(column), torch.where(in_window, scratch, self.dummy_row))

        # Nodes see the prefix from its first key on, and their ancestors.
        is_ancestor = key_bits(self.words, key)
        seen = (in_prefix & (column >= self.first_position))[:, None] | (in_window[:, None] & is_ancestor)
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=device).masked_fill_(~seen, float("-inf"))
        return rows, mask

    @property
    def words(self) -> torch.Tensor:
        """:attr:`ancestors` as int64 ``[B, N, W]``."""
        return self.ancestors if self.ancestors.dim() == 3 else self.ancestors[:, :, None]

    def record_columns(self) -> torch.Tensor:
        """Make the columns of this plan in one recorded operation, once, and return their key, an int64
        scalar: the attention of every layer finds them by it (``recorded.py``)."""
        return self._columns_key

    def page_rows(self, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the store of ``positions`` int64 ``[B, n]``, by the page table. Positions after its last
        page have rows of that page."""
        page = (positions // self.page_size).clamp(max=self.page_table.shape[1] - 1)
        return self.page_table.gather(1, page) * self.page_size + positions % self.page_size

    @cached_property
    def _columns_key(self) -> torch.Tensor:
        sizes = [
            self.page_size,
            self.first_position,
            self.scratch_start,
            self.scratch_stride,
            self.num_keys,
            self.dummy_row,
            VIEWED_TYPES.index(self.dtype),
        ]
        key: torch.Tensor = torch.ops.eagle_kit_cpu.window_columns(
            self.page_table, self.prefix_lens, self.ancestors, sizes
        )
        return key

    def is_recorded_whole(self, backend: Backend | None) -> bool:
        """Return True if attention is recorded as one operation: if several requests are in groups by
        length. A single request has few sizes, each of which gets its own recording."""
        is_in_groups = backend is None and type(self) is WindowPlan and len(self.page_table) > 1
        return is_in_groups and is_recording()

    @cached_property
    def by_length(self) -> list[Columns]:
        """The layout in groups of requests of similar length, so that a short request does not pay for the
        longest, and its columns do not depend on its batch. Reads the lengths on the host."""
        return self.in_groups(guarded_choice(self.prefix_lens, partial(column_counts, self.num_keys)))

    def within(self, limits: Limits) -> list[Columns]:
        """:attr:`by_length` of a layer with limits, without columns before all of them."""
        if not any(limits):
            return self.by_length
        if limits not in self._limited:
            firsts = guarded_choice(self.prefix_lens, partial(first_columns, limits))
            self._limited[limits] = [self.limit(each, limits, firsts) for each in self.by_length]
        return self._limited[limits]

    def limit(self, columns: Columns, limits: Limits, firsts: Sequence[int]) -> Columns:
        """Columns of some requests, masked by ``limits``. Columns before the first that any of them may
        attend to are left out; ``firsts`` has the first one of every request of the plan."""
        requests, rows, mask = columns
        index = slice(None) if requests is None else requests
        members = range(len(firsts)) if requests is None else requests.tolist()
        first = min(firsts[member] for member in members)
        remaining = torch.arange(first, rows.shape[1], device=rows.device)
        seen = seen_within(limits, self.prefix_lens[index], self.words[index], self.num_keys, remaining)
        return Columns(requests, rows[:, first:], mask[:, :, first:].masked_fill(~seen, float("-inf")))

    def in_groups(self, sizes: tuple[int, ...]) -> list[Columns]:
        """The layout in groups of requests with the same number of columns."""
        rows, mask = replace(self, num_columns=max(sizes)).layout
        if min(sizes) == max(sizes):
            return [Columns(None, rows, mask)]
        members_by_size: dict[int, list[int]] = {}
        for request, size in enumerate(sizes):
            members_by_size.setdefault(size, []).append(request)
        groups = []
        for size, members in members_by_size.items():
            requests = torch.tensor(members)
            groups.append(Columns(requests, rows[requests, :size], mask[requests, :, :size]))
        return groups


def column_counts(num_keys: int, lengths: list[int]) -> tuple[int, ...]:
    """Numbers of columns for requests with ``lengths`` positions before a window of ``num_keys``."""
    room = -(-num_keys // COLUMNS) * COLUMNS  # the same sizes for windows of any number of nodes
    return tuple(_bucket(length + room) for length in lengths)


def first_columns(limits: Limits, lengths: list[int]) -> tuple[int, ...]:
    """First columns that windows behind ``lengths`` positions need, rounded down so that sums keep order:
    leading terms that are masked add nothing, as long as BLAS splits the others as before."""
    return tuple(limits.first(length) // SPLIT_TERMS * SPLIT_TERMS for length in lengths)


def reference_columns(
    plan: WindowPlan, q: torch.Tensor, backend: Backend | None, limits: Limits = NO_LIMITS
) -> list[Columns]:
    """Columns for the reference: in groups of similar length on a CPU, unless ``backend`` is given; of all
    requests together for tensors that the host must not read."""
    if backend is None and q.device.type == "cpu" and not isinstance(q, torch._subclasses.FakeTensor):
        return plan.within(limits)
    rows, mask = plan.layout
    everything = Columns(None, rows, mask)
    if any(limits):
        everything = plan.limit(everything, limits, [0] * len(plan.page_table))
    return [everything]


def attend_in_groups(
    columns: list[Columns],
    q: torch.Tensor,
    size: int,
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Call ``attend(q, rows, mask)`` for each group of requests: ``q [B, N, H, D]`` -> ``[B, N, H,
    size]``."""
    if columns[0].requests is None:
        return attend(q, columns[0].rows, columns[0].mask)
    out = q.new_empty((*q.shape[:-1], size))
    for requests, rows, mask in columns:
        assert requests is not None
        out[requests] = attend(q[requests], rows, mask)
    return out


def _bucket(count: int) -> int:
    """Round ``count`` up as :func:`round_columns` does, or to an eighth to a quarter of itself when that is
    more, so that there are few sizes."""
    runs = -(-count // COLUMNS)
    step = 1 << max(0, runs.bit_length() - 3)
    return round_columns(-(-runs // step) * step * COLUMNS)


def ancestor_bits(parents: torch.Tensor, depth: int) -> torch.Tensor:
    """Ancestor bits ``[B, N]`` of ``parents`` int64 ``[B, N]`` (root: 0, parents before children), at most
    ``depth`` deep."""
    bits = torch.ones_like(parents) << torch.arange(parents.shape[1], device=parents.device)
    for _ in range(depth):
        bits = bits | bits.gather(1, parents)
    return bits


def chain_bits(length: int, device: torch.device) -> torch.Tensor:
    """Ancestor bits of a chain: int64 ``[length]``, node j attends to nodes 0..j."""
    ones = torch.ones(length, dtype=torch.int64, device=device) << torch.arange(length, device=device)
    return ones.cumsum(0)
