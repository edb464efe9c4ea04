"""Base of the heads that draft from a target's states, for training, judging and serving alike.

Legend: T packed tokens, H hidden, F features, Hq heads, Vd draft vocabulary, V target vocabulary.

At row i a head sees a feature of position i (of the target's, or its own output of the step before) and the
embedding of the token *after* it, and predicts the token after that one. Its decoder layer is a
:class:`Block`; a head of several blocks uses one for every step.
"""

from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import nn

from eagle_kit.kernels.linear import Linear
from eagle_kit.models.blocks.layers import Attend, Attention, RMSNorm, Rope
from eagle_kit.models.blocks.mla import LatentAttention
from eagle_kit.models.config import HeadArchitecture
from eagle_kit.models.config_parts import CacheSpec


class Block(nn.Module, ABC):
    """A decoder layer over a feature and an embedding, cut open around its attention."""

    self_attn: Attention | LatentAttention

    @abstractmethod
    def inputs(self, hidden: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden`` and ``embeds [T, H]`` -> attention's input ``[T, 2H]`` or ``[T, H]``, and the residual
        ``[T, H]``."""

    @abstractmethod
    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Everything after attention: ``residual [T, H]``, ``attended [T, Hq, D]`` -> ``[T, H]``."""


class DraftHead(nn.Module, ABC):
    """A head behind a target. The embedding is the target's and is passed in as ``embeds``.

    Attributes:
        config: its architecture.
        rope: rotation tables, fp32.
        t2d: bool ``[V]``, the tokens it can propose.
        bound: the target's output layer, of heads that have none of their own and were bound to it.
    """

    config: Any
    rope: Rope
    t2d: torch.Tensor
    bound: Linear | None = None

    def __init__(self, config: HeadArchitecture) -> None:
        super().__init__()
        self.config = config
        self.make_buffers()

    def make_buffers(self) -> None:
        """Make everything that is not a parameter, on the default device: a head whose parameters were made
        on the meta device needs it again."""
        layer = self.config.layer
        self.rope = Rope(layer.rope_dim, layer.rope_theta, layer.rope_scaling)
        t2d = torch.ones(self.config.vocab_size, dtype=torch.bool)
        self.register_buffer("t2d", t2d, persistent=False)

    @property
    def capture(self) -> tuple[int, ...]:
        """Target layers whose inputs it reads."""
        return self.config.aux_layer_ids

    def bind(self, output: Linear) -> Self:
        """Take the target's output layer, where the head has none of its own. It stays the target's: it is
        no submodule of this one."""
        return self

    @property
    @abstractmethod
    def blocks(self) -> list[Block]:
        """The layers, one for every step when there are several."""

    @property
    @abstractmethod
    def output(self) -> Linear:
        """The last matmul, ``[Vd, H]``."""

    @property
    @abstractmethod
    def last_norm(self) -> RMSNorm:
        """The norm in front of :attr:`output`, or the head's last one; its weight tells dtype and device."""

    @property
    def cache(self) -> CacheSpec:
        """Entry of a token in the cache of all blocks."""
        return self.config.cache

    @abstractmethod
    def features(self, hidden: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        """The target's final-normed states ``[T, H_target]`` and its captured ones -> ``[T, H]``."""

    @property
    @abstractmethod
    def token_map(self) -> torch.Tensor | None:
        """The target id of every draft id, int64 ``[Vd]``; None when they are the same."""

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids of any shape -> target ids."""
        return draft_ids if self.token_map is None else self.token_map[draft_ids]

    def forward(
        self,
        hidden: torch.Tensor,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        block: int = 0,
    ) -> torch.Tensor:
        """One step at every row.

        Args:
            hidden: ``[T, H]``, :meth:`features` of the target, or this method's output of the step before.
            embeds: ``[T, H]``, the target's embedding of the token that follows the row.
            positions: ``[T]`` int64, the row's position plus the step.
            attend: attention, called with layer 0.
            block: which block runs.

        Returns:
            ``[T, H]``, what :meth:`logits` reads and what is fed back as ``hidden``.
        """
        layer = self.blocks[block]
        x, residual = layer.inputs(hidden, embeds)
        attended = layer.self_attn.attended(x, self.rope.table(positions), 0, attend)
        return self.feed_back(layer.finish(residual, attended))

    def feed_back(self, out: torch.Tensor) -> torch.Tensor:
        """A block's output ``[T, H]`` -> the state that the next step gets."""
        return out

    def norm_for_head(self, fed_back: torch.Tensor) -> torch.Tensor:
        """:meth:`forward`'s output ``[T, H]`` -> what :attr:`output` multiplies."""
        return fed_back

    def logits(self, fed_back: torch.Tensor) -> torch.Tensor:
        """:meth:`forward`'s output ``[T, H]`` -> logits over the draft vocabulary ``[T, Vd]``."""
        return self.output(self.norm_for_head(fed_back))


class TiedHead(DraftHead):
    """A head that reads the target's final states and proposes any token through the target's output layer,
    which it must be told (:meth:`bind`)."""

    token_map = None

    def bind(self, output: Linear) -> Self:
        """See :class:`DraftHead`."""
        self.__dict__["bound"] = output
        return self

    @property
    def output(self) -> Linear:
        """The target's output layer."""
        assert self.bound is not None, "the head was not bound to a target"
        return self.bound

    def features(self, hidden: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        """``hidden`` as it is."""
        return hidden
