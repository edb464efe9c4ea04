"""Latent store of one rank in data-parallel attention (MLA only), SGLang's ``--enable-dp-attention``.

The latents of a request live on one rank, which attends for it with all heads. Every rank gets the tokens of
the whole batch, attends for its *shard* of the requests, and gathers the outputs of the other ranks.

Each rank stores one shard of the pool (:class:`~eagle_kit.kv.page_pool.PagePool`), while page numbers are
those of the whole pool. Drafts are replicated and store all pages.

Legend: B requests, N window nodes, n nodes of a path, P pages of a request, T tokens of a forward, R ranks, M
largest number of requests of a rank, m tokens of this rank.
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
from eagle_kit.models.cache_specs import LatentSpec
from eagle_kit.ops.transfer import to_device


class ShardRequests(NamedTuple):
    """Requests of a batch that this rank attends for.

    Attributes:
        rows: int64 ``[M]``, rows of the requests in the batch. Ranks with fewer than M requests have row 0 as
            padding.
        is_own: bool ``[M]``, False for padding.
        indices: int64 ``[B]``, index of each request of the batch in the ``R * M`` gathered ones.
    """

    rows: torch.Tensor
    is_own: torch.Tensor
    indices: torch.Tensor


def shard_requests(
    ranks: Sequence[int], share: Share, most: int, size: int, device: torch.device
) -> ShardRequests:
    """Find the requests of a batch that this rank attends for.

    Args:
        ranks: rank of each request, which is the number of the shard of the pool that holds its pages.
        share: this rank.
        most: M.
        size: B, to which the batch is padded.
        device: device of the result.
    """
    # Rows of each rank, and the index of each request among the gathered ones.
    rows: list[list[int]] = [[] for _ in range(share.size)]
    indices = [0] * size
    for row, rank in enumerate(ranks):
        indices[row] = rank * most + len(rows[rank])
        rows[rank].append(row)

    # One transfer to the device for all three tensors.
    own_rows = rows[share.rank]
    padding = [0] * (most - len(own_rows))
    on_host = own_rows + padding + [1] * len(own_rows) + padding + indices
    shard_rows, is_own, gathered = to_device(on_host, device).split((most, most, size))
    return ShardRequests(shard_rows, is_own.bool(), gathered)


class DataParallelLatents(PagedLatents):
    """Paged latents of this rank's shard of the pool.

    Args:
        spec: sizes of the rows and scale of the scores.
        layout: sizes of the pool of all ranks together.
        share: this rank.
        options: further arguments of :class:`~eagle_kit.kv.store.PagedStore`.

    Attributes:
        first_page: number in the whole pool of the first page of this rank.
    """

    def __init__(self, spec: LatentSpec, layout: PoolLayout, share: Share, **options: Any) -> None:
        num_pages = layout.num_pages // share.size
        max_batch_size = -(-layout.max_batch_size // share.size)
        layout = replace(layout, num_pages=num_pages, max_batch_size=max_batch_size)
        super().__init__(spec, layout, **options)
        self.share = share
        self.first_page = share.rank * num_pages

    def local_pages(self, page_table: torch.Tensor) -> torch.Tensor:
        """Convert page numbers of the whole pool to those of this store.

        Args:
            page_table: int64 ``[..., P]``; pages of other ranks become the dummy page.
        """
        local = page_table - self.first_page
        is_local = (local >= 0) & (local < self.dummy_page)
        return torch.where(is_local, local, self.dummy_page)

    def shard_window_attend(
        self,
        shard: ShardRequests,
        page_table: torch.Tensor,
        prefix_lens: torch.Tensor,
        ancestors: torch.Tensor,
        num_columns: int,
    ) -> LatentAttend:
        """Like :meth:`window_attend`, for the requests of this rank.

        Args:
            shard: requests of this rank.
            page_table: int64 ``[B, P]``, of the whole batch, with page numbers of the whole pool.
            prefix_lens: int64 ``[B]``, number of committed tokens of each request of the batch.
            ancestors: int64 ``[B, N]``, of the whole batch; all nodes are new.
            num_columns: upper bound of ``prefix_lens + N``, known to the host.
        """
        # Attention of this rank's requests; padding has no prefix.
        num_nodes = ancestors.shape[1]
        attend = super().window_attend(
            self.local_pages(page_table[shard.rows]),
            prefix_lens[shard.rows] * shard.is_own,
            ancestors[shard.rows],
            num_nodes,
            num_columns,
        )

        # Indices of nodes from indices of requests.
        nodes = torch.arange(num_nodes, device=self.device)
        rows = (shard.rows[:, None] * num_nodes + nodes).flatten()
        indices = (shard.indices[:, None] * num_nodes + nodes).flatten()
        most = len(shard.rows) * num_nodes
        return _ShardAttend(attend, ShardRows(rows, indices, most))

    def shard_commit_window(
        self,
        shard: ShardRequests,
        page_table: torch.Tensor,
        nodes: torch.Tensor,
        path_start: torch.Tensor,
        num_committed: torch.Tensor,
    ) -> None:
        """Like :meth:`commit_window`, for the requests of this rank.

        Args:
            shard: requests of this rank.
            page_table: int64 ``[B, P]``, of the whole batch, with page numbers of the whole pool.
            nodes: int64 ``[B, n]``, window indices of the nodes on the accepted paths of the batch.
            path_start: int64 ``[B]``, position of the first node on each path.
            num_committed: int64 ``[B]``, number of nodes on each path that are copied.
        """
        self.commit_window(
            self.local_pages(page_table[shard.rows]),
            nodes[shard.rows],
            path_start[shard.rows],
            num_committed[shard.rows] * shard.is_own,
        )

    def prefill_attend(self, segments: Sequence[Segment]) -> LatentAttend:
        """See :class:`~eagle_kit.kv.store.PagedStore`. This rank attends for its own requests only."""
        # Segments and tokens of this rank, and for every token its rank and its index among that rank's.
        own_segments: list[Segment] = []
        own_tokens: list[int] = []
        token_owners: list[tuple[int, int]] = []
        tokens_of_rank = [0] * self.share.size
        num_tokens = 0
        for segment in segments:
            size = segment.stop - segment.start
            rank = segment.shard
            if rank == self.share.rank:
                local_table = self.local_pages(segment.page_table)
                own_segments.append(segment._replace(page_table=local_table))
                own_tokens += range(num_tokens, num_tokens + size)
            first = tokens_of_rank[rank]
            token_owners += [(rank, first + i) for i in range(size)]
            tokens_of_rank[rank] += size
            num_tokens += size

        # The gathered tokens are padded to the rank with most tokens.
        most = max(tokens_of_rank)
        indices = to_device([rank * most + i for rank, i in token_owners], self.device)
        shard_rows = ShardRows(to_device(own_tokens, self.device), indices, most)

        attend: LatentAttend | None = None
        if own_segments:
            attend = super().prefill_attend(own_segments)
        return _ShardAttend(attend, shard_rows)


class _ShardAttend:
    """Attention of this rank's rows of a forward.

    Args:
        attend: attention of those rows; None if this rank has none.
        shard_rows: rows of this rank, and the index of every row of the forward in the gathered ones.
    """

    def __init__(self, attend: LatentAttend | None, shard_rows: ShardRows) -> None:
        self._attend = attend
        self.shard_rows = shard_rows

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a store of latents was given keys and values")

    def latents(self, layer: int, q: Queries, rows: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.mla.LatentAttend`."""
        assert self._attend is not None, "this rank has no rows in the forward"
        return self._attend.latents(layer, q, rows, heads)
