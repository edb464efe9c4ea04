"""Paged store of a model's tokens: pages of committed tokens and a scratch for window nodes.

Subclasses define the entry of a token: keys and values (``keys_values``) or latents (``latents``). Its
location, defined here, is the same for all.

Legend: R rows, B requests, N window nodes, P pages of a request.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from eagle_kit.kernels.commit import commit_path
from eagle_kit.kernels.window_attention import WindowPlan
from eagle_kit.models.blocks.layers import Attend


class Segment(NamedTuple):
    """Prompt tokens start..stop-1 of one request, in the pages of ``page_table [P]``. Those before
    ``write_from`` lie in pages shared with other requests; they are recomputed but not written."""

    page_table: torch.Tensor
    start: int
    stop: int
    write_from: int


class PagedStore(ABC):
    """Store of R rows in every layer: the slots of ``num_pages`` pages and of one *dummy page*, then a
    scratch of ``window`` rows per request of a batch, then one dummy row, which is read for padding and never
    written, and one trash row for writes to discard.

    Only committed tokens are ever in the pool: a window writes its nodes into the scratch,
    :meth:`commit_window` copies the accepted ones. Slot ``page_table[b, p // page_size] * page_size + p %
    page_size`` belongs to position p. Page tables hold the dummy page where a request has no page.

    Args:
        num_pages: pages of the pool, without the dummy page.
        page_size: slots per page.
        max_batch_size: requests of a batch, at most.
        window: scratch rows per request.
        first_slot: number of unused slots at the front of a request, which are not attended to.
        dtype: dtype of queries, keys and values.
        store_dtype: dtype of the store if different: fp8 e4m3, which saturates.
        device: device of the store.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_batch_size: int,
        window: int,
        first_slot: int = 0,
        dtype: torch.dtype = torch.float32,
        store_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.page_size, self.window, self.first_slot = page_size, window, first_slot
        self.dtype, self.device = dtype, torch.device(device)
        self.dummy_page = num_pages
        self.num_slots = (num_pages + 1) * page_size
        self.dummy_row = self.num_slots + max_batch_size * window
        self.trash_row = self.dummy_row + 1
        self.num_rows = self.trash_row + 1
        self._store_dtype = store_dtype or dtype

    def _empty(self, *shape: int) -> torch.Tensor:
        """Uninitialised rows."""
        return torch.zeros(shape, dtype=self._store_dtype, device=self.device)

    @property
    @abstractmethod
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """First two arguments of ``commit_path``: keys and values, or latents and None."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one committed token occupies in all layers."""
        return sum(tensor.nbytes // self.num_rows for tensor in self.tensors if tensor is not None)

    def slots(self, page_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Pool rows ``[B, n]`` of ``positions`` int64 ``[B, n]`` under ``page_table [B, P]``."""
        page = (positions // self.page_size).clamp(max=page_table.shape[1] - 1)
        return page_table.gather(1, page) * self.page_size + positions % self.page_size

    def scratch_rows(self, batch_size: int, start: int, stop: int) -> torch.Tensor:
        """Scratch rows start..stop-1 of each request, int64 ``[B, stop - start]``."""
        request = torch.arange(batch_size, device=self.device)[:, None] * self.window
        return self.num_slots + request + torch.arange(start, stop, device=self.device)

    @abstractmethod
    def window_attend(
        self,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        ancestors: torch.Tensor,
        num_keys: int,
        num_columns: int,
    ) -> Attend:
        """Attention for a forward over ``[B * N]`` window nodes, the last N of ``num_keys`` window keys.

        The nodes' entries are written to the scratch; each node attends to the first ``prefix_lens [B]``
        slots (without those before ``first_slot``) and to the node's ``ancestors [B, N]``. ``num_columns`` is
        an upper bound on prefix + ``num_keys``.
        """

    @abstractmethod
    def prefill_attend(self, segments: Sequence[Segment]) -> Attend:
        """Attention for a forward over prompt tokens of one or several requests, packed in the order of
        ``segments``: their entries are written to the pool, and they attend causally from ``first_slot`` on
        to their own request."""

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
    ) -> tuple[WindowPlan, torch.Tensor]:
        """Plan of a window, and the scratch rows int64 ``[B * N]`` of its nodes."""
        b, n = ancestors.shape
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
        )
        return plan, self.scratch_rows(b, num_keys - n, num_keys).reshape(-1)

    def _prompt_rows(self, segments: Sequence[Segment]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Rows int64 ``[T]`` that prompt tokens are written to (the trash row for shared pages), and the rows
        of each request's earlier tokens."""
        written, cached = [], []
        for table, start, stop, write_from in segments:
            positions = torch.arange(self.first_slot, stop, device=self.device)
            rows = self.slots(table[None], positions[None])[0]
            own = rows[start - self.first_slot :]
            keep = positions[start - self.first_slot :] >= write_from
            written.append(torch.where(keep, own, self.trash_row))
            cached.append(rows[: start - self.first_slot])
        return torch.cat(written), cached
