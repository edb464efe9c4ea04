"""Drafting a block in one pass over the target's states as keys (DFlash, arXiv 2602.06036, and DSpark, whose
logits are then corrected one depth after the other), during draft-extend.

Legend: B requests, M emitted rows of a window, D depths, K candidates of each, N rows of a block, H hidden.

The entry of a token is made of its state alone, and nobody queries with it. So draft-extend writes entries of
the accepted rows, root first, which are the tokens that the target commits, and the block after them in the
scratch: the new root, whose state is not known, and masks. Its rows attend to all entries before the new
root and to each other. Only entries of accepted rows are committed. The chain to propose is then ready.
"""

from typing import cast

import torch

from eagle_kit.drafts.base.cycle_state import CycleState
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.drafts.base.drafter import CandidateSpec, PaddedPromptBatch, PendingTokens, PromptBatch
from eagle_kit.drafts.base.one_pass import OnePassDrafter
from eagle_kit.drafts.base.sampled_one_pass import SampledOnePassDrafter
from eagle_kit.drafts.dflash.head import DFlashHead
from eagle_kit.kv.keys_values import PagedKV
from eagle_kit.kv.store import PoolLayout
from eagle_kit.models.blocks.layers import KVRows
from eagle_kit.ops.transfer import to_device


class BlockDrafter(OnePassDrafter):
    """A head that drafts blocks, of as many rows as the depths need, whatever the block of its training."""

    model: HeadDraftModel
    kv: PagedKV
    has_padded_prefill = True

    def __init__(self, model: HeadDraftModel, vocab_size: int, layout: PoolLayout) -> None:
        super().__init__(model, vocab_size, layout)
        self.head = cast(DFlashHead, model.head)  # as its step form says
        self.first = self.head.config.first_drafted

    def num_appended(self, spec: CandidateSpec) -> int:
        """See :class:`Drafter`."""
        return spec.steps + self.first

    def extend(
        self,
        state: CycleState,
        pending: PendingTokens,
        last: torch.Tensor,
        spec: CandidateSpec,
        num_columns: int,
    ) -> tuple[torch.Tensor, ...]:
        """See :class:`Drafter`."""
        hidden_states, tokens, num_committed = pending
        context = self.model.features(hidden_states.flatten(0, 1)).unflatten(0, tokens.shape)
        roots = tokens.gather(1, last[:, None])[:, 0]
        next_state = self._run_block(
            context, roots, state.page_table, state.seq_lens, last + 1, spec, num_columns
        )
        nodes = self.arange[: tokens.shape[1]].expand(tokens.shape)
        self.kv.commit_window(state.page_table, nodes, state.seq_lens, num_committed)
        return next_state

    def store(self, state: CycleState, pending: PendingTokens, num_columns: int) -> None:
        """See :class:`Drafter`; no block is drafted."""
        hidden_states, tokens, num_committed = pending
        positions = state.seq_lens[:, None] + self.arange[: tokens.shape[1]]
        is_there = positions < (state.seq_lens + num_committed)[:, None]
        rows = torch.where(is_there, self.kv.rows_of(state.page_table, positions), self.kv.trash_row)
        self._write_entries(
            self.model.features(hidden_states.flatten(0, 1)), positions.view(-1), rows.view(-1)
        )

    def _write_entries(self, context: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the entries of ``context [T, H]`` at ``positions`` int64 ``[T]`` into ``rows`` of the
        store."""
        self.head.context_entries(context, positions, lambda layer: KVRows(*self.kv.layer(layer), rows))

    def prefill(self, batch: PromptBatch, spec: CandidateSpec) -> tuple[torch.Tensor, ...]:
        """See :class:`Drafter`: entries of the prompt's tokens, then blocks after prompts that end."""
        # Entries of all rows.
        context = self.model.features(self.model.target_hidden_states(batch.out))
        rows, _ = self.kv.prompt_rows(batch.segments)
        positions = [torch.arange(segment.start, segment.stop) for segment in batch.segments]
        self._write_entries(context, to_device(torch.cat(positions), context.device), rows)
        if not len(batch.last):
            return self.empty_state(0, spec)

        # A block after each prompt that ends.
        which = batch.requests_of_last()
        return self._run_block(
            context.new_empty(len(which), 0, context.shape[1]),
            batch.roots,
            batch.page_tables[which],
            to_device(batch.stops, which.device)[which],
            torch.zeros_like(which),
            spec,
            max(batch.stops) + spec.steps + self.first,
        )

    def prefill_padded(self, batch: PaddedPromptBatch, spec: CandidateSpec) -> tuple[torch.Tensor, ...]:
        """See :class:`Drafter`: entries of the prompt's tokens, then a block after every prompt."""
        context = self.model.features(batch.states)
        segments = batch.segments
        self._write_entries(context, segments.positions, self.kv.padded_rows(segments))
        return self._run_block(
            context.new_empty(len(batch.last), 0, context.shape[1]),
            batch.roots,
            batch.page_tables,
            batch.stops,
            torch.zeros_like(batch.stops),
            spec,
            batch.num_columns,
        )

    def _run_block(
        self,
        context: torch.Tensor,
        roots: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        counts: torch.Tensor,
        spec: CandidateSpec,
        num_columns: int,
    ) -> tuple[torch.Tensor, ...]:
        """Write entries of context rows and run a block after them, in the scratch.

        Args:
            context: ``[B, M, H]``, M may be 0; the rows of positions ``seq_lens [B]`` and on, of which the
                first ``counts [B]`` are valid.
            roots: int64 ``[B]``, the token after them.
        """
        b, length, _ = context.shape
        size = spec.steps + self.first
        num_keys = length + size

        # Inputs of the block, and positions of context rows and block.
        inputs = self.head.block_inputs(roots, self.model.target.embed_tokens.weight, size)
        context_offsets = self.arange[:length].expand(b, length)
        offsets = torch.cat((context_offsets, counts[:, None] + self.arange[:size]), 1)
        positions = (seq_lens[:, None] + offsets).view(-1)

        # Bit j is row j. A block's rows see the valid ones, and each other or those up to themselves.
        valid = (1 << counts[:, None]) - 1
        causal = self.head.config.causal
        attend_by_causality = {}
        for is_causal in set(causal):
            own = self.chain_bits[:size] if is_causal else self.chain_bits[size - 1]
            bits = (valid | (own << length)).expand(b, size)
            attend_by_causality[is_causal] = self.kv.entering_attend(
                page_table, seq_lens, bits, num_keys, num_columns
            )
        attends = [attend_by_causality[is_causal] for is_causal in causal]

        # One pass. Of the rows of a block those from ``first`` on draft.
        out = self.head.draft(context.to(inputs.dtype), inputs, positions, attends)
        lm_head_input = out.unflatten(0, (b, size))[:, self.first :].flatten(0, 1)  # [B * D, H]
        return self.make_state(lm_head_input, spec, roots)


class SampledBlockDrafter(SampledOnePassDrafter, BlockDrafter):
    """Sampled chains of a head that drafts blocks."""
