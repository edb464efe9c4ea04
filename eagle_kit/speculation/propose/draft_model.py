"""What a drafter needs of a draft model, and the models that have it.

Legend: T rows, F features, H hidden, Vd draft vocabulary.
"""

from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.kernels.linear import Linear
from eagle_kit.models.blocks.layers import Attend
from eagle_kit.models.config_parts import CacheSpec
from eagle_kit.models.heads.draft_head import DraftHead, TiedHead
from eagle_kit.models.heads.eagle1 import Eagle1Head
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.targets.llama import LlamaModel


class Readout(NamedTuple):
    """The last matmul of a draft: ``states [T, H]`` times ``weight [Vd, H]``; ``token_map`` int64 ``[Vd]``,
    the target id of each draft id, None when they are the same."""

    states: torch.Tensor
    weight: torch.Tensor
    token_map: torch.Tensor | None


class DraftModel(Protocol):
    """A model that proposes tokens. ``first_slot`` is the first slot of its store that it fills: 1 where an
    entry is made of a feature and the token after it (EAGLE), 0 for a whole model; ``cache`` is what it keeps
    of a token. ``num_modules`` is 1, or as many as it has for the steps of a draft (:class:`MTPDraftModel`).
    """

    capture: tuple[int, ...]
    first_slot: int
    cache: CacheSpec
    feature_size: int
    draft_vocab_size: int
    num_modules: int
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
    """A head that reads the target's states (see :class:`DraftModel`)."""

    first_slot = 1

    def __init__(self, head: DraftHead, target: LlamaModel) -> None:
        self.head, self.target = head, target
        config, weight = head.config, head.last_norm.weight
        self.capture, self.num_modules = head.capture, len(head.blocks)
        self.cache: CacheSpec = head.cache
        self.feature_size, self.draft_vocab_size = config.hidden_size, config.draft_vocab_size
        self.dtype, self.device = weight.dtype, weight.device
        self.token_map = head.token_map

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
        return self.head.logits(states)

    def readout(self, states: torch.Tensor) -> Readout:
        return Readout(self.head.norm_for_head(states), self.head.output.weight, self.token_map)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return self.head.to_target(draft_ids)


class Eagle3DraftModel(HeadDraftModel):
    """An EAGLE-3 head."""


class TiedDraftModel(HeadDraftModel):
    """A head with the target's output layer.

    Args:
        token_map: target ids int64 ``[Vd]`` that it may propose (FR-Spec): only their rows are multiplied.
    """

    def __init__(self, head: TiedHead, target: LlamaModel, token_map: torch.Tensor | None = None) -> None:
        super().__init__(head, target)
        self.output = _Output(head.output, token_map)
        self.token_map, self.draft_vocab_size = self.output.token_map, self.output.size

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.output.logits(states)

    def readout(self, states: torch.Tensor) -> Readout:
        return Readout(states, self.output.layer.weight, self.token_map)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return self.output.to_target(draft_ids)


class MTPDraftModel(TiedDraftModel):
    """MTP modules: one for all steps of a draft, or one for each."""


class Eagle1DraftModel(TiedDraftModel):
    """An EAGLE-1 head."""

    def __init__(self, head: Eagle1Head, target: LlamaModel, token_map: torch.Tensor | None = None) -> None:
        super().__init__(head.bind(target.lm_head), target, token_map)


class StandaloneDraftModel:
    """A whole small model of the target's vocabulary (see :class:`DraftModel`). It reads no target states,
    and its entries begin with the first token.

    Args:
        token_map: as of :class:`TiedDraftModel`.
    """

    first_slot, feature_size, num_modules = 0, 0, 1
    capture: tuple[int, ...] = ()

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


def load_standalone(
    name_or_path: str | Path,
    target: LlamaModel,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LlamaModel:
    """Load a whole small model that may draft for ``target``.

    Args:
        name_or_path: whatever :func:`~eagle_kit.models.loading.source.resolve_target` knows.

    Raises:
        UserError: it cannot be had or read, or has another vocabulary than the target. Only sizes are
            compared: ids that mean other tokens keep the output right and are hardly ever accepted.
    """
    model = load_target(name_or_path, dtype, device)
    ours, theirs = model.config.vocab_size, target.config.vocab_size
    if ours != theirs:
        raise UserError(
            f"The draft model {name_or_path} has a vocabulary of {ours}, the target one of {theirs}.",
            "Use a smaller model of the target's own family.",
        )
    return model


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
