"""Device state of the requests of a batch: page tables, lengths, roots and draft states, one row per slot.

A cycle gathers the slots of its batch and scatters them back, so that it runs without the host.

Legend: M slots, P most pages of a request, B requests of a batch, N window nodes, V vocabulary.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from eagle_kit.core.shape import MAX_WINDOW
from eagle_kit.drafts.base.cycle_state import CycleState
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.drafts.base.drafter import CandidateSpec, Drafter, PendingTokens
from eagle_kit.engine.grammar.masks import num_bytes
from eagle_kit.engine.graphs.batch_kind import adjusts_logits
from eagle_kit.engine.request import Request
from eagle_kit.ops.rows import append_rows, gather_rows, write_rows
from eagle_kit.ops.sampling import write_bias
from eagle_kit.ops.transfer import to_device


class AdjustmentTables(NamedTuple):
    """Tables of the vocabulary that penalties and biases read, one row per slot.

    Rows of requests without penalties and biases are 0. Their counts may grow, which no penalty reads.

    Attributes:
        counts: int32 ``[M + 1, V]``, how often each token occurs in the response.
        bias: fp32 ``[M + 1, V]``, what is added to the logits.
        prompt_mask: bool ``[M + 1, V]``, True for tokens of the prompt.
    """

    counts: torch.Tensor
    bias: torch.Tensor
    prompt_mask: torch.Tensor


class Slots:
    """Tables of M slots and of a dummy, the last row, that pads batches. It has no page and stays inactive.

    Args:
        count: M.
        max_pages: P.
        dummy_page: page number that page tables hold where a request has no page.
        drafter: makes the draft states; None in ordinary decoding.
        candidate_spec: candidates of a draft state.
        device: device of all tables.

    Attributes:
        page_table: int64 ``[M + 1, P]``.
        seq_lens: int64 ``[M + 1]``, tokens in the pool.
        roots: int64 ``[M + 1]``, the last emitted token, which the next window begins with.
        active: bool ``[M + 1]``, False for the dummy.
        draft: the draft states, a named tuple of tensors with M + 1 rows; None in ordinary decoding.
        tables: tables of penalties and biases; None until a request needs them.
        pending: tokens that the draft has not run over; None until :meth:`make_pending`.
        masks: bits of the tokens that grammars allow; None until :meth:`make_masks`.
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
        self.dummy = count
        self.dummy_page = dummy_page

        # Page tables on the device, and the pages that the host has written to each.
        self.page_table = torch.full((count + 1, max_pages), dummy_page, dtype=torch.int64, device=device)
        self._written: list[list[int]] = [[] for _ in range(count)]

        # State that every cycle reads and writes.
        self.seq_lens = torch.zeros(count + 1, dtype=torch.int64, device=device)
        self.roots = torch.zeros(count + 1, dtype=torch.int64, device=device)
        self.active = torch.ones(count + 1, dtype=torch.bool, device=device)
        self.active[count] = False
        self.draft = drafter.empty_state(count + 1, candidate_spec) if drafter is not None else None

        # State that only some requests need, made when it is first needed.
        self.tables: AdjustmentTables | None = None
        self._adjusted: set[int] = set()
        self.pending: PendingTokens | None = None
        self.masks: torch.Tensor | None = None

    def set_pages(self, requests: Iterable[Request]) -> None:
        """Bring the page tables of ``requests`` up to date.

        The changes of all of them go to the device in one copy, and are written by one operation.
        """
        indices: list[int] = []
        pages: list[int] = []
        changed: list[tuple[Request, int, list[int]]] = []
        for request in requests:
            sequence = request.sequence
            allocation = sequence.allocation

            # No page before the first ``num_pages_written`` has changed.
            first = request.on_device.num_pages_written
            if first == len(allocation):
                continue
            first = max(first, 0)

            # New pages, then dummy pages over those of an earlier request of the slot.
            written = self._written[sequence.slot]
            new = allocation.table_from(first)
            padded = new + [self.dummy_page] * (len(written) - first - len(new))

            # Collect what differs from the device's table.
            row_start = sequence.slot * self.page_table.shape[1]
            for column, page in enumerate(padded, first):
                if column >= len(written) or written[column] != page:
                    indices.append(row_start + column)
                    pages.append(page)
            changed.append((request, first, new))

        # One transfer for indices and pages.
        if indices:
            changes = to_device(indices + pages, self.page_table.device)
            self.page_table.view(-1)[changes[: len(indices)]] = changes[len(indices) :]

        # Note what is on the device only now: the transfer may lack memory.
        for request, first, new in changed:
            self._written[request.sequence.slot][first:] = new
            request.on_device.num_pages_written = len(request.sequence.allocation)

    def join(
        self,
        slot_ids: torch.Tensor,
        seq_lens: torch.Tensor,
        roots: torch.Tensor,
        draft: tuple[torch.Tensor, ...] | None,
    ) -> None:
        """Put requests whose prompts are computed into slots.

        Args:
            slot_ids: int64 ``[n]``.
            seq_lens: int64 ``[n]``, their tokens in the pool.
            roots: int64 ``[n]``, the token behind each prompt.
            draft: their draft states, with n rows; None in ordinary decoding.
        """
        self.seq_lens[slot_ids] = seq_lens
        self.roots[slot_ids] = roots
        if draft is not None and self.draft is not None:
            for table, new in zip(self.draft, draft, strict=True):
                table[slot_ids] = new
        if self.pending is not None:
            self.drop_pending(slot_ids)

    def gather(self, slot_ids: torch.Tensor, *, with_draft: bool = True) -> CycleState:
        """Gather the state of a batch.

        Args:
            slot_ids: int64 ``[B]``, its slots.
            with_draft: gather its draft states too; False for a cycle that does not use them.
        """
        draft = self.draft if with_draft else None
        tables = [self.page_table, self.seq_lens, self.roots, self.active, *(draft or ())]
        page_table, seq_lens, roots, active, *draft_rows = gather_rows(tables, slot_ids)
        draft_state = None if draft is None else type(draft)(*draft_rows)
        return CycleState(page_table, seq_lens, roots, active, draft_state, slot_ids)

    def scatter(self, slot_ids: torch.Tensor, state: CycleState, counts: torch.Tensor | None) -> None:
        """Write back the state of a batch after a cycle.

        Args:
            slot_ids: int64 ``[B]``, its slots.
            counts: int32 ``[B, V]``, the new counts of the ``tables``; None if the cycle did not read them.
        """
        tables = [self.seq_lens, self.roots]
        new = [state.seq_lens, state.roots]
        if self.draft is not None and state.draft is not None:
            tables.extend(self.draft)
            new.extend(state.draft)
        if self.tables is not None and counts is not None:
            tables.append(self.tables.counts)
            new.append(counts)
        write_rows(tables, slot_ids, new)

    def append_pending(self, slot_ids: torch.Tensor, new: PendingTokens) -> None:
        """Append the first token of ``new``, which has B rows, to the pending tokens of ``slot_ids [B]``."""
        assert self.pending is not None
        hidden_states, tokens, counts = self.pending
        first = [new.hidden_states[:, 0], new.tokens[:, 0]]
        append_rows([hidden_states, tokens], counts, slot_ids, first, new.counts)

    def make_masks(self, vocab_size: int) -> torch.Tensor:
        """Return the masks of grammars, uint8 ``[M + 1, N, V / 8]``, made when they are first needed.

        They hold a bit for each token that may follow each node of a window (``grammar/masks.py``).
        """
        if self.masks is None:
            shape = (self.dummy + 1, MAX_WINDOW, num_bytes(vocab_size))
            self.masks = torch.zeros(shape, dtype=torch.uint8, device=self.roots.device)
        return self.masks

    def make_pending(self, model: DraftModel, existing: PendingTokens | None = None) -> None:
        """Make room for the pending tokens of all slots, :data:`MAX_WINDOW` of each.

        Args:
            existing: room of other slots, which is used if there is some. Nothing is running when an engine
                changes its slots, so one room serves them all.
        """
        if self.pending is None:
            self.pending = existing
        if self.pending is not None:
            return
        count = self.dummy + 1
        device = self.roots.device
        self.pending = PendingTokens(
            hidden_states=torch.zeros(
                count, MAX_WINDOW, model.state_size, dtype=model.state_dtype, device=device
            ),
            tokens=torch.zeros(count, MAX_WINDOW, dtype=torch.int64, device=device),
            counts=torch.zeros(count, dtype=torch.int64, device=device),
        )

    def state_before_pending(self, slot_ids: torch.Tensor, length: int) -> tuple[CycleState, PendingTokens]:
        """Gather the state of a batch as it was before its pending tokens.

        Args:
            slot_ids: int64 ``[B]``, its slots.
            length: columns of pending tokens to gather; no request may have more.

        Returns:
            The state, and the pending tokens.
        """
        assert self.pending is not None
        hidden_states, tokens, counts = self.pending
        pending = PendingTokens(hidden_states[slot_ids, :length], tokens[slot_ids, :length], counts[slot_ids])
        state = self.gather(slot_ids)
        return state._replace(seq_lens=state.seq_lens - pending.counts), pending

    def drop_pending(self, slot_ids: torch.Tensor) -> None:
        """Drop the pending tokens of ``slot_ids``."""
        assert self.pending is not None
        # An assignment of a number would copy it from the host, and wait.
        self.pending.counts.index_fill_(0, slot_ids, 0)

    def keep_last_pending(self, slot_ids: torch.Tensor) -> None:
        """Drop the pending tokens of ``slot_ids`` but the last, which the next draft state depends on."""
        assert self.pending is not None
        hidden_states, tokens, counts = self.pending
        # All are read before one is written, so that a lack of memory leaves all as they were.
        num_left = counts[slot_ids].clamp(max=1)
        last = (counts[slot_ids] - 1).clamp(min=0)  # dummies have no pending token
        last_states = hidden_states[slot_ids, last]
        last_tokens = tokens[slot_ids, last]
        hidden_states[slot_ids, 0] = last_states
        tokens[slot_ids, 0] = last_tokens
        counts[slot_ids] = num_left

    def write_adjustments(self, request: Request, vocab_size: int, root: torch.Tensor) -> None:
        """Write a request's rows of the tables that penalties and biases read.

        Args:
            root: int64 ``[1]``, the token behind the prompt, which the host may not know yet.
        """
        params = request.params
        slot = request.sequence.slot

        # A request without penalties and biases clears what an earlier request of its slot left.
        if not adjusts_logits(params):
            if self.tables is not None and slot in self._adjusted:
                self._adjusted.discard(slot)
                for table in self.tables:
                    table[slot] = 0
            return
        counts, bias, prompt_mask = self.make_tables(vocab_size)
        self._adjusted.add(slot)

        # Biases, and the tokens of the prompt.
        write_bias(bias[slot], params)
        prompt_mask[slot] = False
        prompt_mask[slot].index_fill_(0, to_device(request.prompt_ids, root.device), True)

        # Count the tokens of the response: those before a preemption, or the first one.
        counts[slot] = 0
        known = to_device(request.token_ids, root.device) if request.token_ids else root
        counts[slot].index_add_(0, known, torch.ones_like(known, dtype=torch.int32))

    def make_tables(self, vocab_size: int) -> AdjustmentTables:
        """Return the tables of all slots, made when they are first needed."""
        if self.tables is None:
            shape = (self.dummy + 1, vocab_size)
            device = self.roots.device
            self.tables = AdjustmentTables(
                counts=torch.zeros(shape, dtype=torch.int32, device=device),
                bias=torch.zeros(shape, dtype=torch.float32, device=device),
                prompt_mask=torch.zeros(shape, dtype=torch.bool, device=device),
            )
        return self.tables
