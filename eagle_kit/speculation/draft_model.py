"""What a drafter needs of a draft model, and the models that have it.

Legend: T rows, F features, H hidden, Vd draft vocabulary.
"""

from typing import Protocol

import torch

from eagle_kit.models.eagle3 import Eagle3Head
from eagle_kit.models.layers import Attend
from eagle_kit.models.llama import LlamaModel


class DraftModel(Protocol):
    """A model that proposes tokens. ``first_slot`` is the first slot of the key-value store that it fills: 1
    where an entry is made of a feature and the token after it (EAGLE), 0 for a whole model."""

    capture: tuple[int, ...]
    first_slot: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    feature_size: int
    draft_vocab_size: int
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

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids of any shape -> target ids."""
        ...


class Eagle3Draft:
    """An EAGLE-3 head (see :class:`DraftModel`)."""

    first_slot, num_layers = 1, 1

    def __init__(self, head: Eagle3Head, target: LlamaModel) -> None:
        self.head, self.target = head, target
        config, weight = head.config, head.fc.weight
        self.capture = config.aux_layer_ids
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.feature_size, self.draft_vocab_size = config.hidden_size, config.draft_vocab_size
        self.dtype, self.device = weight.dtype, weight.device

    def features(self, hidden: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        return self.head.fuse(aux)

    def step(
        self, features: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        return self.head(features, self.target.embed(tokens), slots - self.first_slot, attend)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.head.logits(states)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return self.head.to_target(draft_ids)


class Eagle1Draft: ...


class StandaloneDraft: ...
