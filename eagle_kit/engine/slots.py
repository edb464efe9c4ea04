"""Per-request device state, one row per slot.

Legend: M slots, P pages a request may have, V vocabulary.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from eagle_kit.core.shape import MAX_WINDOW
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.drafts.base.drafter import CandidateSpec, Drafter, PendingTokens
from eagle_kit.drafts.base.state import CycleState
from eagle_kit.engine.grammar.masks import num_bytes
from eagle_kit.engine.graphs.batch_kind import adjusts_logits
from eagle_kit.engine.request import Request
from eagle_kit.ops.rows import append_rows, gather_rows, write_rows
from eagle_kit.ops.sampling import write_bias
from eagle_kit.ops.transfer import to_device


class Tables(NamedTuple):
    """Tables of the vocabulary of all slots, ``[M + 1, V]``: ``counts`` int32 of the reply's tokens, ``bias``
    fp32, and ``prompt_mask`` bool, tokens of the prompt. Rows of requests without penalties and biases add
    nothing, but for their counts, which no penalty multiplies."""

    counts: torch.Tensor
    bias: torch.Tensor
    prompt_mask: torch.Tensor


class Slots:
    """Tables of M requests and, last, of a dummy that pads batches: it owns no page and stays inactive.

    Args:
        dummy_page: entry of page tables where a request has no page.
        drafter: of the draft states; None in ordinary decoding.
        candidate_spec: candidates of a draft state.
    """

    def __init__(
        self,
        count: int,
        max_pages: int,
        dummy_page: int,
        drafter: Drafter | None,
        candidate_spec: CandidateSpec,
        device: torch.device,
    ) -> None:
        self.dummy, self.dummy_page = count, dummy_page
        self.page_table = torch.full((count + 1, max_pages), dummy_page, dtype=torch.int64, device=device)
        self._written: list[list[int]] = [[] for _ in range(count)]
        self.seq_lens = torch.zeros(count + 1, dtype=torch.int64, device=device)
        self.roots = torch.zeros(count + 1, dtype=torch.int64, device=device)
        self.active = torch.ones(count + 1, dtype=torch.bool, device=device)
        self.active[count] = False
        self.draft = drafter.empty_state(count + 1, candidate_spec) if drafter is not None else None
        self.tables: Tables | None = None
        self._adjusted: set[int] = set()
        self.pending: PendingTokens | None = None
        self.masks: torch.Tensor | None = None

    def set_pages(self, requests: Iterable[Request]) -> None:
        """Bring the rows of ``requests`` up to date: what changed in all of them is one copy, one write."""
        places: list[int] = []
        pages: list[int] = []
        for request in requests:
            sequence = request.sequence
            allocation = sequence.allocation
            known = self._written[sequence.slot]
            first = request.on_device.num_pages_written  # of those before it none has changed
            if first == len(allocation):
                continue
            first = max(first, 0)
            new = allocation.table_from(first)
            padded = new + [self.dummy_page] * (len(known) - first - len(new))
            row = sequence.slot * self.page_table.shape[1]
            for place, page in enumerate(padded, first):
                if place >= len(known) or known[place] != page:
                    places.append(row + place)
                    pages.append(page)
            known[first:] = new
            request.on_device.num_pages_written = len(allocation)
        if places:
            delta = to_device(places + pages, self.page_table.device)
            self.page_table.view(-1)[delta[: len(places)]] = delta[len(places) :]

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
        if self.pending is not None:
            self.drop_pending(slots)

    def gather(self, rows: torch.Tensor, *, drafts: bool = True) -> CycleState:
        """Gather the state of the batch in ``rows`` int64 ``[B]``, that of its ``drafts`` too unless the
        cycle leaves it alone."""
        mine = self.page_table, self.seq_lens, self.roots, self.active
        draft = self.draft if drafts else None
        page_table, seq_lens, roots, active, *parts = gather_rows([*mine, *(draft or ())], rows)
        state = None if draft is None else type(draft)(*parts)
        return CycleState(page_table, seq_lens, roots, active, state, rows)

    def scatter(self, rows: torch.Tensor, state: CycleState, counts: torch.Tensor | None) -> None:
        """Write back the state after a cycle, and the counts of the replies."""
        mine, new = [self.seq_lens, self.roots], [state.seq_lens, state.roots]
        if self.draft is not None and state.draft is not None:
            mine, new = [*mine, *self.draft], [*new, *state.draft]
        if self.tables is not None and counts is not None:
            mine, new = [*mine, self.tables.counts], [*new, counts]
        write_rows(mine, rows, new)

    def append_pending(self, rows: torch.Tensor, new: PendingTokens) -> None:
        """Append a token of each of ``rows [B]`` to what the draft has pending."""
        assert self.pending is not None
        states, tokens, counts = self.pending
        append_rows([states, tokens], counts, rows, [new.states[:, 0], new.tokens[:, 0]], new.counts)

    def make_masks(self, vocab_size: int) -> torch.Tensor:
        """Return the bits of the tokens that grammars allow (``grammar/masks.py``) after each node of the
        slots' windows, uint8 ``[M + 1, N, V / 8]``, made when they are first needed."""
        if self.masks is None:
            shape = self.dummy + 1, MAX_WINDOW, num_bytes(vocab_size)
            self.masks = torch.zeros(shape, dtype=torch.uint8, device=self.roots.device)
        return self.masks

    def make_pending(self, model: DraftModel, others: PendingTokens | None = None) -> None:
        """Make room for a window of a request's tokens that a draft misses in plain cycles, unless there is
        some. ``others`` have it of other slots: nothing is running when these change."""
        self.pending = self.pending or others
        if self.pending is not None:
            return
        shape, device = (self.dummy + 1, MAX_WINDOW), self.roots.device
        states = torch.zeros(*shape, model.state_size, dtype=model.state_dtype, device=device)
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.pending = PendingTokens(states, tokens, torch.zeros(shape[0], dtype=torch.int64, device=device))

    def state_before_pending(self, rows: torch.Tensor, length: int) -> tuple[CycleState, PendingTokens]:
        """State of ``rows [B]`` before the tokens that the draft has pending, and the first ``length`` of
        these."""
        assert self.pending is not None
        states, tokens, counts = self.pending
        state, pending = (
            self.gather(rows),
            PendingTokens(states[rows, :length], tokens[rows, :length], counts[rows]),
        )
        return state._replace(seq_lens=state.seq_lens - pending.counts), pending

    def drop_pending(self, rows: torch.Tensor) -> None:
        """Drop what the draft has pending of ``rows``."""
        assert self.pending is not None
        self.pending.counts.index_fill_(0, rows, 0)  # assigned, the number would be a tensor to wait for

    def keep_last_pending(self, rows: torch.Tensor) -> None:
        """Drop what the draft has pending of ``rows`` but the last token, which its next state depends on."""
        assert self.pending is not None
        states, tokens, counts = self.pending
        last = (counts[rows] - 1).clamp(min=0)  # dummies have none
        states[rows, 0], tokens[rows, 0] = states[rows, last], tokens[rows, last]
        counts[rows] = counts[rows].clamp(max=1)

    def adjust(self, request: Request, vocab_size: int, root: torch.Tensor) -> None:
        """Write a request's rows of the tables that penalties and biases need, or those that change nothing
        where a request with some was in its slot.

        Args:
            root: ``[1]``, the token behind the prompt, which the host may not know yet.
        """
        params, slot = request.params, request.sequence.slot
        if not adjusts_logits(params):
            if self.tables is not None and slot in self._adjusted:
                self._adjusted.discard(slot)
                for table in self.tables:
                    table[slot] = 0
            return
        counts, bias, prompt_mask = self.make_tables(vocab_size)
        self._adjusted.add(slot)
        counts[slot] = 0
        write_bias(bias[slot], params)
        prompt_mask[slot] = False
        prompt_mask[slot].index_fill_(0, to_device(request.prompt_ids, root.device), True)
        known = to_device(request.token_ids, root.device) if request.token_ids else root
        counts[slot].index_add_(0, known, torch.ones_like(known, dtype=torch.int32))

    def make_tables(self, vocab_size: int) -> "Tables":
        """Return the tables of all slots, made when they are first needed."""
        if self.tables is None:
            shape, device = (self.dummy + 1, vocab_size), self.roots.device
            kinds = torch.int32, torch.float32, torch.bool
            self.tables = Tables(*(torch.zeros(shape, dtype=kind, device=device) for kind in kinds))
        return self.tables
