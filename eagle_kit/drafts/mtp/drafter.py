"""Drafting with several MTP modules, one per step (multi-layer EAGLE), during draft-extend.

Legend: B requests, S steps of the shape, D modules, K candidates of each, M window rows, H hidden, L tokens
in the target's pool.

The entry of module d, counted from 0, at position p is made of the token there and of module d - 1's state at
p - 1 (for module 0 of the target's state at p - 1), so it begins at position 1 + d and has a store of its
own. Its state at a position predicts the token of the next. When a request has emitted the tokens of
positions L + 1 .. L + n, module 0 runs over them and drafts L + n + 1; module 1 runs over them, and then over
that draft in the scratch, and drafts the next; and so on. The window of module d is therefore a chain of
S + 1 + d rows, of which the first n are committed, the next d are drafts, and the rest is ignored. A chain's
tokens are what the modules read; a tree has the other candidates of every module as well, which stand after
any of the module before, though it has read its best one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from eagle_kit.drafts.base.cycle_state import CycleState
from eagle_kit.drafts.base.draft_model import DraftModel, HeadDraftModel, StepRows
from eagle_kit.drafts.base.drafter import CandidateSpec, PendingTokens, PromptBatch
from eagle_kit.drafts.base.one_pass import OnePassDrafter
from eagle_kit.kv.open import open_store
from eagle_kit.kv.store import PagedStore, PoolLayout, Segment
from eagle_kit.models.targets.target import TargetOutput
from eagle_kit.ops.accept import Accepted


class ModulesState(NamedTuple):
    """Result of draft-extend.

    Attributes:
        tokens: int64 ``[B, D, K]``, candidates of all depths, as in ``DepthCandidates``.
        scores: fp32 ``[B, D, 1, K]``, their log-probabilities.
        carries: ``[B, D, H]``, every module's state at the position of the root.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    carries: torch.Tensor


class ModulesDrafter(OnePassDrafter):
    """Several modules with a store each. Mutates only the stores."""

    supports_deferred_draft = False  # its states are carried from cycle to cycle
    model: HeadDraftModel

    def __init__(self, model: HeadDraftModel, vocab_size: int, layout: PoolLayout) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.lookback = model.num_modules - 1
        self.stores: list[PagedStore] = [
            open_store(
                replace(model.cache, num_layers=1),
                layout,
                model.variants[module : module + 1],
                first_position=model.first_position + module,
                dtype=model.dtype,
                device=model.device,
            )
            for module in range(model.num_modules)
        ]
        self.kv = self.stores[0]
        self._make_constants(layout)

    @classmethod
    def most_steps(cls, model: DraftModel) -> int:
        """See :class:`OnePassDrafter`: one module a step."""
        return model.num_modules

    @classmethod
    def logits_bytes(cls, model: DraftModel, batch_size: int, spec: CandidateSpec) -> int:
        """See :class:`Drafter`: those of one module after the other."""
        return super().logits_bytes(model, batch_size, spec._replace(steps=1, needs_confidence=False))

    def num_appended(self, spec: CandidateSpec) -> int:
        """See :class:`Drafter`: the drafts that the last module reads."""
        return self.model.num_modules - 1

    def empty_state(self, count: int, spec: CandidateSpec) -> ModulesState:
        """See :class:`Drafter`."""
        num_modules = self.model.num_modules
        size = self.model.feature_size
        empty = self.empty_candidates(count, spec._replace(steps=num_modules))
        carries = torch.zeros(count, num_modules, size, dtype=self.model.dtype, device=self.model.device)
        return ModulesState(empty.tokens, empty.scores, carries)

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
        page_table = state.page_table
        seq_lens = state.seq_lens
        b, length = accepted.tokens.shape

        # Run all modules over the emitted tokens, each over the drafts of those before it too.
        states = self.model.target_hidden_states(out, self._path_rows(out, accepted)).view(b, length, -1)
        emitted = PendingTokens(states, accepted.tokens, accepted.num_accepted + 1)
        next_state = self._run_modules(
            emitted, state.draft.carries, seq_lens, page_table, num_columns, spec.topk
        )

        # Commit the emitted tokens to every store.
        nodes = self.arange[:length].expand(b, length)
        prefix_lens = seq_lens + 1
        for store in self.stores:
            store.commit_window(page_table, nodes, prefix_lens, num_committed)
        return next_state

    def _run_modules(
        self,
        pending: PendingTokens,
        carries: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        num_columns: int,
        topk: int,
    ) -> ModulesState:
        """Run all modules over a window after position ``seq_lens [B]``.

        Args:
            pending: the emitted tokens and the target's states; there may be none.
            carries: ``[B, D, H]``, every module's state at that position.
            topk: K.
        """
        target_states, emitted, counts = pending
        b, length = emitted.shape
        features = self.model.features(target_states.flatten(0, 1))
        features = features.view(b, length, self.model.feature_size)
        num_modules = self.model.num_modules
        request = self.arange[:b]
        tokens = torch.cat((emitted, emitted.new_zeros(b, num_modules)), 1)
        hidden = features.to(carries.dtype)
        drafted = []
        scores = []
        next_carries = []
        for module in range(num_modules):
            # States of this module; row j is the state at position seq_lens + j.
            size = length + module
            states = carries[:, module, None]
            if size:
                out = self._window(module, hidden, tokens[:, :size], seq_lens, page_table, num_columns)
                states = torch.cat((states, out), 1)

            # Its candidates, after the last draft. The best one is a token that the next module reads.
            last = self.model.head.norm_for_lm_head(states[request, counts + module])
            ids, logprobs = self.model.best_tokens(last, topk)
            tokens = tokens.scatter(1, (counts + module)[:, None], ids[:, :1])
            drafted.append(ids)
            scores.append(logprobs[:, None])
            next_carries.append(states[request, counts])
            hidden = states
        return ModulesState(torch.stack(drafted, 1), torch.stack(scores, 1), torch.stack(next_carries, 1))

    def _window(
        self,
        module: int,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        num_columns: int,
    ) -> torch.Tensor:
        """Run a module over the positions after ``seq_lens [B]``. Positions before the module's first one are
        seen by themselves only.

        Args:
            hidden: ``[B, M, H]``, states of the module before.
            tokens: int64 ``[B, M]``.

        Returns:
            The module's states ``[B, M, H]``.
        """
        b, size = tokens.shape
        store = self.stores[module]
        offset = self.arange[:size]
        missing = (store.first_position - 1 - seq_lens).clamp(0, size)[:, None]
        bits = (self.chain_bits[:size] & (-1 << missing)) | (1 << offset)
        attend = store.window_attend(page_table, seq_lens + 1, bits, size, num_columns)
        first_offset = 1 - self.model.first_position
        rope_positions = seq_lens[:, None] + self.arange[first_offset : first_offset + size]
        rows = StepRows(hidden.flatten(0, 1), tokens.reshape(-1), rope_positions.view(-1))
        return self.model.step(rows, attend, module).fed_back.view(b, size, -1)

    def prefill(self, batch: PromptBatch, spec: CandidateSpec) -> ModulesState:
        """See :class:`Drafter`. Rows begin :attr:`lookback` tokens before what the stores lack."""
        # Entries of all modules, and the last state of each in every request.
        hidden = self.model.features(self.model.target_hidden_states(batch.out)).to(self.model.dtype)
        following = batch.next_ids
        carries = []
        for module in range(self.model.num_modules):
            states, sizes = self._run_prompts(module, hidden, following, batch.segments)
            parts = states.split(sizes)
            zeros = states.new_zeros(1, states.shape[1])
            carries.append(torch.cat([part[-1:] if len(part) else zeros for part in parts]))
            # The next module begins one position later, with this one's states up to the last but one.
            hidden = torch.cat([part[:-1] for part in parts])
            following = torch.cat([part[1:] for part in following.split(sizes)])

        # A draft after every request, of which the prompts that end are taken.
        count = len(batch.segments)
        no_tokens = PendingTokens(
            batch.out.hidden.new_zeros(count, 0, self.model.state_size),
            batch.ids.new_zeros(count, 0),
            batch.ids.new_zeros(count),
        )
        next_state = self._run_modules(
            no_tokens,
            torch.stack(carries, 1),
            torch.tensor(batch.stops).to(batch.last.device),
            batch.page_tables,
            max(batch.stops) + 1 + self.model.num_modules,
            spec.topk,
        )
        which = batch.requests_of_last()
        return ModulesState(*(part[which] for part in next_state))

    def _run_prompts(
        self, module: int, hidden: torch.Tensor, tokens: torch.Tensor, segments: Sequence[Segment]
    ) -> tuple[torch.Tensor, list[int]]:
        """Run a module over prompt rows and store its entries.

        Returns:
            Its states, and the number of rows of each segment.
        """
        # The module's segments; one whose tokens all lie before its first position has no row.
        sizes = []
        own_segments = []
        for table, start, stop, write_from, _ in segments:
            first = start + 1 + module
            size = max(0, stop + 1 - first)
            sizes.append(size)
            if size:
                own_segments.append(Segment(table, first, stop + 1, max(first, write_from)))
        if not own_segments:
            return hidden[:0], sizes

        positions = torch.cat([torch.arange(segment.start, segment.stop) for segment in own_segments])
        positions = positions.to(hidden.device)
        attend = self.stores[module].prefill_attend(own_segments)
        rows = StepRows(hidden, tokens, positions - self.model.first_position)
        return self.model.step(rows, attend, module).fed_back, sizes
