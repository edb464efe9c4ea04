"""Paged store of a model's tokens: pages of committed tokens and a scratch for window nodes.

Subclasses store keys and values (:mod:`.keys_values`) or latents (:mod:`.latents`); the place of a token is
the same for all of them and defined here.

Legend: R rows, B requests, N window nodes, P pages of a request.
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
"""Dtypes of stores by their names in ``EngineConfig``; None is the model's."""

TILES = 512
"""Most tiles of query rows and key heads of a request whose parts are counted (``WindowPlan.arrivals``)."""


@dataclass(frozen=True)
class PoolLayout:
    """Sizes that the stores of an engine share.

    Attributes:
        num_pages, page_size: of the pool.
        max_batch_size: requests that have a scratch.
        window: rows of a scratch.
        dtype: of what is stored, when it is another one than the model's: fp8 e4m3, which saturates.
    """

    num_pages: int
    page_size: int
    max_batch_size: int
    window: int = MAX_WINDOW
    dtype: torch.dtype | None = None


class Segment(NamedTuple):
    """Prompt tokens of one request that a forward computes.

    Attributes:
        page_table: int64 ``[P]``, the request's pages.
        start, stop: the tokens are those at slots start..stop-1.
        write_from: tokens before this slot lie in pages that other requests share. They are computed again
            and not stored.
        shard: shard of the page pool that the pages belong to (data-parallel attention).
    """

    page_table: torch.Tensor
    start: int
    stop: int
    write_from: int
    shard: int = 0


class PagedStore(ABC):
    """R rows in every layer: the slots of the layout's pages and of one *dummy page*, then a scratch of
    ``window`` rows per request of a batch, then one dummy row that padding reads and nobody writes, and one
    trash row for tokens that are not to be stored.

    Only committed tokens are ever in the pool: a window writes its nodes into the scratch,
    :meth:`commit_window` copies the accepted ones. Slot ``page_table[b, p // page_size] * page_size + p %
    page_size`` belongs to position p. Page tables hold the dummy page where a request has no page.

    Args:
        first_slot: slots at the front of a request that hold nothing and are not attended to.
        dtype: of queries, keys and values.
    """

    def __init__(
        self,
        layout: PoolLayout,
        *,
        first_slot: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.page_size, self.window, self.first_slot = layout.page_size, layout.window, first_slot
        self.dtype, self.device = dtype, torch.device(device)
        self.dummy_page = layout.num_pages
        self.num_slots = (layout.num_pages + 1) * layout.page_size
        self.dummy_row = self.num_slots + layout.max_batch_size * layout.window
        self.trash_row = self.dummy_row + 1
        self.num_rows = self.trash_row + 1
        self._store_dtype = layout.dtype or dtype
        self.arrivals = torch.zeros(layout.max_batch_size * TILES, dtype=torch.int32, device=self.device)

    def _empty(self, *shape: int) -> torch.Tensor:
        """Allocate rows of zeros.

        Raises:
            UserError: the system refuses so much memory.
        """
        try:
            return zeros_when_used(shape, self._store_dtype, self.device)
        except OSError as error:
            size = torch.Size(shape).numel() * self._store_dtype.itemsize / 1e9
            raise UserError(
                f"The system refuses {size:.2f} GB of memory for keys and values: {error.strerror}.",
                "Give less `kv_memory`, or fewer `kv_tokens`.",
            ) from error

    @property
    @abstractmethod
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys and values, or latents and None, as ``commit_path`` takes them."""

    @property
    def numbers_per_token(self) -> int:
        """Numbers held for one committed token in all layers."""
        return sum(tensor.numel() // self.num_rows for tensor in self.tensors if tensor is not None)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one committed token in all layers."""
        return sum(tensor.nbytes // self.num_rows for tensor in self.tensors if tensor is not None)

    def slots(self, page_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Pool rows ``[B, n]`` of ``positions`` int64 ``[B, n]`` under ``page_table [B, P]``."""
        page = (positions // self.page_size).clamp(max=page_table.shape[1] - 1)
        return page_table.gather(1, page) * self.page_size + positions % self.page_size

    @abstractmethod
    def window_attend(
        self,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        ancestors: torch.Tensor,
        num_keys: int,
        num_columns: int,
    ) -> Attend:
        """Make the attention of a forward over ``[B * N]`` window nodes, the last N of ``num_keys`` window
        keys.

        The nodes are stored in the scratch. Each attends to the first ``prefix_lens [B]`` slots (without
        those before ``first_slot``) and to its ``ancestors [B, N]``. ``num_columns`` bounds prefix +
        ``num_keys``.
        """

    @abstractmethod
    def prefill_attend(self, segments: Sequence[Segment]) -> Attend:
        """Make the attention of a forward over prompt tokens of one or several requests, packed in this
        order.

        The tokens are stored in the pool and attend causally from ``first_slot`` on, within their request.
        """

    def commit_window(
        self,
        page_table: torch.Tensor,
        nodes: torch.Tensor,
        first_position: torch.Tensor,
        num_committed: torch.Tensor,
    ) -> None:
        """Copy the first ``num_committed [B]`` of window ``nodes [B, n]`` to positions ``first_position [B] +
        0..n-1``."""
        commit_path(
            *self.tensors,
            page_table,
            self.page_size,
            nodes,
            first_position,
            num_committed,
            self.num_slots,
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
        """Plan a window's attention -> the plan, and the scratch rows of its nodes."""
        b, n = ancestors.shape
        assert n <= num_keys <= self.window, "a window has no more nodes than its scratch"
        plan = WindowPlan(
            page_table=page_table,
            page_size=self.page_size,
            prefix_lens=prefix_lens,
            first_slot=self.first_slot,
            scratch_start=self.num_slots,
            scratch_stride=self.window,
            num_keys=num_keys,
            ancestors=ancestors,
            num_columns=num_columns,
            dummy_row=self.dummy_row,
            dtype=self.dtype,
            arrivals=self.arrivals,
        )
        return plan, WindowRows(self.num_slots + num_keys - n, self.window, b, n, self.device)

    def prompt_rows(self, segments: Sequence[Segment]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Rows int64 ``[T]`` that prompt tokens are written to (the trash row where they are not), and the
        rows of the earlier tokens of each request."""
        written, cached = [], []
        for table, start, stop, write_from, _ in segments:
            positions = torch.arange(self.first_slot, stop, device=self.device)
            rows = self.slots(table[None], positions[None])[0]
            segment_rows = rows[start - self.first_slot :]
            keep = positions[start - self.first_slot :] >= write_from
            written.append(torch.where(keep, segment_rows, self.trash_row))
            cached.append(rows[: start - self.first_slot])
        return torch.cat(written), cached
