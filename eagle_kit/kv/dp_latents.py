"""Latent store of one rank in data-parallel attention (MLA only).

Each request's latents live on one rank, which computes all heads of its attention (SGLang's
``--enable-dp-attention``). Every rank runs the whole batch, computes attention for the requests of its shard,
and gathers the outputs of the other ranks. Page numbers are global: every rank stores one shard of the pool
(:class:`~eagle_kit.kv.page_pool.PagePool`), and drafts, which are replicated, store all pages.

Legend: B requests, N window nodes, P pages of a request, T tokens of a forward, R ranks, M most requests of a
rank, m tokens of this rank.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from eagle_kit.distributed.collectives import Share
from eagle_kit.kv.latents import PagedLatents
from eagle_kit.kv.store import PoolLayout, Segment
from eagle_kit.models.blocks.layers import ShardRows
from eagle_kit.models.blocks.mla import LatentAttend, LatentHeads, Queries
from eagle_kit.models.config_parts import LatentSpec
from eagle_kit.ops.transfer import to_device


class ShardRequests(NamedTuple):
    """Requests of a batch that this rank attends for.

    Attributes:
        rows: int64 ``[M]``, their rows of the batch, padded with row 0 to the number of the rank with most.
        is_real: bool ``[M]``, False for padding.
        indices: int64 ``[B]``, index of each request of the batch in the gathered ``R M`` ones.
    """

    rows: torch.Tensor
    is_real: torch.Tensor
    indices: torch.Tensor


def shard_requests(
    shards: Sequence[int], share: Share, most: int, size: int, device: torch.device
) -> ShardRequests:
    """Assign the requests of a batch to ranks.

    Args:
        shards: shard of the pool of each request, which is the number of its rank.
        share: this rank.
        most: M.
        size: B, to which the batch is padded.
        device: device of the result.
    """
    rows: list[list[int]] = [[] for _ in range(share.size)]
    indices = [0] * size
    for row, shard in enumerate(shards):
        indices[row] = shard * most + len(rows[shard])
        rows[shard].append(row)

    # One transfer to the device for all three tensors.
    mine = rows[share.rank]
    padding = [0] * (most - len(mine))
    numbers = to_device([*mine, *padding, *[1] * len(mine), *padding, *indices], device)
    chosen, is_real, where = numbers.split((most, most, size))
    return ShardRequests(chosen, is_real.bool(), where)


class DataParallelLatents(PagedLatents):
    """Paged latents of this rank's shard of the pool.

    Args:
        layout: sizes of the pool of all ranks together.
        share: this rank.
    """

    def __init__(self, spec: LatentSpec, layout: PoolLayout, share: Share, **options: Any) -> None:
        pages = layout.num_pages // share.size
        batch = -(-layout.max_batch_size // share.size)
        super().__init__(spec, replace(layout, num_pages=pages, max_batch_size=batch), **options)
        self.share = share
        self.first_page = share.rank * pages

    def local_pages(self, page_table: torch.Tensor) -> torch.Tensor:
        """Convert global page numbers to those of this store; pages of other ranks become the dummy page."""
        local = page_table - self.first_page
        return torch.where((local >= 0) & (local < self.dummy_page), local, self.dummy_page)

    def shard_window_attend(
        self,
        requests: ShardRequests,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        ancestors: torch.Tensor,
        num_columns: int,
    ) -> LatentAttend:
        """Like ``window_attend``, for the requests of this shard; the arguments describe the whole batch."""
        num_nodes = ancestors.shape[1]
        attend = super().window_attend(
            self.local_pages(page_table[requests.rows]),
            prefix_lens[requests.rows] * requests.is_real,
            ancestors[requests.rows],
            num_nodes,
            num_columns,
        )

        # Rows of nodes from rows of requests.
        nodes = torch.arange(num_nodes, device=self.device)
        rows = (requests.rows[:, None] * num_nodes + nodes).flatten()
        indices = (requests.indices[:, None] * num_nodes + nodes).flatten()
        return _ShardAttend(attend, ShardRows(rows, indices, len(requests.rows) * num_nodes))

    def shard_commit_window(
        self,
        requests: ShardRequests,
        page_table: torch.Tensor,
        nodes: torch.Tensor,
        first_position: torch.Tensor,
        num_committed: torch.Tensor,
    ) -> None:
        """Like ``commit_window``, for the requests of this shard; the arguments describe the whole batch."""
        table = self.local_pages(page_table[requests.rows])
        counts = num_committed[requests.rows] * requests.is_real
        self.commit_window(table, nodes[requests.rows], first_position[requests.rows], counts)

    def prefill_attend(self, segments: Sequence[Segment]) -> LatentAttend:
        """See :class:`~eagle_kit.kv.store.PagedStore`; only requests of this rank's shard are computed."""
        shard_segments = []
        shard_tokens: list[int] = []
        owners: list[tuple[int, int]] = []
        counts = [0] * self.share.size
        num_tokens = 0
        for segment in segments:
            size = segment.stop - segment.start
            if segment.shard == self.share.rank:
                table = self.local_pages(segment.page_table)
                shard_segments.append(segment._replace(page_table=table))
                shard_tokens += range(num_tokens, num_tokens + size)
            owners += [(segment.shard, counts[segment.shard] + i) for i in range(size)]
            counts[segment.shard] += size
            num_tokens += size

        # Index of each token in what the ranks gather, which is padded to the rank with most tokens.
        most = max(counts)
        indices = to_device([shard * most + i for shard, i in owners], self.device)
        rows = ShardRows(to_device(shard_tokens, self.device), indices, most)
        return _ShardAttend(super().prefill_attend(shard_segments) if shard_segments else None, rows)


class _ShardAttend:
    """Attention of this rank's rows of a forward, ``shard_rows``; None where it has none."""

    def __init__(self, attend: LatentAttend | None, shard_rows: ShardRows) -> None:
        self._attend = attend
        self.shard_rows = shard_rows

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a store of latents was given keys and values")

    def latents(self, layer: int, q: Queries, rows: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.mla.LatentAttend`."""
        assert self._attend is not None
        return self._attend.latents(layer, q, rows, heads)
