"""Drafting all steps in one pass over masks (P-EAGLE, arXiv 2602.01469), during draft-extend.

Legend: B requests, M emitted rows of a window, D depths, K candidates of each, H hidden, L tokens in the
target's pool.

The window of draft-extend has the M emitted tokens and, behind them, D - 1 masks. Row n, the last emitted
one, drafts the first depth, and mask j the one j further: it has the position n + j, and attends to the rows
up to n and to the masks up to itself. Entries of emitted tokens are committed, those of masks stay in the
scratch. The candidates of all depths are then ready.
"""

from typing import cast

import torch

from eagle_kit.core.shape import MAX_WINDOW, SpecShape
from eagle_kit.drafts.base.cycle_state import CycleState
from eagle_kit.drafts.base.draft_model import DraftModel, HeadDraftModel
from eagle_kit.drafts.base.drafter import CandidateSpec, PendingTokens, PromptBatch
from eagle_kit.drafts.base.ready import ReadyDrafter
from eagle_kit.drafts.p_eagle.head import PEagleHead
from eagle_kit.kv.store import PoolLayout
from eagle_kit.ops.transfer import to_device


class MaskedDrafter(ReadyDrafter):
    """A head whose later steps are masks."""

    model: HeadDraftModel

    def __init__(self, model: HeadDraftModel, vocab_size: int, layout: PoolLayout) -> None:
        super().__init__(model, vocab_size, layout)
        self.head = cast(PEagleHead, model.head)  # as its step form says
        with torch.no_grad():
            self.masks = self.head.mask_inputs()

    @classmethod
    def most_steps(cls, model: DraftModel) -> int:
        """See :class:`ReadyDrafter`."""
        return MAX_WINDOW // 2

    @classmethod
    def default_shape(cls, model: DraftModel, model_type: str) -> SpecShape:
        """See :class:`Drafter`."""
        return SpecShape(5, 1, 6)

    def num_appended(self, spec: CandidateSpec) -> int:
        """See :class:`Drafter`."""
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
        states, tokens, num_committed = pending
        b, length = tokens.shape
        embedding = self.head.embedding(self.model.target.embed_tokens.weight)
        features = self.model.features(states.flatten(0, 1))
        inputs = self.head.midlayer.inputs_of(features, None, tokens.reshape(-1), embedding)
        read = self._window(inputs, state.page_table, state.seq_lens, last + 1, spec.steps, num_columns)
        nodes = self.numbers[:length].expand(b, length)
        self.kv.commit_window(state.page_table, nodes, state.seq_lens + 1, num_committed)
        return self.drafted(read, spec, tokens.gather(1, last[:, None])[:, 0])

    def prefill(self, batch: PromptBatch, spec: CandidateSpec) -> tuple[torch.Tensor, ...]:
        """See :class:`Drafter`; masks follow in a window of their own, once the prompt's entries are
        stored."""
        read = self._read_prompt(batch).read
        if spec.steps == 1 or not len(batch.last):
            return self.drafted(read, spec._replace(steps=1), batch.roots)

        # Masks behind each prompt that ends.
        which = batch.requests_of_last()
        nothing = read.new_empty(0, self.masks[0].shape[1]), read.new_empty(0, self.masks[1].shape[1])
        masks = self._window(
            nothing,
            batch.page_tables[which],
            to_device(batch.stops, which.device)[which],
            torch.zeros_like(which),
            spec.steps,
            max(batch.stops) + spec.steps,
        )
        rows = torch.cat((read[:, None], masks.view(len(which), spec.steps - 1, -1)), 1)
        return self.drafted(rows.flatten(0, 1), spec, batch.roots)

    def _window(
        self,
        emitted: tuple[torch.Tensor, torch.Tensor],
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        counts: torch.Tensor,
        drafted: int,
        num_columns: int,
    ) -> torch.Tensor:
        """Run emitted rows and masks behind slot ``seq_lens [B]`` -> what the output layer reads of the last
        emitted row and of all masks, ``[B * D, H]``; where no row is emitted of the masks only, ``[B * (D -
        1), H]``.

        Args:
            emitted: inputs of attention and residuals of ``[B * M]`` rows, M may be 0.
            counts: int64 ``[B]``, valid rows of each request.
            drafted: D.
        """
        b, num_masks = len(seq_lens), drafted - 1
        length = len(emitted[0]) // b
        size, first = length + num_masks, 1 - self.model.first_slot
        inputs = [
            torch.cat((rows.view(b, length, rows.shape[1]), mask.expand(b, num_masks, -1)), 1).flatten(0, 1)
            for rows, mask in zip(emitted, self.masks, strict=True)
        ]
        offsets = torch.cat(
            (self.numbers[:length].expand(b, length), counts[:, None] + self.numbers[:num_masks]), 1
        )
        positions = (seq_lens[:, None] + first + offsets).view(-1)
        # Bit j is row j: a mask sees the valid rows, and the masks behind them up to itself.
        valid = (1 << counts[:, None]) - 1
        bits = torch.cat(
            (
                self.chain_bits[:length].expand(b, length),
                valid | (self.chain_bits[:num_masks] << length),
            ),
            1,
        )
        attend = self.kv.window_attend(page_table, seq_lens + 1, bits, size, num_columns)
        own = self.numbers[length:size].expand(b, num_masks)
        wanted = own if not length else torch.cat((counts[:, None] - 1, own), 1)
        wanted = (wanted + size * self.numbers[:b, None]).view(-1)
        return self.head.step((inputs[0], inputs[1]), positions, attend, wanted=wanted).read
