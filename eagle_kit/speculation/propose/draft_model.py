"""Draft models: the contract with a drafter, heads behind a target, and whole models.

Legend: T rows, F features, H hidden, Vd draft vocabulary.
"""

from typing import NamedTuple, Protocol

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.kernels.linear import Linear
from eagle_kit.models.blocks.layers import Attend
from eagle_kit.models.config_parts import CacheSpec
from eagle_kit.models.heads.draft_head import DraftHead
from eagle_kit.models.targets.llama import LlamaModel


class Readout(NamedTuple):
    """The last matmul of a draft: ``states [T, H]`` times ``weight [Vd, H]``; ``token_map`` int64 ``[Vd]``,
    the target id of each draft id, None when they are the same."""

    states: torch.Tensor
    weight: torch.Tensor
    token_map: torch.Tensor | None


class DraftModel(Protocol):
    """A model that proposes tokens.

    Attributes:
        capture: target layers whose inputs it reads.
        first_slot: first slot of its store that it fills: 1 where an entry is made of a feature and the token
            after it (EAGLE), 0 for a whole model.
        cache: entry of a token in its store.
        feature_size: F; 0 for a model that reads no states.
        num_modules: 1, or one for every step of a draft.
        is_whole_model: every drafted token costs a pass through a model of several layers.
        head: the draft head; None of a whole model.
    """

    capture: tuple[int, ...]
    first_slot: int
    cache: CacheSpec
    feature_size: int
    draft_vocab_size: int
    num_modules: int
    is_whole_model: bool
    head: DraftHead | None
    dtype: torch.dtype
    device: torch.device

    def features(self, hidden: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        """The target's output at rows, ``[T, H]`` and ``[T, 3 H]`` -> ``[T, F]``."""
        ...

    def step(
        self, features: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Features ``[T, F]`` with the tokens after them, which own ``slots`` int64 ``[T]`` -> ``[T, H]``."""
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """:meth:`step`'s output -> ``[T, Vd]``."""
        ...

    def readout(self, states: torch.Tensor) -> Readout:
        """:meth:`logits` before its matmul, for kernels that need no logits."""
        ...

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids of any shape -> target ids."""
        ...


class HeadDraftModel:
    """A head of any kind behind its target (see :class:`DraftModel`).

    Args:
        head: bound to the target's output layer, where it has none of its own.
        token_map: target ids int64 ``[Vd]`` that it may propose (FR-Spec): only their rows are multiplied.

    Raises:
        UserError: a ``token_map`` beside the head's own.
    """

    first_slot = 1
    is_whole_model = False

    def __init__(self, head: DraftHead, target: LlamaModel, token_map: torch.Tensor | None = None) -> None:
        if token_map is not None and head.token_map is not None:
            raise UserError("A token map was given, but the head brings its own (d2t).", "Leave the map out.")
        self.head, self.target = head, target
        config, weight = head.config, head.last_norm.weight
        self.capture, self.num_modules = head.capture, len(head.blocks)
        self.cache: CacheSpec = head.cache
        self.feature_size = config.hidden_size
        self.dtype, self.device = weight.dtype, weight.device
        self.output = _Output(head.output, token_map)
        self.draft_vocab_size = self.output.size
        self.token_map = head.token_map if token_map is None else self.output.token_map

    def features(self, hidden: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        return self.head.features(hidden, aux)

    def step(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        attend: Attend,
        module: int = 0,
    ) -> torch.Tensor:
        return self.head(features, self.target.embed(tokens), slots - self.first_slot, attend, module)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.output.logits(self.head.norm_for_head(states))

    def readout(self, states: torch.Tensor) -> Readout:
        return Readout(self.head.norm_for_head(states), self.output.layer.weight, self.token_map)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids if self.token_map is None else self.token_map[draft_ids]


class StandaloneDraftModel:
    """A whole small model of the target's vocabulary (see :class:`DraftModel`). It reads no target states,
    and its entries begin with the first token.

    Args:
        token_map: as of :class:`HeadDraftModel`.
    """

    first_slot, feature_size, num_modules = 0, 0, 1
    capture: tuple[int, ...] = ()
    head = None
    is_whole_model = True

    def __init__(self, model: LlamaModel, token_map: torch.Tensor | None = None) -> None:
        self.model = model
        config, weight = model.config, model.embed_tokens.weight
        self.cache = config.cache
        self.dtype, self.device = weight.dtype, weight.device
        self.output = _Output(model.lm_head, token_map)
        self.draft_vocab_size = self.output.size

    def features(self, hidden: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        return hidden[:, :0].to(self.dtype)

    def step(
        self, features: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        return self.model(tokens, slots, attend).hidden

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.output.logits(states)

    def readout(self, states: torch.Tensor) -> Readout:
        return Readout(states, self.output.layer.weight, self.output.token_map)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return self.output.to_target(draft_ids)


class _Output:
    """An output layer, whole or only the rows of a token map."""

    def __init__(self, layer: Linear, token_map: torch.Tensor | None) -> None:
        self.layer = layer
        self.token_map = token_map
        if token_map is not None:
            self.token_map = token_map.to(layer.weight.device)
            self.layer = Linear(layer.in_features, len(token_map), bias=False)
            self.layer.weight = torch.nn.Parameter(layer.weight[self.token_map], requires_grad=False)
            self.layer.pack()
        self.size = self.layer.weight.shape[0]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.layer(states)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids if self.token_map is None else self.token_map[draft_ids]
