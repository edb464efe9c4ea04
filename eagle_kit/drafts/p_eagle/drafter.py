"""Drafting all steps in one pass over masks (P-EAGLE, arXiv 2602.01469), during draft-extend.

Legend: B requests, M emitted rows of a window, D depths, K candidates of each, H hidden, L tokens in the
target's pool.

The window of draft-extend has the M emitted tokens and, after them, D - 1 masks. Row n, the last emitted one,
drafts the first depth, and mask j the one j further: it has the position n + j, and attends to the rows up to
n and to the masks up to itself. Entries of emitted tokens are committed, those of masks stay in the scratch.
The candidates of all depths are then ready.
"""

from typing import cast

import torch

from eagle_kit.core.shape import MAX_WINDOW, SpecShape
from eagle_kit.drafts.base.cycle_state import CycleState
from eagle_kit.drafts.base.draft_forwards import (
    run_over_padded_prompts,
    run_over_prompts,
    run_over_tokens,
)
from eagle_kit.drafts.base.draft_model import DraftModel, HeadDraftModel
from eagle_kit.drafts.base.drafter import CandidateSpec, PaddedPromptBatch, PendingTokens, PromptBatch
from eagle_kit.drafts.base.one_pass import OnePassDrafter
from eagle_kit.drafts.base.sampled_one_pass import SampledOnePassDrafter
from eagle_kit.drafts.p_eagle.head import PEagleHead
from eagle_kit.kv.store import PoolLayout
from eagle_kit.ops.transfer import to_device


class MaskedDrafter(OnePassDrafter):
    """A head whose later steps are masks."""

    model: HeadDraftModel
    has_padded_prefill = True

    def __init__(self, model: HeadDraftModel, vocab_size: int, layout: PoolLayout) -> None:
        super().__init__(model, vocab_size, layout)
        self.head = cast(PEagleHead, model.head)  # as its step form says
        with torch.no_grad():
            self.masks = self.head.mask_inputs()

    @classmethod
    def most_steps(cls, model: DraftModel) -> int:
        """See :class:`OnePassDrafter`."""
        return MAX_WINDOW // 2

    @classmethod
    def default_shape(cls, model: DraftModel, model_type: str) -> SpecShape:
        """See :class:`Drafter`."""
        return SpecShape(5, 1, 6)

    def num_appended(self, spec: CandidateSpec) -> int:
        """See :class:`Drafter`: the masks."""
        return spec.steps - 1

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
        b, length = tokens.shape

        # Run the emitted tokens and the masks after them.
        embedding = self.head.embedding(self.model.target.embed_tokens.weight)
        features = self.model.features(hidden_states.flatten(0, 1))
        inputs = self.head.midlayer.gather_inputs(features, None, tokens.reshape(-1), embedding)
        lm_head_input = self._window(
            inputs, state.page_table, state.seq_lens, last + 1, spec.steps, num_columns
        )

        # Commit the emitted tokens.
        nodes = self.arange[:length].expand(b, length)
        self.kv.commit_window(state.page_table, nodes, state.seq_lens + 1, num_committed)
        return self.make_state(lm_head_input, spec, tokens.gather(1, last[:, None])[:, 0])

    def store(self, state: CycleState, pending: PendingTokens, num_columns: int) -> None:
        """See :class:`Drafter`; no mask is run."""
        # One row of output, which nobody reads: some layers do not take an empty selection.
        run_over_tokens(self, state, pending, self.arange[:1], num_columns)

    def prefill(self, batch: PromptBatch, spec: CandidateSpec) -> tuple[torch.Tensor, ...]:
        """See :class:`Drafter`; masks follow in a window of their own, once the prompt's entries are
        stored."""
        first_depth = run_over_prompts(self, batch).lm_head_input  # [n, H]
        if spec.steps == 1 or not len(batch.last):
            return self.make_state(first_depth, spec._replace(steps=1), batch.roots)

        # Masks after each prompt that ends.
        which = batch.requests_of_last()
        page_tables = batch.page_tables[which]
        stops = to_device(batch.stops, which.device)[which]
        num_columns = max(batch.stops) + spec.steps
        return self._state_after(first_depth, page_tables, stops, batch.roots, spec, num_columns)

    def prefill_padded(self, batch: PaddedPromptBatch, spec: CandidateSpec) -> tuple[torch.Tensor, ...]:
        """See :class:`Drafter`; masks follow in a window of their own."""
        first_depth = run_over_padded_prompts(self, batch).lm_head_input  # [R, H]
        if spec.steps == 1:
            return self.make_state(first_depth, spec, batch.roots)
        return self._state_after(
            first_depth, batch.page_tables, batch.stops, batch.roots, spec, batch.num_columns
        )

    def _state_after(
        self,
        first_depth: torch.Tensor,
        page_tables: torch.Tensor,
        stops: torch.Tensor,
        roots: torch.Tensor,
        spec: CandidateSpec,
        num_columns: int,
    ) -> tuple[torch.Tensor, ...]:
        """Run masks after n prompts, and make the draft states.

        Args:
            first_depth: ``[n, H]``, input of the output layer at the last row of each prompt.
            page_tables: int64 ``[n, P]``.
            stops: int64 ``[n]``, the position after that row.
            roots: int64 ``[n]``, the token after that row.
            num_columns: bound on the keys that a mask attends to.
        """
        no_inputs = first_depth.new_empty(0, self.masks[0].shape[1])
        no_residuals = first_depth.new_empty(0, self.masks[1].shape[1])
        masks = self._window(
            (no_inputs, no_residuals), page_tables, stops, torch.zeros_like(stops), spec.steps, num_columns
        )
        rows = torch.cat((first_depth[:, None], masks.view(len(stops), spec.steps - 1, -1)), 1)
        return self.make_state(rows.flatten(0, 1), spec, roots)

    def _window(
        self,
        emitted: tuple[torch.Tensor, torch.Tensor],
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        counts: torch.Tensor,
        num_depths: int,
        num_columns: int,
    ) -> torch.Tensor:
        """Run emitted rows and masks after position ``seq_lens [B]``.

        Args:
            emitted: inputs of attention and residuals of ``[B * M]`` rows, M may be 0.
            counts: int64 ``[B]``, valid rows of each request.
            num_depths: D.

        Returns:
            Input of the output layer at the last emitted row and at all masks, ``[B * D, H]``; where no row
            is emitted at the masks only, ``[B * (D - 1), H]``.
        """
        b = len(seq_lens)
        num_masks = num_depths - 1
        length = len(emitted[0]) // b
        size = length + num_masks

        # Emitted rows, then masks: inputs of attention, and residuals.
        inputs = [
            torch.cat((rows.view(b, length, rows.shape[1]), mask.expand(b, num_masks, -1)), 1).flatten(0, 1)
            for rows, mask in zip(emitted, self.masks, strict=True)
        ]
        first_offset = 1 - self.model.first_position
        emitted_offsets = self.arange[:length].expand(b, length)
        offsets = torch.cat((emitted_offsets, counts[:, None] + self.arange[:num_masks]), 1)
        rope_positions = (seq_lens[:, None] + first_offset + offsets).view(-1)

        # Bit j is row j: a mask sees the valid rows, and the masks up to itself.
        valid = (1 << counts[:, None]) - 1
        bits = torch.cat(
            (
                self.chain_bits[:length].expand(b, length),
                valid | (self.chain_bits[:num_masks] << length),
            ),
            1,
        )
        attend = self.kv.window_attend(page_table, seq_lens + 1, bits, size, num_columns)

        # The rows that draft: the last emitted one, if there is any, and the masks.
        drafting = self.arange[length:size].expand(b, num_masks)
        if length:
            drafting = torch.cat((counts[:, None] - 1, drafting), 1)
        output_rows = (drafting + size * self.arange[:b, None]).view(-1)
        out = self.head.step((inputs[0], inputs[1]), rope_positions, attend, output_rows=output_rows)
        return out.lm_head_input


class SampledMaskedDrafter(SampledOnePassDrafter, MaskedDrafter):
    """Sampled chains of a head whose later steps are masks."""
