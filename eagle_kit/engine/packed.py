"""Windows of different sizes in one forward of the target: nodes that are unlikely to be accepted are left
out, and the rows of the others are packed, in one of a few numbers of rows.

Where attention takes no windows of different sizes (it is not in C++, or that of latents) it stays that of
whole ones, in which a node that was left out is a copy of its root: the matmuls, which windows are paid for,
have the packed rows only. Which nodes are verified changes no text of deterministic drafts, and no
distribution of sampled ones as long as it does not depend on what was sampled.
(The relaxed verifier is lossy, and as lossy as the nodes that it is given.)

Legend: B requests, N window nodes, T packed rows.
"""

from typing import NamedTuple

import torch

from eagle_kit.models.blocks.layers import Attend
from eagle_kit.models.blocks.mla import LatentAttend, LatentHeads, Queries
from eagle_kit.models.targets.target import TargetOutput
from eagle_kit.verify.proposal import DraftOutput, SampledChain, SampledTree


class Packing(NamedTuple):
    """Places of packed rows.

    Attributes:
        rows: int64 ``[T]``, the node of every packed row among ``B * N``.
        places: int64 ``[B * N]``, the packed row of every node, of those that are left out their root's.
        is_kept: bool ``[B, N]``.
    """

    rows: torch.Tensor
    places: torch.Tensor
    is_kept: torch.Tensor

    @classmethod
    def of(cls, num_drafts: torch.Tensor, num_nodes: int, num_rows: int) -> "Packing":
        """Keep the root and the first ``num_drafts [B]`` nodes behind it of every window, at most
        ``num_rows`` of all windows together. Rows to spare are nodes that are left out."""
        is_kept = torch.arange(num_nodes, device=num_drafts.device) <= num_drafts[:, None]
        places = is_kept.view(-1).cumsum(0).view_as(is_kept) - 1
        rows = is_kept.view(-1).to(torch.int8).argsort(descending=True, stable=True)[:num_rows]
        return cls(rows, torch.where(is_kept, places, places[:, :1]).view(-1), is_kept)

    def cut(self, window: DraftOutput) -> DraftOutput:
        """Leave nodes out of a window: they become their own parents, so that no path reaches them, and of a
        sampled chain their q becomes zero in place, which says that nothing was sampled."""
        tree, proposal = window
        itself = torch.arange(self.is_kept.shape[1], device=self.rows.device)
        if isinstance(proposal, SampledChain):
            proposal = SampledChain(proposal.q.masked_fill_(~self.is_kept[:, 1:, None], 0.0))
        assert not isinstance(proposal, SampledTree), "sampled siblings are verified together"
        return DraftOutput(tree._replace(parents=torch.where(self.is_kept, tree.parents, itself)), proposal)

    def whole(self, out: TargetOutput) -> TargetOutput:
        """Output of all nodes ``[B * N]`` of that of the packed rows."""
        return TargetOutput(*(part[self.places] for part in out))

    def attend(self, attend: Attend) -> Attend:
        """Attention of packed rows, by itself or through that of whole windows."""
        packed = getattr(attend, "packed", None)
        mine: Attend | None = None if packed is None else packed(self.rows, self.is_kept.sum(1))
        if mine is not None:
            return mine
        is_latent = hasattr(attend, "latents")
        return PackedLatentAttend(attend, self) if is_latent else PackedAttend(attend, self)  # type: ignore[arg-type]


class PackedAttend:
    """Attention of packed rows through that of whole windows, ``inner``."""

    def __init__(self, inner: Attend, packing: Packing) -> None:
        self._inner, self._rows, self._places = inner, packing.rows, packing.places

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._inner(layer, *(part[self._places] for part in (q, k, v)))[self._rows]


class PackedLatentAttend(PackedAttend):
    """The same over latents."""

    _inner: LatentAttend

    def latents(self, layer: int, q: Queries, rows: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        """See :class:`~eagle_kit.models.blocks.mla.LatentAttend`."""
        whole = Queries(*(part[self._places] for part in q))
        return self._inner.latents(layer, whole, rows[self._places], heads)[self._rows]
