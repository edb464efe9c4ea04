"""Drafters whose chain is made during draft-extend, so that it is ready when a cycle proposes."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from eagle_kit.core.shape import SpecShape
from eagle_kit.kernels.sampling import SamplingBatch
from eagle_kit.kernels.transfer import to_device
from eagle_kit.kernels.tree_build import chain_build
from eagle_kit.kv.store import Segment
from eagle_kit.speculation.proposal import Deterministic, DraftOutput
from eagle_kit.speculation.propose.drafter import Drafter
from eagle_kit.speculation.state import CycleState


class ReadyChainDrafter(Drafter):
    """A drafter whose states begin with the drafted tokens, int64 ``[B, D]``."""

    can_wait = False

    def propose(
        self,
        state: CycleState,
        shape: SpecShape,
        num_columns: int,
        sampling: SamplingBatch | None = None,
    ) -> DraftOutput:
        """Return the chain that draft-extend has made; ``shape`` must have at most D steps."""
        assert state.draft is not None
        tokens = state.draft[0]
        assert shape.topk == 1 and shape.steps <= tokens.shape[1]
        return DraftOutput(chain_build(state.roots, tokens[:, : shape.steps]), Deterministic())


def segments_of(segments: Sequence[Segment], rows: torch.Tensor) -> torch.Tensor:
    """Numbers of the segments that hold the packed ``rows``, int64 ``[n]`` -> int64 ``[n]``."""
    ends = list(accumulate(segment.stop - segment.start for segment in segments))
    return torch.searchsorted(to_device(ends, rows.device), rows, right=True)
