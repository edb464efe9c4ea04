"""Sampled chains of drafts that are made in one pass (P-EAGLE, DFlash, DSpark).

The rows of all depths are ready when a cycle proposes. Each depth's token is then sampled from the draft's
distribution of that depth, which is the q of the proposal. A Markov head corrects it by the token sampled
before. Without one the depths are sampled independently, so few chains are accepted far (published: 1.16
tokens, where the most likely tokens give 3.0 to 3.5). They are lossless all the same.

Legend: B requests, D depths, S steps, H hidden, V vocabulary.
"""

from typing import NamedTuple

import torch

from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.cycle_state import CycleState
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.drafts.base.drafter import CandidateSpec
from eagle_kit.drafts.base.one_pass import OnePassDrafter
from eagle_kit.drafts.base.sampled import check_chain, draft_distribution, sampled_chain
from eagle_kit.drafts.dspark.roll_out import DraftLogits, roll_out
from eagle_kit.ops.sampling import DRAFT_UNIFORMS, SamplingBatch, sample, window_uniforms
from eagle_kit.verify.proposal import DraftOutput
from eagle_kit.verify.verifiers import BlockVerification, RejectionSampling


class OnePassRows(NamedTuple):
    """Result of draft-extend, from which a chain is sampled later.

    Attributes:
        lm_head_input: ``[B, D, H]``, input of the output layer at the rows of all depths.
        confidence: fp32 ``[B]``, the largest probability of the first token. Heads that predict acceptance
            have ``[B, D]``, the probability that each depth of the greedy chain and all before it are
            accepted. 0 if it is not needed. It depends on the text alone, not on tokens that are drawn.
    """

    lm_head_input: torch.Tensor
    confidence: torch.Tensor


class SampledOnePassDrafter(OnePassDrafter):
    """Chains sampled at each request's temperature and filters; greedy requests get the most likely
    tokens."""

    pad_values = (0, 0)
    verifiers: tuple[type, ...] = (BlockVerification, RejectionSampling)

    @classmethod
    def check_shape(cls, model: DraftModel, shape: SpecShape) -> None:
        """See :class:`~eagle_kit.drafts.base.drafter.Drafter`."""
        super().check_shape(model, shape)
        check_chain(shape)

    def empty_state(self, count: int, spec: CandidateSpec) -> OnePassRows:
        """See :class:`~eagle_kit.drafts.base.drafter.Drafter`."""
        model = self.model
        rows = torch.zeros(count, spec.steps, model.feature_size, dtype=model.dtype, device=model.device)
        return OnePassRows(rows, self._zero_confidence(count, spec))

    def _zero_confidence(self, count: int, spec: CandidateSpec) -> torch.Tensor:
        """Confidences of ``count`` requests where they are not needed."""
        num_depths = self.num_confidence_depths(spec)
        return torch.zeros((count, num_depths) if num_depths else (count,), device=self.model.device)

    def make_state(
        self, lm_head_input: torch.Tensor, spec: CandidateSpec, roots: torch.Tensor
    ) -> OnePassRows:
        """See :class:`~eagle_kit.drafts.base.one_pass.OnePassDrafter`."""
        rows = lm_head_input.unflatten(0, (-1, spec.steps))
        confidence = self._zero_confidence(len(rows), spec)
        if self.num_confidence_depths(spec):
            confidence = roll_out(DraftLogits(self.model, rows), roots, 1, needs_confidence=True).survival
        elif spec.needs_confidence:
            first = DraftLogits(self.model, rows[:, :1]).after(0, roots[:, None])
            confidence = first[:, 0].softmax(-1).amax(-1)
        return OnePassRows(rows, confidence)

    def confidence(self, state: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """See :class:`~eagle_kit.drafts.base.drafter.Drafter`."""
        assert isinstance(state, OnePassRows)
        return state.confidence

    def propose(
        self,
        state: CycleState,
        shape: SpecShape,
        num_columns: int,
        sampling: SamplingBatch | None = None,
    ) -> DraftOutput:
        """Sample a chain after the roots; greedy for all of them without ``sampling``."""
        assert isinstance(state.draft, OnePassRows) and shape.topk == 1
        uniforms = None
        if sampling is not None:
            uniforms = window_uniforms(sampling.seeds, state.seq_lens, shape.steps, DRAFT_UNIFORMS)

        draft_logits = DraftLogits(self.model, state.draft.lm_head_input[:, : shape.steps])
        drafted: list[torch.Tensor] = []
        distributions: list[torch.Tensor] = []
        before = state.roots
        for step in range(shape.steps):
            logits = draft_logits.after(step, before[:, None])[:, 0]
            if sampling is None or uniforms is None:
                before = self.model.to_target(logits.argmax(-1))
            else:
                distributions.append(draft_distribution(self, logits, sampling))
                before = sample(distributions[-1], uniforms[:, step])
            drafted.append(before)
        return sampled_chain(state.roots, drafted, distributions)
