"""Plan of a window whose own keys lie in the pages of its request, behind the prefix."""

from dataclasses import dataclass
from functools import cached_property

import torch

from eagle_kit.ops.attention.variant import key_bits
from eagle_kit.ops.attention.window.plan import WindowPlan


@dataclass(frozen=True)
class PagedWindowPlan(WindowPlan):
    """:class:`WindowPlan` without scratch: position ``prefix_lens[b] + j`` holds window key j.

    Attributes:
        kv_lens: int64 ``[B]``, at least 1: number of positions of each request, its window's keys included. A
            window has fewer than M keys where this is below M.
    """

    kv_lens: torch.Tensor

    @cached_property
    def layout(self) -> tuple[torch.Tensor, torch.Tensor]:
        """:attr:`WindowPlan.layout` with all columns in pages."""
        # The row of the store of each column.
        device = self.page_table.device
        column = torch.arange(self.num_columns, device=device).expand(len(self.page_table), -1)
        present = column < self.kv_lens[:, None]
        rows = torch.where(present, self.page_rows(column), self.dummy_row)

        # Nodes see the prefix from its first key on, and their ancestors.
        key = column - self.prefix_lens[:, None]
        is_ancestor = key_bits(self.words, key.clamp(0, self.num_keys - 1))
        in_prefix = (key < 0) & (column >= self.first_position)
        seen = in_prefix[:, None] | (((key >= 0) & present)[:, None] & is_ancestor)
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=device).masked_fill_(~seen, float("-inf"))
        return rows, mask
