"""Draft models: the contract with a drafter, heads behind a target, and whole models.

Legend: T rows, M numbers of the target's states, F features, H hidden, Vd draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.models.blocks.layers import Attend
from eagle_kit.models.config_parts import CacheSpec
from eagle_kit.models.draft_head import DraftHead, StepForm, StepOutput
from eagle_kit.models.targets.target import Target, TargetOutput
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.linear import Linear


class Readout(NamedTuple):
    """The last matmul of a draft: ``states [T, H]`` times ``weight [Vd, H]``; ``token_map`` int64 ``[Vd]``,
    the target id of each draft id, None when they are the same."""

    states: torch.Tensor
    weight: torch.Tensor
    token_map: torch.Tensor | None


class StepRows(NamedTuple):
    """Rows of a draft's forward: ``tokens`` int64 ``[T]`` at ``positions`` int64 ``[T]``, each behind a row
    of ``features [R, F]``: row ``feature_rows[i]`` (int64 ``[T]``), or row i where that is None."""

    features: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    feature_rows: torch.Tensor | None = None


class DraftModel(ABC):
    """A model that proposes tokens.

    Args:
        output: its last matmul, ``[V, H]`` or ``[Vd, H]``.
        token_map: target ids int64 ``[Vd]`` that it may propose (FR-Spec): only their rows are multiplied.

    Attributes:
        capture: target layers whose inputs it reads.
        first_slot: first slot of its store that it fills: 1 where an entry is made of a feature and the token
            after it (EAGLE), 0 where it is made of a feature alone (DFlash), and for a whole model.
        cache: entry of a token in its store.
        variants: how each layer of the store attends.
        state_size: M, of what it reads of the target for a token, of ``state_dtype``; 0 for a model that
            reads no states.
        feature_size: F; 0 for a model that reads no states.
        num_modules: 1, or one for every step of a draft.
        step_form: how the steps of a draft come about.
        is_whole_model: every drafted token costs a pass through a model of several layers.
        head: the draft head; None of a whole model.
        correction: last matmul of the Markov head that corrects its logits, ``[Vd, r]``; None without one.
        token_map: the target id of each draft id, int64 ``[Vd]``; None when they are the same.
    """

    first_slot: int
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
        self.draft_vocab_size, self.dtype, self.device = weight.shape[0], weight.dtype, weight.device

    def _rows_of(self, output: Linear) -> Linear:
        """Rows of an output layer that may be proposed."""
        if self.token_map is None:
            return output
        mine = Linear(output.in_features, len(self.token_map), bias=False)
        mine.weight = torch.nn.Parameter(output.weight[self.token_map], requires_grad=False)
        mine.pack()
        return mine

    @abstractmethod
    def states(self, out: TargetOutput, rows: torch.Tensor | None = None) -> torch.Tensor:
        """States ``[T, M]`` that features are made of, of all of the target's output or of ``rows`` int64
        ``[T]``."""

    @abstractmethod
    def features(self, states: torch.Tensor) -> torch.Tensor:
        """Features ``[T, F]`` of :meth:`states`."""

    @abstractmethod
    def step(
        self, rows: StepRows, attend: Attend, module: int = 0, wanted: torch.Tensor | None = None
    ) -> StepOutput:
        """Run rows of features and the tokens after them through one of the modules. A token's position is
        its slot less :attr:`first_slot`.

        Args:
            wanted: int64 ``[n]``, the rows to return; default all.
        """

    def readout(self, read: torch.Tensor) -> Readout:
        """:meth:`logits` before its matmul, for kernels that need no logits."""
        return Readout(read, self.output.weight, self.token_map)

    def logits(self, read: torch.Tensor) -> torch.Tensor:
        """What the output layer reads of a step ``[T, H]`` -> ``[T, Vd]``."""
        return self.output(self.readout(read).states)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids of any shape -> target ids."""
        return draft_ids if self.token_map is None else self.token_map[draft_ids]


class HeadDraftModel(DraftModel):
    """A head of any kind behind its target.

    Args:
        head: it is bound to the target's output layer, where it has none of its own.
        token_map: see :class:`DraftModel`.

    Raises:
        UserError: a ``token_map`` beside the head's own.
    """

    is_whole_model = False
    head: DraftHead

    def __init__(self, head: DraftHead, target: Target, token_map: torch.Tensor | None = None) -> None:
        if token_map is not None and head.token_map is not None:
            raise UserError("A token map was given, but the head brings its own (d2t).", "Leave the map out.")
        super().__init__(head.bind(target.lm_head).output, token_map)
        self.correction = None if head.markov is None else self._rows_of(head.markov.markov_w2)
        self.head, self.target, self.first_slot = head, target, head.first_slot
        self.capture, self.num_modules, self.cache = head.capture, head.config.num_modules, head.cache
        self.feature_size, self.step_form = head.config.hidden_size, head.step_form
        self.state_size = max(1, len(self.capture)) * target.config.hidden_size
        self.state_dtype = target.embed_tokens.weight.dtype
        self.variants = head.config.variants
        if token_map is None:
            self.token_map = head.token_map

    def states(self, out: TargetOutput, rows: torch.Tensor | None = None) -> torch.Tensor:
        """See :class:`DraftModel`. A head reads captured states, or else the final ones."""
        states = out.aux if self.capture else out.hidden
        return states if rows is None else states.index_select(0, rows)  # on a CPU faster than states[rows]

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """See :class:`DraftModel`."""
        none = states[:, :0]
        return self.head.features(none, states) if self.capture else self.head.features(states, none)

    def step(
        self, rows: StepRows, attend: Attend, module: int = 0, wanted: torch.Tensor | None = None
    ) -> StepOutput:
        """See :class:`DraftModel`."""
        features, tokens, _, feature_rows = rows
        embedding = self.head.embedding(self.target.embed_tokens.weight)
        inputs = self.head.blocks[module].inputs_of(features, feature_rows, tokens, embedding)
        return self.head.step(inputs, rows.positions, attend, module, wanted)


class StandaloneDraftModel(DraftModel):
    """A whole small model of the target's vocabulary. It reads no target states, and its entries begin with
    the first token.

    The embedding may have another number of rows than the target's (padding of the same tokenizer). Ids that
    only one of them has are never proposed, and one that the target emits all the same is read as the last.

    Args:
        model: the small model.
        token_map: see :class:`DraftModel`.
        target_vocab_size: rows of the target's embedding; None where there are as many.
    """

    first_slot, is_whole_model = 0, True

    def __init__(
        self, model: Target, token_map: torch.Tensor | None = None, target_vocab_size: int | None = None
    ) -> None:
        own_size = model.config.vocab_size
        target_size = own_size if target_vocab_size is None else target_vocab_size
        self._last_token = own_size - 1 if target_size > own_size else None
        if target_size != own_size:
            token_map = _shared_ids(token_map, min(own_size, target_size))
        super().__init__(model.lm_head, token_map)
        self.state_dtype = self.dtype
        self.model, self.cache, self.variants = model, model.config.cache, model.variants

    def states(self, out: TargetOutput, rows: torch.Tensor | None = None) -> torch.Tensor:
        """See :class:`DraftModel`."""
        count = len(out.hidden) if rows is None else len(rows)
        return out.hidden.new_empty(count, 0, dtype=self.dtype)

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """See :class:`DraftModel`."""
        return states

    def step(
        self, rows: StepRows, attend: Attend, module: int = 0, wanted: torch.Tensor | None = None
    ) -> StepOutput:
        """See :class:`DraftModel`."""
        tokens = rows.tokens if self._last_token is None else rows.tokens.clamp(max=self._last_token)
        hidden = self.model(tokens, rows.positions, attend).hidden
        hidden = hidden if wanted is None else hidden.index_select(0, wanted)
        return StepOutput(hidden, hidden)

    def readout(self, read: torch.Tensor) -> Readout:
        """See :class:`DraftModel`; a soft cap of its logits, which changes no order, is left out."""
        scale = self.model.logit_form.scale
        return super().readout(read if scale == 1.0 else read * scale)

    def logits(self, read: torch.Tensor) -> torch.Tensor:
        """See :class:`DraftModel`."""
        logits: torch.Tensor = self.model.logit_form(self.output(read))
        return logits


def _shared_ids(token_map: torch.Tensor | None, count: int) -> torch.Tensor:
    """Ids below ``count`` that may be proposed."""
    if token_map is None:
        return torch.arange(count)
    shared = token_map[token_map < count]
    if not len(shared):
        raise UserError("The token map names no token that the draft model has.", "Use another token map.")
    return shared
