"""Base of the paged stores: row layout of committed tokens and of window nodes.

Subclasses store keys and values (:mod:`.keys_values`) or latents (:mod:`.latents`). All of them use the rows
that are defined here. A token's *position* is its place in its request; its *row* is its place in the store.

Legend: R rows, B requests, N window nodes, P pages of a request, T prompt tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import MAX_WINDOW
from eagle_kit.models.blocks.layers import Attend
from eagle_kit.ops.attention.window import WindowPlan
from eagle_kit.ops.commit import commit_path
from eagle_kit.ops.cpu.memory import zeros_when_used
from eagle_kit.ops.rope import WindowRows

KV_DTYPES = {"auto": None, "fp8_e4m3": torch.float8_e4m3fn}
"""Dtypes of stores by their names in ``EngineConfig``; None is the dtype of the model."""

TILES = 512
"""Largest number of tiles of query rows and key heads of one request, each with a counter of finished splits
(``WindowPlan.arrivals``)."""


@dataclass(frozen=True)
class PoolLayout:
    """Sizes that the stores of an engine share.

    Attributes:
        num_pages: number of pages of the pool, without the dummy page.
        page_size: number of rows of a page, one for each token.
        max_batch_size: number of requests that have a scratch.
        window: number of scratch rows of a request.
        dtype: dtype of the stored rows; None for the dtype of the model. fp8 e4m3 saturates.
    """

    num_pages: int
    page_size: int
    max_batch_size: int
    window: int = MAX_WINDOW
    dtype: torch.dtype | None = None


class Segment(NamedTuple):
    """Prompt tokens of one request that are computed in one forward.

    Attributes:
        page_table: int64 ``[P]``, pages of the request.
        start: position of the first token.
        stop: position after the last token.
        write_from: first position that is written. Tokens before it lie in pages shared with other requests;
            they are computed again and not stored.
        shard: shard of the page pool that the pages belong to (data-parallel attention).
    """

    page_table: torch.Tensor
    start: int
    stop: int
    write_from: int
    shard: int = 0


class PaddedSegments(NamedTuple):
    """Segments of a forward of fixed shape, described on the device: B segments, T rows.

    The rows of a segment lie behind each other. A segment of padding may have rows, which attend to nothing
    and are not stored.

    Attributes:
        page_tables: int64 ``[B, P]``, pages of each request.
        starts: int64 ``[B]``, position of the first row of each segment; -1 for padding.
        cu_rows: int64 ``[B + 1]``; the rows of segment b are ``cu_rows[b] .. cu_rows[b + 1] - 1`` of T.
        segments: int64 ``[T]``, the segment of each row.
        positions: int64 ``[T]``, the position of each row in its request; 0 or more for padding, too.
        is_stored: bool ``[T]``, False for padding and for tokens of shared pages.
    """

    page_tables: torch.Tensor
    starts: torch.Tensor
    cu_rows: torch.Tensor
    segments: torch.Tensor
    positions: torch.Tensor
    is_stored: torch.Tensor

    @property
    def following(self) -> "PaddedSegments":
        """The same rows one position later, all of them stored except padding."""
        is_real = self.starts >= 0
        return self._replace(
            starts=self.starts + is_real,
            positions=self.positions + 1,
            is_stored=is_real[self.segments],
        )


class PagedStore(ABC):
    """Store with R rows in every layer, in this order:

    * the rows of the layout's pages, then those of one *dummy page*,
    * a scratch of ``window`` rows for each request of a batch,
    * one dummy row, which padding reads and no kernel writes,
    * one trash row, to which tokens that are not to be stored are written.

    The pool holds committed tokens only: a window writes its nodes into the scratch, and
    :meth:`commit_window` copies the accepted nodes to the pool. The token at position p of request b has row
    ``page_table[b, p // page_size] * page_size + p % page_size``. A page table holds the dummy page where the
    request has no page.

    Args:
        layout: sizes of the store.
        first_position: first position that has an entry. The rows of positions before it hold nothing and are
            not attended to.
        dtype: dtype of queries, keys and values.
        device: device of the rows.

    Attributes:
        dummy_page: number of the dummy page.
        scratch_start: row of the first scratch; the rows before it are of pages, the dummy page included.
        dummy_row: row of zeros.
        trash_row: row for tokens that are not stored.
        num_rows: R.
        arrivals: int32 ``[max_batch_size * TILES]``, counters of the window attention kernels, 0 between
            launches.
    """

    def __init__(
        self,
        layout: PoolLayout,
        *,
        first_position: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.page_size = layout.page_size
        self.window = layout.window
        self.first_position = first_position
        self.dtype = dtype
        self.device = torch.device(device)
        self._store_dtype = layout.dtype or dtype

        # Rows: pages, scratches, the dummy row, the trash row.
        self.dummy_page = layout.num_pages
        self.scratch_start = (layout.num_pages + 1) * layout.page_size
        self.dummy_row = self.scratch_start + layout.max_batch_size * layout.window
        self.trash_row = self.dummy_row + 1
        self.num_rows = self.trash_row + 1

        # Counters of the window attention kernels.
        num_counters = layout.max_batch_size * TILES
        self.arrivals = torch.zeros(num_counters, dtype=torch.int32, device=self.device)

    def _empty(self, *shape: int) -> torch.Tensor:
        """Allocate a tensor of zeros with the dtype of the store.

        Raises:
            UserError: the system refuses the memory.
        """
        try:
            return zeros_when_used(shape, self._store_dtype, self.device)
        except OSError as error:
            gigabytes = torch.Size(shape).numel() * self._store_dtype.itemsize / 1e9
            raise UserError(
                f"The system refuses {gigabytes:.2f} GB of memory for keys and values: {error.strerror}.",
                "Give less `kv_memory`, or fewer `kv_tokens`.",
            ) from error

    @property
    @abstractmethod
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tensors of all layers: keys and values ``[L, Hkv, R, D]``, or latents ``[L, R, D]`` and None."""

    @property
    def values_per_token(self) -> int:
        """Number of elements stored for one committed token, in all layers together."""
        return sum(tensor.numel() // self.num_rows for tensor in self.tensors if tensor is not None)

    @property
    def bytes_per_token(self) -> int:
        """Number of bytes stored for one committed token, in all layers together."""
        return sum(tensor.nbytes // self.num_rows for tensor in self.tensors if tensor is not None)

    def rows_of(self, page_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows int64 ``[B, n]`` of the tokens at ``positions`` int64 ``[B, n]`` under ``page_table`` int64
        ``[B, P]``."""
        page_index = (positions // self.page_size).clamp(max=page_table.shape[1] - 1)
        page = page_table.gather(1, page_index)
        return page * self.page_size + positions % self.page_size

    def padded_rows(self, segments: PaddedSegments) -> torch.Tensor:
        """Rows int64 ``[T]`` that the tokens of ``segments`` are written to: the trash row for tokens that
        are not stored."""
        last_page = segments.page_tables.shape[1] - 1
        page_index = (segments.positions // self.page_size).clamp(max=last_page)
        page = segments.page_tables[segments.segments, page_index]
        rows = page * self.page_size + segments.positions % self.page_size
        return rows.masked_fill(~segments.is_stored, self.trash_row)

    @abstractmethod
    def window_attend(
        self,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        ancestors: torch.Tensor,
        num_keys: int,
        num_columns: int,
    ) -> Attend:
        """Make the attention of a forward over ``[B * N]`` window nodes.

        The forward stores the nodes in the scratch. A node attends to the positions from ``first_position``
        to ``prefix_lens - 1`` and to its ancestors in the window.

        Args:
            page_table: int64 ``[B, P]``.
            prefix_lens: int64 ``[B]``, number of positions before the window.
            ancestors: int64 ``[B, N]``, bits of the window keys that each node attends to; ``[B, N, W]``
                words of them for more than 64 keys.
            num_keys: number of window keys; the N nodes are the last of them.
            num_columns: upper bound of ``prefix_lens + num_keys``, known to the host.
        """

    @abstractmethod
    def prefill_attend(self, segments: Sequence[Segment]) -> Attend:
        """Make the attention of a forward over the packed prompt tokens of one or several requests.

        The forward stores the tokens in the pool. A token attends causally to the positions of its request
        from ``first_position`` on.

        Args:
            segments: tokens of each request, in the order of packing.
        """

    def commit_window(
        self,
        page_table: torch.Tensor,
        nodes: torch.Tensor,
        path_start: torch.Tensor,
        num_committed: torch.Tensor,
    ) -> None:
        """Copy accepted window nodes from the scratch to the pool.

        Args:
            page_table: int64 ``[B, P]``.
            nodes: int64 ``[B, n]``, window indices of the nodes on the accepted path.
            path_start: int64 ``[B]``, position of the first node on the path.
            num_committed: int64 ``[B]``, number of nodes on the path that are copied.
        """
        keys, values = self.tensors
        commit_path(
            keys,
            values,
            page_table,
            self.page_size,
            nodes,
            path_start,
            num_committed,
            self.scratch_start,
            self.window,
        )

    def _window(
        self,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        ancestors: torch.Tensor,
        num_keys: int,
        num_columns: int,
    ) -> tuple[WindowPlan, WindowRows]:
        """Plan the attention of a window; see :meth:`window_attend`.

        Returns:
            The plan, and the scratch rows of the nodes.
        """
        # The nodes are the last window keys.
        batch, num_nodes = ancestors.shape[:2]
        assert num_nodes <= num_keys <= self.window, "a window has no more nodes than its scratch"
        first_row = self.scratch_start + num_keys - num_nodes
        rows = WindowRows(first_row, self.window, batch, num_nodes, self.device)

        # Columns of the pool and of the scratch.
        plan = WindowPlan(
            page_table=page_table,
            page_size=self.page_size,
            prefix_lens=prefix_lens,
            first_position=self.first_position,
            scratch_start=self.scratch_start,
            scratch_stride=self.window,
            num_keys=num_keys,
            ancestors=ancestors,
            num_columns=num_columns,
            dummy_row=self.dummy_row,
            dtype=self.dtype,
            arrivals=self.arrivals,
        )
        return plan, rows

    def prompt_rows(self, segments: Sequence[Segment]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Find the rows of prompt tokens and of the tokens before them.

        Returns:
            Rows int64 ``[T]`` that the tokens are written to, the trash row for tokens that are not stored.
            For each request, rows int64 of its earlier tokens from ``first_position`` on.
        """
        written: list[torch.Tensor] = []
        cached: list[torch.Tensor] = []
        for segment in segments:
            # Rows of all tokens of the request up to the last one of the segment.
            positions = torch.arange(self.first_position, segment.stop, device=self.device)
            rows = self.rows_of(segment.page_table[None], positions[None])[0]

            # Split them into earlier tokens and those of the segment.
            num_cached = segment.start - self.first_position
            is_stored = positions[num_cached:] >= segment.write_from
            written.append(torch.where(is_stored, rows[num_cached:], self.trash_row))
            cached.append(rows[:num_cached])
        return torch.cat(written), cached
