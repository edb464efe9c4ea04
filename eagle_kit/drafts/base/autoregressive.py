"""Drafter of heads that feed their output back (EAGLE-3, EAGLE-1) and of whole small models.

A step of the draft is one forward over the nodes of one depth. Chains (K = 1) take the best token of every
step; trees (K > 1) are EAGLE-2's (arXiv 2406.16858): expansion, the K best nodes of a depth, then reranking
over all candidates (:mod:`eagle_kit.ops.tree_build`). Depth 1 is made by draft-extend, out of the forward
over the emitted tokens, so S steps are S - 1 forwards in :meth:`AutoregressiveDrafter.propose`.

The table of :mod:`eagle_kit.drafts.base.cycle_state` shows where the entries of draft and target lie. Those
in the draft's pool are computed from the target's states only (in a whole model from committed tokens only);
those of drafted nodes lie in the scratch, for one cycle.

Legend: B requests, K top-k, S steps, N nodes, F size of a feature.
"""

from typing import NamedTuple

import torch

from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.cycle_state import CycleState
from eagle_kit.drafts.base.draft_forwards import (
    run_over_padded_prompts,
    run_over_prompts,
    run_over_tokens,
)
from eagle_kit.drafts.base.draft_model import StepRows
from eagle_kit.drafts.base.drafter import (
    CandidateSpec,
    Drafter,
    PaddedPromptBatch,
    PendingTokens,
    PromptBatch,
)
from eagle_kit.models.draft_head import StepOutput
from eagle_kit.ops.sampling import SamplingBatch
from eagle_kit.ops.tree_build import Candidates, Tree, chain_build, grow_beam, start_beam, tree_build
from eagle_kit.verify.proposal import Deterministic, DraftOutput


class DraftState(NamedTuple):
    """Draft state of an autoregressive drafter, the result of draft-extend: the candidates of depth 1.

    Attributes:
        tokens: int64 ``[B, K]``, the candidates as target ids.
        scores: fp32 ``[B, K]``, their log-probabilities; 0 if K is 1.
        features: ``[B, F]``, the features that the next step reads.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    features: torch.Tensor


class AutoregressiveDrafter(Drafter):
    """Drafter whose every step reads the output of the step before: chains, and EAGLE-2's trees."""

    has_padded_prefill = True

    def empty_state(self, count: int, spec: CandidateSpec) -> tuple[torch.Tensor, ...]:
        """See :class:`Drafter`."""
        device = self.model.device
        return DraftState(
            torch.zeros(count, spec.topk, dtype=torch.int64, device=device),
            torch.zeros(count, spec.topk, device=device),
            torch.zeros(count, self.model.feature_size, dtype=self.model.dtype, device=device),
        )

    def confidence(self, state: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """See :class:`Drafter`."""
        assert isinstance(state, DraftState)
        return state.scores[:, 0].exp() if state.scores.shape[1] > 1 else None

    # The draft.

    def propose(
        self,
        state: CycleState,
        shape: SpecShape,
        num_columns: int,
        sampling: SamplingBatch | None = None,
    ) -> DraftOutput:
        """Grow a draft after the roots. Of a tree the best N - 1 candidates are the window.

        See :class:`Drafter` for the arguments; the draft does not depend on ``sampling``.
        """
        if shape.topk == 1:
            tree = self._grow_chain(state, shape, num_columns)
        else:
            candidates = self.grow_candidates(state, shape, num_columns)
            tree = tree_build(state.roots, candidates.tokens, candidates.scores, candidates.parents, shape)
        return DraftOutput(tree, Deterministic())

    def grow_candidates(self, state: CycleState, shape: SpecShape, num_columns: int) -> Candidates:
        """Expand a tree after the roots, K nodes a step (EAGLE-2, section 4.1), and return all candidates."""
        draft = state.draft
        seq_lens = state.seq_lens
        assert isinstance(draft, DraftState)
        b = len(seq_lens)
        topk = shape.topk

        # Depth 1 is in the draft state.
        beam, candidates = start_beam(draft.tokens[:, :topk], draft.scores[:, :topk], shape)
        features = draft.features

        # The draft's pool ends with the root's entry. The nodes of depth d have the position seq_lens + d.
        prefix_lens = seq_lens + 1
        first = self.model.first_position
        offsets = self.arange[1 - first : shape.steps - first, None, None]
        rope_positions = seq_lens[:, None] + offsets.expand(-1, b, topk)  # [S - 1, B, K]

        # A step runs the draft over the beam, and selects the next beam from K candidates of each node.
        for step in range(1, shape.steps):
            attend = self.kv.window_attend(
                state.page_table, prefix_lens, beam.ancestors, step * topk, num_columns
            )
            tokens = beam.tokens.reshape(-1)  # [B * K]
            out = self.model.step(
                StepRows(features, tokens, rope_positions[step - 1].view(-1), beam.rows), attend
            )
            next_tokens, next_scores = self.model.best_tokens(out.lm_head_input, topk)  # [B * K, K] each
            beam = grow_beam(beam, candidates, next_tokens, next_scores, step)
            features = self._next_features(out)
        return candidates

    def _grow_chain(self, state: CycleState, shape: SpecShape, num_columns: int) -> Tree:
        """Take the best token of every step; a chain needs no log-probabilities."""
        draft = state.draft
        seq_lens = state.seq_lens
        assert isinstance(draft, DraftState)
        tokens = draft.tokens[:, :1]
        features = draft.features
        drafted = [tokens]
        prefix_lens = seq_lens + 1
        rope_positions = self._rope_positions(seq_lens, shape.steps)
        for step in range(1, shape.steps):
            bits = self.chain_bits[step - 1 : step].expand(tokens.shape[0], 1)
            attend = self.kv.window_attend(state.page_table, prefix_lens, bits, step, num_columns)
            out = self.model.step(StepRows(features, tokens[:, 0], rope_positions[step]), attend)
            features = self._next_features(out)
            tokens, _ = self.model.best_tokens(out.lm_head_input, 1)
            drafted.append(tokens)
        return chain_build(state.roots, torch.cat(drafted, 1))

    def _rope_positions(self, seq_lens: torch.Tensor, steps: int) -> dict[int, torch.Tensor]:
        """Return the RoPE positions int64 ``[B]`` of the tokens of a chain, by depth from 1 to S - 1."""
        if steps == 1:
            return {}
        first = self.model.first_position
        rope_positions = seq_lens + self.arange[1 - first : steps - first, None]
        return dict(enumerate(rope_positions.unbind(), start=1))

    # Entries of emitted tokens and of prompts.

    def extend(
        self,
        state: CycleState,
        pending: PendingTokens,
        last: torch.Tensor,
        spec: CandidateSpec,
        num_columns: int,
    ) -> tuple[torch.Tensor, ...]:
        """See :class:`Drafter`."""
        b, length = pending.tokens.shape
        last_rows = torch.add(last, self.arange[:b], alpha=length)
        return self._make_state(run_over_tokens(self, state, pending, last_rows, num_columns), spec)

    def store(self, state: CycleState, pending: PendingTokens, num_columns: int) -> None:
        """See :class:`Drafter`."""
        # One row of output, which nobody reads: some layers do not take an empty selection.
        run_over_tokens(self, state, pending, self.arange[:1], num_columns)

    def prefill(self, batch: PromptBatch, spec: CandidateSpec) -> tuple[torch.Tensor, ...]:
        """See :class:`Drafter`."""
        return self._make_state(run_over_prompts(self, batch), spec)

    def prefill_padded(self, batch: PaddedPromptBatch, spec: CandidateSpec) -> tuple[torch.Tensor, ...]:
        """See :class:`Drafter`."""
        return self._make_state(run_over_padded_prompts(self, batch), spec)

    def _make_state(self, out: StepOutput, spec: CandidateSpec) -> tuple[torch.Tensor, ...]:
        """Make draft states of the draft's output at the last token of each request."""
        tokens, scores = self.model.best_tokens(out.lm_head_input, spec.topk)
        return DraftState(tokens, scores, self._next_features(out))

    def _next_features(self, out: StepOutput) -> torch.Tensor:
        """Return the features that the next step reads; a whole model reads none."""
        return out.fed_back[:, : self.model.feature_size]
