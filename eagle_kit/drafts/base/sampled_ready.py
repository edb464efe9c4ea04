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
from eagle_kit.drafts.base.ready import ReadyDrafter
from eagle_kit.drafts.base.sampled import check_chain, draft_distribution
from eagle_kit.drafts.dflash.drafter import BlockDrafter
from eagle_kit.drafts.dspark.roll_out import DraftLogits, roll_out
from eagle_kit.drafts.p_eagle.drafter import MaskedDrafter
from eagle_kit.ops.sampling import DRAFT_UNIFORMS, SamplingBatch, sample, window_uniforms
from eagle_kit.ops.tree_build import chain_build
from eagle_kit.verify.proposal import Deterministic, DraftOutput, SampledChain
from eagle_kit.verify.verifiers import BlockVerification, RejectionSampling


class ReadyRows(NamedTuple):
    """Result of draft-extend, from which a chain is sampled later.

    Attributes:
        read: ``[B, D, H]``, input of the output layer at the rows of all depths.
        confidence: fp32 ``[B]``, the largest probability of the first token. Heads that predict acceptance
            have ``[B, D]``, the probability that each depth of the greedy chain and all before it are
            accepted. 0 if it is not read. It depends on the text alone, not on tokens that are drawn.
    """

    read: torch.Tensor
    confidence: torch.Tensor


class SampledReadyDrafter(ReadyDrafter):
    """Chains sampled at each request's temperature and filters; greedy requests get the most likely
    tokens."""

    unlikely = (0, 0)
    verifiers: tuple[type, ...] = (BlockVerification, RejectionSampling)

    @classmethod
    def check_shape(cls, model: DraftModel, shape: SpecShape) -> None:
        """See :class:`~eagle_kit.drafts.base.drafter.Drafter`."""
        super().check_shape(model, shape)
        check_chain(shape)

    def empty_state(self, count: int, spec: CandidateSpec) -> ReadyRows:
        """See :class:`~eagle_kit.drafts.base.drafter.Drafter`."""
        model = self.model
        read = torch.zeros(count, spec.steps, model.feature_size, dtype=model.dtype, device=model.device)
        return ReadyRows(read, self._unasked(count, spec))

    def _unasked(self, count: int, spec: CandidateSpec) -> torch.Tensor:
        num_depths = self.num_confidence_depths(spec)
        return torch.zeros((count, num_depths) if num_depths else (count,), device=self.model.device)

    def drafted(self, read: torch.Tensor, spec: CandidateSpec, roots: torch.Tensor) -> ReadyRows:
        """See :class:`~eagle_kit.drafts.base.ready.ReadyDrafter`."""
        rows = read.unflatten(0, (-1, spec.steps))
        confidence = self._unasked(len(rows), spec)
        if self.num_confidence_depths(spec):
            confidence = roll_out(DraftLogits(self.model, rows), roots, 1, reads_confidence=True).survival
        elif spec.reads_confidence:
            first = DraftLogits(self.model, rows[:, :1]).behind(0, roots[:, None])
            confidence = first[:, 0].softmax(-1).amax(-1)
        return ReadyRows(rows, confidence)

    def confidence(self, state: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """See :class:`~eagle_kit.drafts.base.drafter.Drafter`."""
        assert isinstance(state, ReadyRows)
        return state.confidence

    def propose(
        self,
        state: CycleState,
        shape: SpecShape,
        num_columns: int,
        sampling: SamplingBatch | None = None,
    ) -> DraftOutput:
        """Sample a chain behind the roots; greedy for all of them without ``sampling``."""
        assert isinstance(state.draft, ReadyRows) and shape.topk == 1
        uniforms = None
        if sampling is not None:
            uniforms = window_uniforms(sampling.seeds, state.seq_lens, shape.steps, DRAFT_UNIFORMS)
        rows = DraftLogits(self.model, state.draft.read[:, : shape.steps])
        tokens, distributions = [state.roots], list[torch.Tensor]()
        for step in range(shape.steps):
            logits = rows.behind(step, tokens[-1][:, None])[:, 0]
            if sampling is None or uniforms is None:
                tokens.append(self.model.to_target(logits.argmax(-1)))
                continue
            distributions.append(draft_distribution(self, logits, sampling))
            tokens.append(sample(distributions[-1], uniforms[:, step]))
        tree = chain_build(state.roots, torch.stack(tokens[1:], 1))
        return DraftOutput(
            tree, SampledChain(torch.stack(distributions, 1)) if distributions else Deterministic()
        )


class SampledBlockDrafter(SampledReadyDrafter, BlockDrafter):
    """Sampled chains of a head that drafts blocks."""


class SampledMaskedDrafter(SampledReadyDrafter, MaskedDrafter):
    """Sampled chains of a head whose later steps are masks."""
