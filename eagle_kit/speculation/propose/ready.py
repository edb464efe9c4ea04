"""Drafters whose candidates of all depths are made during draft-extend, so that a chain or a tree of them is
ready when a cycle proposes.

Legend: B requests, D depths, K candidates of each, S steps of a shape, P 1 or K.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from eagle_kit.core.shape import SpecShape
from eagle_kit.kernels.best_first import best_first
from eagle_kit.kernels.sampling import SamplingBatch
from eagle_kit.kernels.transfer import to_device
from eagle_kit.kernels.tree_build import chain_build
from eagle_kit.kv.store import Segment
from eagle_kit.speculation.proposal import Deterministic, DraftOutput
from eagle_kit.speculation.propose.drafter import Drafter, Kept
from eagle_kit.speculation.state import CycleState


class Candidates(NamedTuple):
    """Result of draft-extend: the candidates of all depths, best first.

    Attributes:
        tokens: int64 ``[B, D, K]``.
        scores: their log-probabilities, fp32 ``[B, D, K]``, 0 where K is 1: a chain ranks nothing.
    """

    tokens: torch.Tensor
    scores: torch.Tensor


class ReadyDrafter(Drafter):
    """A drafter whose states are, or begin with, :class:`Candidates`."""

    can_wait = False

    @classmethod
    def kept(cls, shapes: Sequence[SpecShape], *, tells_confidence: bool = False) -> Kept:
        """See :class:`Drafter`."""
        _, topk = super().kept(shapes, tells_confidence=tells_confidence)
        return Kept(max(1, *(shape.steps for shape in shapes)), topk)

    def empty_state(self, count: int, kept: Kept) -> tuple[torch.Tensor, ...]:
        """See :class:`Drafter`."""
        return self.empty_candidates(count, kept)

    def empty_candidates(self, count: int, kept: Kept) -> Candidates:
        """Candidates of ``count`` requests that have not been prefilled."""
        tokens = torch.zeros(count, *kept, dtype=torch.int64, device=self.model.device)
        return Candidates(tokens, torch.zeros_like(tokens, dtype=torch.float32))

    def candidates_of(self, read: torch.Tensor, kept: Kept) -> Candidates:
        """Candidates that D rows a request of ``read [B * D, H]`` give."""
        tokens, scores = self._candidates(read, kept.topk)
        return Candidates(tokens.view(-1, *kept), scores.view(-1, *kept))

    def confidence(self, state: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """See :class:`Drafter`."""
        return state[1][:, 0, 0].exp() if state[1].shape[2] > 1 else None

    def propose(
        self,
        state: CycleState,
        shape: SpecShape,
        num_columns: int,
        sampling: SamplingBatch | None = None,
    ) -> DraftOutput:
        """Return the chain of the best candidates, or the tree of the most likely paths through them;
        ``shape`` must be no deeper or wider than what the state keeps."""
        assert state.draft is not None
        tokens, (steps, topk, _) = state.draft[0], shape
        assert steps <= tokens.shape[1] and topk <= tokens.shape[2]
        if topk == 1:
            tree = chain_build(state.roots, tokens[:, :steps, 0])
        else:
            scores = self.path_scores(state.draft)[:, :steps, :topk, :topk]
            tree = best_first(state.roots, tokens[:, :steps, :topk], scores, shape)
        return DraftOutput(tree, Deterministic())

    def path_scores(self, draft: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Log-probability of each candidate given that of the depth before, fp32 ``[B, D, P, K]``: depths are
        drafted independently here, so P is 1."""
        return draft[1][:, :, None]


def segments_of(segments: Sequence[Segment], rows: torch.Tensor) -> torch.Tensor:
    """Numbers of the segments that hold the packed ``rows``, int64 ``[n]`` -> int64 ``[n]``."""
    ends = list(accumulate(segment.stop - segment.start for segment in segments))
    return torch.searchsorted(to_device(ends, rows.device), rows, right=True)
