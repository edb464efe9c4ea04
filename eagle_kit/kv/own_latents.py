"""Data-parallel attention: latents of the requests of one rank, where all ranks have the tokens of all.

Every rank has the whole attention of a layer, computes it for its own requests' rows, and gathers those of
the others (SGLang's ``--enable-dp-attention``). Pages are numbered over all ranks, each of which has a part
of the pool (:class:`~eagle_kit.kv.page_pool.PagePool`), so that drafts, which are whole on every rank, have
pages for all of them.

Legend: B requests, N window nodes, P pages of a request, T tokens of a forward, R ranks, M most rows of a
rank.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from eagle_kit.kernels.collectives import Share
from eagle_kit.kernels.transfer import to_device
from eagle_kit.kv.latents import PagedLatents
from eagle_kit.kv.store import PoolLayout, Segment
from eagle_kit.models.blocks.layers import OwnRows
from eagle_kit.models.blocks.mla import LatentAttend, LatentHeads, Queries
from eagle_kit.models.config_parts import LatentSpec


class OwnRequests(NamedTuple):
    """A rank's rows of a batch.

    Attributes:
        rows: int64 ``[M]``, its requests, then any others up to the number of the rank that has most.
        is_own: bool ``[M]``.
        places: int64 ``[B]``, where each request of the batch is among the ``R M`` of all ranks.
    """

    rows: torch.Tensor
    is_own: torch.Tensor
    places: torch.Tensor


def own_requests(
    parts: Sequence[int], share: Share, most: int, size: int, device: torch.device
) -> OwnRequests:
    """Rows of a batch whose first requests are of ``parts`` of the pool; behind them is padding up to
    ``size``."""
    rows: list[list[int]] = [[] for _ in range(share.size)]
    places = [0] * size
    for row, part in enumerate(parts):
        places[row] = part * most + len(rows[part])
        rows[part].append(row)
    mine = rows[share.rank]
    padding = [0] * (most - len(mine))
    numbers = to_device([*mine, *padding, *[1] * len(mine), *padding, *places], device)
    chosen, is_own, where = numbers.split((most, most, size))
    return OwnRequests(chosen, is_own.bool(), where)


class OwnLatents(PagedLatents):
    """Store of the pages of one rank.

    Args:
        layout: of the pool of all ranks together.
        share: the rank.
    """

    def __init__(self, spec: LatentSpec, layout: PoolLayout, share: Share, **options: Any) -> None:
        pages, batch = layout.num_pages // share.size, -(-layout.max_batch_size // share.size)
        super().__init__(spec, replace(layout, num_pages=pages, max_batch_size=batch), **options)
        self.share, self.first_page = share, share.rank * pages

    def own_pages(self, page_table: torch.Tensor) -> torch.Tensor:
        """Page table of the same shape by the numbers of this store; other pages are the dummy page."""
        local = page_table - self.first_page
        return torch.where((local >= 0) & (local < self.dummy_page), local, self.dummy_page)

    def own_window_attend(
        self,
        own: OwnRequests,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        ancestors: torch.Tensor,
        num_columns: int,
    ) -> LatentAttend:
        """Make the attention of the window nodes of its own requests, of arguments of the batch."""
        rows, nodes = own.rows, torch.arange(ancestors.shape[1], device=self.device)
        count = len(nodes)
        attend = super().window_attend(
            self.own_pages(page_table[rows]),
            prefix_lens[rows] * own.is_own,
            ancestors[rows],
            count,
            num_columns,
        )
        mine, places = ((part[:, None] * count + nodes).flatten() for part in (rows, own.places))
        return _OwnAttend(attend, OwnRows(mine, places, len(rows) * count))

    def own_commit_window(
        self,
        own: OwnRequests,
        page_table: torch.Tensor,
        nodes: torch.Tensor,
        first_position: torch.Tensor,
        num_committed: torch.Tensor,
    ) -> None:
        """Commit nodes of its own requests, of arguments of the batch."""
        rows = own.rows
        table, counts = self.own_pages(page_table[rows]), num_committed[rows] * own.is_own
        self.commit_window(table, nodes[rows], first_position[rows], counts)

    def prefill_attend(self, segments: Sequence[Segment]) -> LatentAttend:
        """See :class:`~eagle_kit.kv.store.PagedStore`; of its own requests' prompts."""
        mine, places, before = list[int](), list[tuple[int, int]](), 0
        counts = [0] * self.share.size
        own = []
        for segment in segments:
            size = segment.stop - segment.start
            if segment.part == self.share.rank:
                own.append(segment._replace(page_table=self.own_pages(segment.page_table)))
                mine += range(before, before + size)
            places += [(segment.part, counts[segment.part] + i) for i in range(size)]
            counts[segment.part] += size
            before += size
        most = max(counts)
        where = to_device([part * most + i for part, i in places], self.device)
        rows = OwnRows(to_device(mine, self.device), where, most)
        return _OwnAttend(super().prefill_attend(own) if own else None, rows)


class _OwnAttend:
    """Attention of some rows of a forward, which are its ``own_rows``; None where there are none."""

    def __init__(self, attend: LatentAttend | None, own_rows: OwnRows) -> None:
        self._attend, self.own_rows = attend, own_rows

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a store of latents was given keys and values")

    def latents(self, layer: int, q: Queries, rows: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.mla.LatentAttend`."""
        assert self._attend is not None
        return self._attend.latents(layer, q, rows, heads)
