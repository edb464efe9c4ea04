"""Sampled drafts: a chain of tokens from the draft's own distribution q, which the verifier needs.

The first token of a deterministic top-1 chain is accepted with probability p(argmax q), that of a sampled one
with sum min(p, q): the higher the temperature, the more the second is worth.

Legend: B requests, S steps, V / Vd target / draft vocabulary.
"""

from typing import NamedTuple

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.autoregressive import AutoregressiveDrafter
from eagle_kit.drafts.base.cycle_state import CycleState
from eagle_kit.drafts.base.draft_model import DraftModel, StepRows
from eagle_kit.drafts.base.drafter import CandidateSpec, Drafter
from eagle_kit.models.draft_head import StepOutput
from eagle_kit.ops.sampling import DRAFT_UNIFORMS, SamplingBatch, sample, target_probs, window_uniforms
from eagle_kit.ops.tree_build import chain_build
from eagle_kit.verify.proposal import Deterministic, DraftOutput, Proposal, SampledChain
from eagle_kit.verify.verifiers import BlockVerification, RejectionSampling


class SampledDraftState(NamedTuple):
    """Result of draft-extend.

    Attributes:
        logits: fp32 ``[B, Vd]``, of depth 1.
        features: ``[B, F]``, the features that the next step reads.
    """

    logits: torch.Tensor
    features: torch.Tensor


class SampledDrafter(AutoregressiveDrafter):
    """Chains sampled from the draft at each request's temperature and filters; greedy requests get the most
    likely tokens."""

    verifiers: tuple[type, ...] = (BlockVerification, RejectionSampling)

    @classmethod
    def check_shape(cls, model: DraftModel, shape: SpecShape) -> None:
        """See :class:`Drafter`."""
        super().check_shape(model, shape)
        check_chain(shape)

    def empty_state(self, count: int, spec: CandidateSpec) -> SampledDraftState:
        """See :class:`Drafter`."""
        model = self.model
        logits = torch.zeros(count, model.draft_vocab_size, device=model.device)
        features = torch.zeros(count, model.feature_size, dtype=model.dtype, device=model.device)
        return SampledDraftState(logits, features)

    def confidence(self, state: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """See :class:`Drafter`."""
        assert isinstance(state, SampledDraftState)
        return state.logits.softmax(-1).amax(-1)

    def propose(
        self,
        state: CycleState,
        shape: SpecShape,
        num_columns: int,
        sampling: SamplingBatch | None = None,
    ) -> DraftOutput:
        """Sample a chain after the roots; greedy for all of them without ``sampling``."""
        assert isinstance(state.draft, SampledDraftState) and shape.topk == 1
        logits, features = state.draft
        roots = state.roots
        seq_lens = state.seq_lens
        uniforms = None
        if sampling is not None:
            uniforms = window_uniforms(sampling.seeds, seq_lens, shape.steps, DRAFT_UNIFORMS)

        drafted: list[torch.Tensor] = []
        distributions: list[torch.Tensor] = []
        prefix_lens = seq_lens + 1
        rope_positions = self._rope_positions(seq_lens, shape.steps)
        for step in range(shape.steps):
            # Logits of depth 1 are in the draft state; each later depth is a forward over the last token.
            if step:
                bits = self.chain_bits[step - 1 : step].expand(roots.shape[0], 1)
                attend = self.kv.window_attend(state.page_table, prefix_lens, bits, step, num_columns)
                out = self.model.step(StepRows(features, drafted[-1], rope_positions[step]), attend)
                logits = self.model.logits(out.lm_head_input).float()
                features = self._next_features(out)

            # The token of this depth.
            if sampling is None or uniforms is None:
                drafted.append(self.model.to_target(logits.argmax(-1)))
                continue
            distributions.append(draft_distribution(self, logits, sampling))
            drafted.append(sample(distributions[-1], uniforms[:, step]))
        return sampled_chain(roots, drafted, distributions)

    def _make_state(self, out: StepOutput, spec: CandidateSpec) -> SampledDraftState:
        """See :class:`AutoregressiveDrafter`."""
        return SampledDraftState(self.model.logits(out.lm_head_input).float(), self._next_features(out))


def sampled_chain(
    roots: torch.Tensor, drafted: list[torch.Tensor], distributions: list[torch.Tensor]
) -> DraftOutput:
    """Make the proposal of a chain.

    Args:
        roots: int64 ``[B]``.
        drafted: S tensors int64 ``[B]``, target ids.
        distributions: S tensors fp32 ``[B, V]`` that the tokens were sampled from; none of a greedy chain.
    """
    tree = chain_build(roots, torch.stack(drafted, 1))
    proposal: Proposal = Deterministic()
    if distributions:
        proposal = SampledChain(torch.stack(distributions, 1))
    return DraftOutput(tree, proposal)


def draft_distribution(drafter: Drafter, logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    """Draft distribution over the target's vocabulary, fp32 ``[B, V]``, with the request's own filters, of
    ``logits [B, Vd]``.

    Penalties and bias are left to the target: q may be any distribution, and theirs change along the path.
    """
    everything = logits.new_full((logits.shape[0], drafter.vocab_size), float("-inf"))
    ids = drafter.model.to_target(torch.arange(logits.shape[1], device=logits.device))
    everything[:, ids] = logits
    return target_probs(everything[:, None], sampling)[:, 0]


def check_chain(shape: SpecShape) -> None:
    """Raise UserError for a tree, which sampled drafts are not."""
    if shape.topk > 1:
        raise UserError(
            f"The shape {shape} is a tree, and drafts are to be sampled.",
            f"Use a chain such as {shape.steps},1,{shape.steps + 1}, or do not sample drafts.",
        )
