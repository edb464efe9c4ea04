"""Drafters that make the candidates of all depths during draft-extend, so that a proposal only selects.

P-EAGLE, DFlash, DSpark, and heads of several MTP modules. EAGLE-3 is
:mod:`eagle_kit.drafts.base.autoregressive`.

Legend: B requests, D depths, K candidates of each, S steps of a shape, H hidden, P candidates of the depth
before that scores depend on (K, or 1 where depths are independent).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import MAX_WINDOW, SpecShape
from eagle_kit.drafts.base.cycle_state import CycleState
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.drafts.base.drafter import CandidateSpec, Drafter
from eagle_kit.drafts.dspark.roll_out import DraftLogits, roll_out
from eagle_kit.models.blocks.markov import MarkovHead
from eagle_kit.ops.best_first import best_first
from eagle_kit.ops.sampling import SamplingBatch
from eagle_kit.ops.tree_build import chain_build
from eagle_kit.verify.proposal import Deterministic, DraftOutput


class DepthCandidates(NamedTuple):
    """Result of draft-extend: the candidates of all depths, best first.

    Attributes:
        tokens: int64 ``[B, D, K]``.
        scores: fp32 ``[B, D, P, K]``, their log-probabilities given each candidate of the depth before; 0 if
            K is 1, because a chain does not need them.
        survival: fp32 ``[B, D]``, the probability that the chain of the best candidates is accepted up to
            each depth. ``[B, 0]`` if it is not needed, or the head does not predict acceptance.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    survival: torch.Tensor


class OnePassDrafter(Drafter):
    """Drafter whose draft states are :class:`DepthCandidates`, or begin with their fields."""

    has_spec_by_size = True
    pad_values: tuple[float, ...] = (0, float("-inf"), 0)
    """Values that pad each field of a draft state to more candidates: a token, its score, its survival."""

    @classmethod
    def most_steps(cls, model: DraftModel) -> int:
        """See :class:`Drafter`."""
        assert model.head is not None
        return min(MAX_WINDOW // 2 - 1, model.head.most_steps or MAX_WINDOW)

    @classmethod
    def logits_bytes(cls, model: DraftModel, batch_size: int, spec: CandidateSpec) -> int:
        """See :class:`Drafter`: logits of all depths.

        Where depths are rolled out there are three more copies of a depth's logits after K candidates: the
        correction, the sum, and the rest of the depth before.
        """
        of_one_depth = super().logits_bytes(model, batch_size, spec)
        of_depths = spec.steps * of_one_depth
        head = model.head
        if head is None or (head.markov is None and not (spec.needs_confidence and head.predicts_confidence)):
            return of_depths
        return of_depths + 3 * spec.topk * of_one_depth

    @classmethod
    def check_shape(cls, model: DraftModel, shape: SpecShape) -> None:
        """See :class:`Drafter`."""
        super().check_shape(model, shape)
        most = cls.most_steps(model)
        if shape.steps > most:
            raise UserError(
                f"The shape {shape} was given for a draft of all steps in one pass, at most {most}.",
                f"Use fewer steps, such as {SpecShape(most, 1, most + 1)}.",
            )

    @classmethod
    def default_shape(cls, model: DraftModel, model_type: str) -> SpecShape:
        """See :class:`Drafter`: a chain of the deepest draft."""
        steps = cls.most_steps(model)
        return SpecShape(steps, 1, steps + 1)

    @classmethod
    def candidate_spec(cls, shapes: Sequence[SpecShape], *, needs_confidence: bool = False) -> CandidateSpec:
        """See :class:`Drafter`."""
        spec = super().candidate_spec(shapes, needs_confidence=needs_confidence)
        return spec._replace(steps=max(1, *(shape.steps for shape in shapes)))

    # Draft states.

    def pad_candidates(
        self, made: tuple[torch.Tensor, ...], stored: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """See :class:`Drafter`.

        The padding has the lowest scores, so it is last in every tree. It is verified only where a window has
        room, in the first cycle after a larger batch.
        """
        padded = []
        for field, stored_field, value in zip(made, stored, self.pad_values, strict=True):
            # Missing candidates of each dimension but the first; ``pad`` takes the last dimension first.
            num_missing = [b - a for a, b in zip(field.shape[1:], stored_field.shape[1:], strict=True)]
            if any(num_missing):
                sides = []
                for count in reversed(num_missing):
                    sides += [0, count]
                field = pad(field, sides, value=value)
            padded.append(field)
        return type(made)(*padded)

    def empty_state(self, count: int, spec: CandidateSpec) -> tuple[torch.Tensor, ...]:
        """See :class:`Drafter`."""
        return self.empty_candidates(count, spec)

    def empty_candidates(self, count: int, spec: CandidateSpec) -> DepthCandidates:
        """Make the candidates of ``count`` requests that have not been prefilled."""
        steps, topk, _ = spec
        device = self.model.device
        tokens = torch.zeros(count, steps, topk, dtype=torch.int64, device=device)
        scores = torch.zeros(count, steps, self.num_parent_candidates(spec), topk, device=device)
        survival = torch.zeros(count, self.num_confidence_depths(spec), device=device)
        return DepthCandidates(tokens, scores, survival)

    def num_confidence_depths(self, spec: CandidateSpec) -> int:
        """Return the number of depths whose acceptance the head predicts; 0 if that is not needed."""
        head = self.model.head
        if head is None or not (spec.needs_confidence and head.predicts_confidence):
            return 0
        return spec.steps

    @property
    def markov(self) -> MarkovHead | None:
        """The head's Markov head, which corrects logits by the token before; None without one."""
        return None if self.model.head is None else self.model.head.markov

    def num_parent_candidates(self, spec: CandidateSpec) -> int:
        """Return P: candidates of the depth before that the scores depend on."""
        return spec.topk if self.markov is not None or self.num_confidence_depths(spec) else 1

    def make_state(
        self, lm_head_input: torch.Tensor, spec: CandidateSpec, roots: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Make the draft state after the roots.

        Args:
            lm_head_input: ``[B * D, H]``, input of the output layer at the rows of all depths.
            roots: int64 ``[B]``, the last emitted tokens.
        """
        # Depths that depend on the token before are rolled out, one after the other.
        if self.markov is not None or self.num_confidence_depths(spec):
            logits = DraftLogits(self.model, lm_head_input.unflatten(0, (-1, spec.steps)))
            return DepthCandidates(
                *roll_out(logits, roots, spec.topk, needs_confidence=spec.needs_confidence)
            )

        # Independent depths.
        tokens, scores = self.model.best_tokens(lm_head_input, spec.topk)
        tokens = tokens.view(-1, spec.steps, spec.topk)
        scores = scores.view(-1, spec.steps, 1, spec.topk)
        return DepthCandidates(tokens, scores, scores.new_zeros(len(tokens), 0))

    def confidence(self, state: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """See :class:`Drafter`; of all depths where the head predicts its confidences."""
        if isinstance(state, DepthCandidates) and state.survival.shape[1]:
            return state.survival
        scores = state[1]
        return scores[:, 0, 0, 0].exp() if scores.shape[3] > 1 else None

    # The draft.

    def propose(
        self,
        state: CycleState,
        shape: SpecShape,
        num_columns: int,
        sampling: SamplingBatch | None = None,
    ) -> DraftOutput:
        """Return the chain of the best candidates, or the tree of the most likely paths through them.

        Args:
            shape: no deeper or wider than the candidates of the state.
        """
        assert state.draft is not None
        tokens = state.draft[0]
        steps, topk, _ = shape
        assert steps <= tokens.shape[1] and topk <= tokens.shape[2]
        if topk == 1:
            tree = chain_build(state.roots, tokens[:, :steps, 0])
        else:
            scores = state.draft[1][:, :steps, :topk, :topk]
            tree = best_first(state.roots, tokens[:, :steps, :topk], scores, shape)
        return DraftOutput(tree, Deterministic())
