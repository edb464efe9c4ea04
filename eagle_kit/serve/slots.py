"""Per-request device state, one row per slot.

Legend: M slots, P pages a request may have, V vocabulary.
"""

from collections.abc import Sequence

import torch

from eagle_kit.kernels.transfer import to_device
from eagle_kit.speculation.propose.drafter import Drafter, Missed
from eagle_kit.speculation.state import CycleState
from eagle_kit.tuning.policy import MOST_MISSED


class Slots:
    """Tables of M requests and, last, of a dummy that pads batches: it owns no page and stays inactive.

    Args:
        dummy_page: entry of page tables where a request has no page.
        drafter: of the draft states; None in ordinary decoding.
        topk: candidates that a draft keeps.
    """

    def __init__(
        self,
        count: int,
        max_pages: int,
        dummy_page: int,
        drafter: Drafter | None,
        topk: int,
        device: torch.device,
    ) -> None:
        self.dummy, self.dummy_page = count, dummy_page
        self.page_table = torch.full((count + 1, max_pages), dummy_page, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(count + 1, dtype=torch.int64, device=device)
        self.roots = torch.zeros(count + 1, dtype=torch.int64, device=device)
        self.active = torch.ones(count + 1, dtype=torch.bool, device=device)
        self.active[count] = False
        self.draft = drafter.empty_state(count + 1, topk) if drafter is not None else None
        self.counts: torch.Tensor | None = None
        self.missed: Missed | None = None
        if drafter is not None and drafter.can_wait:
            model = drafter.model
            features = torch.zeros(
                count + 1, MOST_MISSED, model.feature_size, dtype=model.dtype, device=device
            )
            tokens = torch.zeros(count + 1, MOST_MISSED, dtype=torch.int64, device=device)
            self.missed = Missed(features, tokens, torch.zeros(count + 1, dtype=torch.int64, device=device))

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Write a request's page numbers."""
        self.page_table[slot] = self.dummy_page
        self.page_table[slot, : len(pages)] = to_device(pages, self.page_table.device)

    def join(
        self,
        slots: torch.Tensor,
        seq_lens: torch.Tensor,
        roots: torch.Tensor,
        draft: tuple[torch.Tensor, ...] | None,
    ) -> None:
        """Put requests whose prompt is computed into ``slots`` int64 ``[n]``."""
        self.seq_lens[slots] = seq_lens
        self.roots[slots] = roots
        if draft is not None and self.draft is not None:
            for mine, new in zip(self.draft, draft, strict=True):
                mine[slots] = new
        if self.missed is not None:
            self.missed.counts[slots] = 0

    def gather(self, rows: torch.Tensor) -> CycleState:
        """Gather the state of the batch in ``rows`` int64 ``[B]``."""
        draft = None if self.draft is None else type(self.draft)(*(part[rows] for part in self.draft))
        return CycleState(
            self.page_table[rows], self.seq_lens[rows], self.roots[rows], self.active[rows], draft, rows
        )

    def scatter(self, rows: torch.Tensor, state: CycleState, counts: torch.Tensor | None) -> None:
        """Write back the state after a cycle, and the counts of the replies."""
        self.seq_lens[rows] = state.seq_lens
        self.roots[rows] = state.roots
        if self.draft is not None and state.draft is not None:
            for mine, new in zip(self.draft, state.draft, strict=True):
                mine[rows] = new
        if self.counts is not None and counts is not None:
            self.counts[rows] = counts

    def miss(self, rows: torch.Tensor, new: Missed) -> None:
        """Append a token of each of ``rows [B]`` to what the draft has missed."""
        assert self.missed is not None
        at = self.missed.counts[rows].clamp(max=MOST_MISSED - 1)
        self.missed.features[rows, at] = new.features[:, 0]
        self.missed.tokens[rows, at] = new.tokens[:, 0]
        self.missed.counts[rows] += new.counts

    def start_counts(self, slot: int, vocab_size: int, tokens: Sequence[int], root: torch.Tensor) -> None:
        """Count the tokens of a request's reply for its penalties: ``tokens`` that the host knows, or, when
        it knows none yet, the ``root [1]``."""
        counts = self.make_counts(vocab_size)
        counts[slot] = 0
        if tokens:
            known = torch.bincount(torch.tensor(tokens), minlength=vocab_size)
            counts[slot] = known.to(counts)
        else:
            counts[slot].index_add_(0, root, torch.ones_like(root, dtype=torch.int32))

    def make_counts(self, vocab_size: int) -> torch.Tensor:
        """Return the counts of all slots, int32 ``[slots, V]``, made when they are first needed. Those of
        requests without penalties mean nothing."""
        if self.counts is None:
            shape = (self.dummy + 1, vocab_size)
            self.counts = torch.zeros(shape, dtype=torch.int32, device=self.roots.device)
        return self.counts
