"""Draft models as a drafter sees them: draft heads that read a target's states, and whole models.

For an EAGLE-3 head, with the symbols of the paper (arXiv 2503.01840, section 3.1):
:meth:`DraftModel.target_hidden_states` selects the captured states [l; m; h], :meth:`DraftModel.features`
fuses them to g, :meth:`DraftModel.step` computes a from g, or from a of the step before, and
:meth:`DraftModel.logits` is the LM head.

Legend: T rows, M size of the target's states of a token, F size of a feature, H hidden, V / Vd target /
draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.models.blocks.layers import Attend
from eagle_kit.models.cache_specs import CacheSpec
from eagle_kit.models.draft_head import DraftHead, StepForm, StepOutput
from eagle_kit.models.targets.target import Target, TargetOutput
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.backend import uses_triton
from eagle_kit.ops.draft_topk import MAX_TOPK, draft_topk, topk_of_logits
from eagle_kit.ops.linear import Linear


class LMHeadOperands(NamedTuple):
    """Operands of a draft model's last matmul.

    Attributes:
        x: ``[T, H]``.
        weight: ``[Vd, H]``.
        token_map: target id of each draft id, int64 ``[Vd]``; None if they are equal.
    """

    x: torch.Tensor
    weight: torch.Tensor
    token_map: torch.Tensor | None


class StepRows(NamedTuple):
    """Input rows of a draft model's step.

    Attributes:
        features: ``[R, F]``.
        tokens: int64 ``[T]``, the token that each row embeds.
        rope_positions: int64 ``[T]``.
        feature_rows: int64 ``[T]``, index of each row's feature; None if row i reads feature i.
    """

    features: torch.Tensor
    tokens: torch.Tensor
    rope_positions: torch.Tensor
    feature_rows: torch.Tensor | None = None


class DraftModel(ABC):
    """A model that proposes tokens.

    Args:
        output: output layer, ``[V, H]`` or ``[Vd, H]``.
        token_map: target ids int64 ``[Vd]`` that may be proposed (FR-Spec). Only their rows are multiplied.

    Attributes:
        capture: target layers whose inputs are captured.
        first_position: position of the first token of a request that has an entry in the store. 1 if an
            entry is made of its token and the feature of the position before (EAGLE); 0 if it is made of a
            feature alone (DFlash), and for a whole model. See :mod:`eagle_kit.drafts.base.cycle_state`.
        cache: layout of a token's entry in the store.
        variants: attention variant of each layer of the store.
        state_size: M; 0 for a model that reads no states.
        state_dtype: dtype of the target's states.
        feature_size: F; 0 for a model that reads no states.
        num_modules: number of blocks: 1, or one for each step of a draft.
        step_form: what a step reads of the step before.
        is_whole_model: True if every drafted token costs a pass through a model of several layers.
        head: the draft head; None for a whole model.
        correction: output layer of the Markov head that corrects the logits, ``[Vd, r]``; None without one.
        output: output layer, ``[Vd, H]``.
        token_map: target id of each draft id, int64 ``[Vd]``; None if they are equal.
        draft_vocab_size: Vd.
        dtype: dtype of the output layer.
        device: device of the output layer.
    """

    first_position: int
    is_whole_model: ClassVar[bool]
    capture: tuple[int, ...] = ()
    state_size: int = 0
    state_dtype: torch.dtype = torch.float32
    feature_size: int = 0
    num_modules: int = 1
    step_form: StepForm = StepForm.FED_BACK
    head: DraftHead | None = None
    correction: Linear | None = None
    cache: CacheSpec
    variants: Sequence[AttentionVariant]

    def __init__(self, output: Linear, token_map: torch.Tensor | None) -> None:
        self.token_map = None if token_map is None else token_map.to(output.weight.device)
        self.output = self._rows_of(output)
        weight = self.output.weight
        self.draft_vocab_size = weight.shape[0]
        self.dtype = weight.dtype
        self.device = weight.device

    def _rows_of(self, output: Linear) -> Linear:
        """The rows of an output layer whose tokens may be proposed, ``[Vd, H]``."""
        if self.token_map is None:
            return output
        mine = Linear(output.in_features, len(self.token_map), bias=False)
        mine.weight = torch.nn.Parameter(output.weight[self.token_map], requires_grad=False)
        mine.pack()
        return mine

    @abstractmethod
    def target_hidden_states(self, out: TargetOutput, rows: torch.Tensor | None = None) -> torch.Tensor:
        """States ``[T, M]`` of the target that features are made of.

        Args:
            rows: int64 ``[T]``, rows of ``out`` to select; None selects all.
        """

    @abstractmethod
    def features(self, states: torch.Tensor) -> torch.Tensor:
        """Features ``[T, F]`` of step 0, from :meth:`target_hidden_states`."""

    @abstractmethod
    def step(
        self, rows: StepRows, attend: Attend, module: int = 0, output_rows: torch.Tensor | None = None
    ) -> StepOutput:
        """Run one step over rows of features and the tokens after them.

        A token's RoPE position is its position in the request minus :attr:`first_position`.

        Args:
            rows: features, tokens and RoPE positions.
            attend: attention. It stores the rows' keys and values.
            module: index of the block to run, below :attr:`num_modules`.
            output_rows: int64 ``[n]``, rows to return; None returns all.
        """

    def lm_head_operands(self, lm_head_input: torch.Tensor) -> LMHeadOperands:
        """Operands of the matmul of :meth:`logits`, for kernels that do not store logits."""
        return LMHeadOperands(lm_head_input, self.output.weight, self.token_map)

    def logits(self, lm_head_input: torch.Tensor) -> torch.Tensor:
        """Logits ``[T, Vd]`` from a step's :attr:`StepOutput.lm_head_input` ``[T, H]``."""
        return self.output(self.lm_head_operands(lm_head_input).x)

    def best_tokens(self, lm_head_input: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The K most likely tokens of each row, best first.

        Args:
            lm_head_input: :attr:`StepOutput.lm_head_input` ``[T, H]``.
            topk: K.

        Returns:
            Target ids int64 ``[T, K]``, and their log-probabilities fp32 ``[T, K]``. With K = 1 the
            log-probabilities are 0: a chain does not need them.
        """
        if uses_triton("draft_topk", lm_head_input) and topk <= MAX_TOPK:
            x, weight, token_map = self.lm_head_operands(lm_head_input)
            return draft_topk(x, weight, topk, normalized=topk > 1, token_map=token_map)
        draft_ids, scores = topk_of_logits(self.logits(lm_head_input), topk, normalized=topk > 1)
        return self.to_target(draft_ids), scores

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Convert draft ids of any shape to target ids."""
        return draft_ids if self.token_map is None else self.token_map[draft_ids]


class HeadDraftModel(DraftModel):
    """A draft head of any kind, with its target.

    Args:
        head: bound to the target's output layer if it has none of its own.
        target: the model whose states the head reads.
        token_map: see :class:`DraftModel`.

    Raises:
        UserError: a ``token_map`` is given, and the head has a draft vocabulary of its own.
    """

    is_whole_model = False
    head: DraftHead

    def __init__(self, head: DraftHead, target: Target, token_map: torch.Tensor | None = None) -> None:
        if token_map is not None and head.token_map is not None:
            raise UserError("A token map was given, but the head brings its own (d2t).", "Leave the map out.")
        super().__init__(head.bind(target.lm_head).output, token_map)
        self.correction = None if head.markov is None else self._rows_of(head.markov.markov_w2)
        self.head = head
        self.target = target

        # What the head reads of the target.
        self.capture = head.capture
        self.state_size = max(1, len(self.capture)) * target.config.hidden_size
        self.state_dtype = target.embed_tokens.weight.dtype
        self.feature_size = head.config.hidden_size

        # Its steps, and their key-value store.
        self.num_modules = head.config.num_modules
        self.step_form = head.step_form
        self.first_position = head.first_position
        self.cache = head.cache
        self.variants = head.config.variants
        if token_map is None:
            self.token_map = head.token_map

    def target_hidden_states(self, out: TargetOutput, rows: torch.Tensor | None = None) -> torch.Tensor:
        """See :class:`DraftModel`: the captured states, or the final hidden states if none are captured."""
        states = out.aux_hidden_states if self.capture else out.hidden
        if rows is None:
            return states
        return states.index_select(0, rows)  # faster than states[rows] on a CPU

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """See :class:`DraftModel`."""
        none = states[:, :0]
        if self.capture:
            return self.head.features(none, states)
        return self.head.features(states, none)

    def step(
        self, rows: StepRows, attend: Attend, module: int = 0, output_rows: torch.Tensor | None = None
    ) -> StepOutput:
        """See :class:`DraftModel`."""
        embedding = self.head.embedding(self.target.embed_tokens.weight)
        block = self.head.blocks[module]
        inputs = block.gather_inputs(rows.features, rows.feature_rows, rows.tokens, embedding)
        return self.head.step(inputs, rows.rope_positions, attend, module, output_rows)


class StandaloneDraftModel(DraftModel):
    """A small model with the target's tokenizer. It reads no states of the target.

    Its embedding may have another number of rows than the target's, by padding. Ids that only one of the two
    has are never proposed. If the target emits such an id, the draft reads its own last id instead.

    Args:
        model: the small model.
        token_map: see :class:`DraftModel`.
        target_vocab_size: number of rows of the target's embedding; None if it is the same.
    """

    first_position = 0
    is_whole_model = True

    def __init__(
        self, model: Target, token_map: torch.Tensor | None = None, target_vocab_size: int | None = None
    ) -> None:
        # The tokens that both models have.
        own_size = model.config.vocab_size
        target_size = own_size if target_vocab_size is None else target_vocab_size
        self._last_token = own_size - 1 if target_size > own_size else None
        if target_size != own_size:
            token_map = _shared_ids(token_map, min(own_size, target_size))
        super().__init__(model.lm_head, token_map)
        self.state_dtype = self.dtype
        self.model = model
        self.cache = model.config.cache
        self.variants = model.variants

    def target_hidden_states(self, out: TargetOutput, rows: torch.Tensor | None = None) -> torch.Tensor:
        """See :class:`DraftModel`."""
        count = len(out.hidden) if rows is None else len(rows)
        return out.hidden.new_empty(count, 0, dtype=self.dtype)

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """See :class:`DraftModel`."""
        return states

    def step(
        self, rows: StepRows, attend: Attend, module: int = 0, output_rows: torch.Tensor | None = None
    ) -> StepOutput:
        """See :class:`DraftModel`."""
        tokens = rows.tokens
        if self._last_token is not None:
            tokens = tokens.clamp(max=self._last_token)
        hidden = self.model(tokens, rows.rope_positions, attend).hidden  # [T, H]
        if output_rows is not None:
            hidden = hidden.index_select(0, output_rows)  # [n, H]
        return StepOutput(hidden, hidden)

    def lm_head_operands(self, lm_head_input: torch.Tensor) -> LMHeadOperands:
        """See :class:`DraftModel`. A soft cap of the logits is left out, because it keeps their order."""
        scale = self.model.logit_form.scale
        if scale != 1.0:
            lm_head_input = lm_head_input * scale
        return super().lm_head_operands(lm_head_input)

    def logits(self, lm_head_input: torch.Tensor) -> torch.Tensor:
        """See :class:`DraftModel`."""
        logits: torch.Tensor = self.model.logit_form(self.output(lm_head_input))
        return logits


def _shared_ids(token_map: torch.Tensor | None, count: int) -> torch.Tensor:
    """Ids of ``token_map`` below ``count``, or all ids below ``count``."""
    if token_map is None:
        return torch.arange(count)
    shared = token_map[token_map < count]
    if not len(shared):
        raise UserError("The token map names no token that the draft model has.", "Use another token map.")
    return shared
