"""Drafting with several MTP modules, one per step (multi-layer EAGLE), during draft-extend.

Legend: B requests, S steps of the shape, D modules, K candidates of each, M window rows, H hidden, L tokens
in the target's pool.

The entry of module d, counted from 0, at slot p is made of the token there and of module d - 1's state at
slot p - 1 (for module 0 of the target's state at position p - 1), so it begins at slot 1 + d and has a store
of its own. Its state at a slot predicts the token of the next. When a request has emitted the tokens of slots
L + 1 .. L + n, module 0 runs over them and drafts slot L + n + 1; module 1 runs over them, and then over that
draft in the scratch, and drafts the next; and so on. The window of module d is therefore a chain of S + 1 + d
rows, of which the first n are committed, the next d are drafts, and the rest is ignored. A chain's tokens are
what the modules read; a tree has the other candidates of every module as well, which stand behind any of the
module before, though it has read its best one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from eagle_kit.drafts.base.cycle_state import CycleState
from eagle_kit.drafts.base.draft_model import DraftModel, HeadDraftModel, StepRows
from eagle_kit.drafts.base.drafter import CandidateSpec, PendingTokens, PromptBatch
from eagle_kit.drafts.base.ready import ReadyDrafter
from eagle_kit.kv.open import open_store
from eagle_kit.kv.store import PagedStore, PoolLayout, Segment
from eagle_kit.models.targets.llama import TargetOutput
from eagle_kit.ops.accept import Accepted


class ModulesState(NamedTuple):
    """Result of draft-extend: the candidates of all depths, as of :class:`ReadyDrafter`, and every module's
    state at the root's slot, ``carries [B, D, H]``."""

    tokens: torch.Tensor
    scores: torch.Tensor
    carries: torch.Tensor


class ModulesDrafter(ReadyDrafter):
    """Several modules with a store each. Mutates only the stores."""

    supports_deferred_draft = False  # its states are carried from cycle to cycle
    model: HeadDraftModel

    def __init__(self, model: HeadDraftModel, vocab_size: int, layout: PoolLayout) -> None:
        self.model, self.vocab_size = model, vocab_size
        self.lookback = model.num_modules - 1
        self.stores: list[PagedStore] = [
            open_store(
                replace(model.cache, num_layers=1),
                layout,
                model.variants[module : module + 1],
                first_slot=model.first_slot + module,
                dtype=model.dtype,
                device=model.device,
            )
            for module in range(model.num_modules)
        ]
        self.kv = self.stores[0]
        self._make_constants(layout)

    @classmethod
    def most_steps(cls, model: DraftModel) -> int:
        """See :class:`ReadyDrafter`: one module a step."""
        return model.num_modules

    @classmethod
    def logits_bytes(cls, model: DraftModel, batch_size: int, spec: CandidateSpec) -> int:
        """See :class:`Drafter`: those of one module after the other."""
        return super().logits_bytes(model, batch_size, spec._replace(steps=1, reads_confidence=False))

    def num_appended(self, spec: CandidateSpec) -> int:
        """See :class:`Drafter`."""
        return self.model.num_modules - 1

    def empty_state(self, count: int, spec: CandidateSpec) -> ModulesState:
        """See :class:`Drafter`."""
        modules, size, device = self.model.num_modules, self.model.feature_size, self.model.device
        empty = self.empty_candidates(count, spec._replace(steps=modules))
        return ModulesState(
            empty.tokens,
            empty.scores,
            torch.zeros(count, modules, size, dtype=self.model.dtype, device=device),
        )

    def draft_extend(
        self,
        state: CycleState,
        out: TargetOutput,
        accepted: Accepted,
        num_committed: torch.Tensor,
        spec: CandidateSpec,
        num_columns: int,
    ) -> ModulesState:
        """See :class:`Drafter`."""
        assert isinstance(state.draft, ModulesState)
        page_table, seq_lens = state.page_table, state.seq_lens
        b, length = accepted.tokens.shape
        states = self.model.states(out, self._path_rows(out, accepted)).view(b, length, -1)
        emitted = PendingTokens(states, accepted.tokens, accepted.num_accepted + 1)
        made = self._draft(emitted, state.draft.carries, seq_lens, page_table, num_columns, spec.topk)
        nodes, prefix_lens = self.numbers[:length].expand(b, length), seq_lens + 1
        for store in self.stores:
            store.commit_window(page_table, nodes, prefix_lens, num_committed)
        return made

    def _draft(
        self,
        pending: PendingTokens,
        carries: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        num_columns: int,
        topk: int,
    ) -> ModulesState:
        """Run all modules over a window behind slot ``seq_lens [B]``, whose states are ``carries [B, D, H]``.

        Args:
            pending: the emitted tokens and the target's states; there may be none.
            topk: K.
        """
        read, emitted, counts = pending
        b, length = emitted.shape
        features = self.model.features(read.flatten(0, 1)).view(b, length, self.model.feature_size)
        modules, request = self.model.num_modules, self.numbers[:b]
        tokens = torch.cat((emitted, emitted.new_zeros(b, modules)), 1)
        hidden = features.to(carries.dtype)
        drafted = []
        scores = []
        next_carries = []
        for module in range(modules):
            size = length + module
            states = carries[:, module, None]
            if size:
                made = self._window(module, hidden, tokens[:, :size], seq_lens, page_table, num_columns)
                states = torch.cat((states, made), 1)  # row j is the state at slot seq_lens + j
            last = self.model.head.norm_for_head(states[request, counts + module])
            ids, logprobs = self._candidates(last, topk)
            tokens = tokens.scatter(1, (counts + module)[:, None], ids[:, :1])
            drafted.append(ids)
            scores.append(logprobs[:, None])
            next_carries.append(states[request, counts])
            hidden = states
        return ModulesState(*(torch.stack(part, 1) for part in (drafted, scores, next_carries)))

    def _window(
        self,
        module: int,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        num_columns: int,
    ) -> torch.Tensor:
        """Run a module over the slots behind ``seq_lens``: ``hidden [B, m, H]``, ``tokens [B, m]`` -> ``[B,
        m, H]``. Slots in front of the module's first one are seen by themselves only."""
        b, size = tokens.shape
        store, offset = self.stores[module], self.numbers[:size]
        missing = (store.first_slot - 1 - seq_lens).clamp(0, size)[:, None]
        bits = (self.chain_bits[:size] & (-1 << missing)) | (1 << offset)
        attend = store.window_attend(page_table, seq_lens + 1, bits, size, num_columns)
        skipped = 1 - self.model.first_slot
        positions = (seq_lens[:, None] + self.numbers[skipped : skipped + size]).view(-1)
        rows = StepRows(hidden.flatten(0, 1), tokens.reshape(-1), positions)
        return self.model.step(rows, attend, module).fed_back.view(b, size, -1)

    def prefill(self, batch: PromptBatch, spec: CandidateSpec) -> ModulesState:
        """See :class:`Drafter`. Rows begin :attr:`lookback` tokens before what the stores lack."""
        # Entries of all modules, and the last state of each in every request.
        hidden = self.model.features(self.model.states(batch.out)).to(self.model.dtype)
        following = batch.next_ids
        carries = []
        for module in range(self.model.num_modules):
            states, sizes = self._prompt(module, hidden, following, batch.segments)
            parts, nothing = states.split(sizes), states.new_zeros(1, states.shape[1])
            carries.append(torch.cat([part[-1:] if len(part) else nothing for part in parts]))
            # The next module's slots begin one later, with this one's states up to the last but one.
            hidden = torch.cat([part[:-1] for part in parts])
            following = torch.cat([part[1:] for part in following.split(sizes)])

        # A draft behind every request, of which the prompts that end are taken.
        count = len(batch.segments)
        made = self._draft(
            PendingTokens(
                batch.out.hidden.new_zeros(count, 0, self.model.state_size),
                batch.ids.new_zeros(count, 0),
                batch.ids.new_zeros(count),
            ),
            torch.stack(carries, 1),
            torch.tensor(batch.stops).to(batch.last.device),
            batch.page_tables,
            max(batch.stops) + 1 + self.model.num_modules,
            spec.topk,
        )
        which = batch.requests_of_last()
        return ModulesState(*(part[which] for part in made))

    def _prompt(
        self, module: int, hidden: torch.Tensor, tokens: torch.Tensor, segments: Sequence[Segment]
    ) -> tuple[torch.Tensor, list[int]]:
        """Run a module over prompt rows and store its entries -> its states, and the rows of each segment."""
        mine = [
            Segment(table, first, stop + 1, max(first, write_from))
            for table, start, stop, write_from, _ in segments
            for first in [start + 1 + module]
        ]
        sizes = [max(0, segment.stop - segment.start) for segment in mine]
        mine = [segment for segment, size in zip(mine, sizes, strict=True) if size]
        if not mine:
            return hidden[:0], sizes
        slots = torch.cat([torch.arange(segment.start, segment.stop) for segment in mine]).to(hidden.device)
        attend = self.stores[module].prefill_attend(mine)
        rows = StepRows(hidden, tokens, slots - self.model.first_slot)
        return self.model.step(rows, attend, module).fed_back, sizes
