"""Base classes of draft heads over a target's states, for training, evaluation and serving.

Legend: T packed tokens, H hidden, F features, Hq heads, Vd draft vocabulary, V target vocabulary.

A step reads features and tokens, row by row. The feature stands for some position p: it is the target's
feature of p, or the output of the step before. The token is x[p + 1], and the head predicts x[p + 2]. In
training row i of step k has p = i + k (:mod:`eagle_kit.objective.align`). The decoder layer is a
:class:`Block`; a head of several blocks uses one per step.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.nn import functional as F

from eagle_kit.models.blocks.layers import Attend, Attention, Rope
from eagle_kit.models.blocks.markov import MarkovHead
from eagle_kit.models.blocks.mla import LatentAttention
from eagle_kit.models.cache_specs import CacheSpec
from eagle_kit.models.config import HeadArchitecture
from eagle_kit.models.draft_chain import ChainRows, RowAttention
from eagle_kit.ops.linear import Linear


class StepForm(Enum):
    """How the steps of a draft are computed.

    Attributes:
        FED_BACK: one block reads its own output of the step before (EAGLE).
        MODULES: each step has a block of its own (MTP).
        MASKED: all steps are rows of one pass; later steps read masks (P-EAGLE).
        BLOCK: as ``MASKED``, and the target's states are keys and values only (DFlash).
    """

    FED_BACK = "fed back"
    MODULES = "modules"
    MASKED = "masked"
    BLOCK = "block"


class StepOutput(NamedTuple):
    """Result of a step.

    Attributes:
        fed_back: features of the next step, ``[T, H]``: a of the EAGLE-3 paper.
        lm_head_input: input of the output layer, ``[T, H]``.
    """

    fed_back: torch.Tensor
    lm_head_input: torch.Tensor


class Block(nn.Module, ABC):
    """Decoder layer over a feature and an embedding, split around its attention.

    Every block has attention: the cache of a head has an entry for each token.

    For the estimates of :mod:`eagle_kit.train.plan`: ``self_attn.o_proj`` and parameters under ``mlp`` are
    counted as after attention, all others as before it.
    """

    self_attn: Attention | LatentAttention

    @abstractmethod
    def inputs(self, feature: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The part before attention.

        Args:
            feature: ``[T, H]``, see the head of this file.
            embeds: embeddings of the next tokens ``[T, H]``.

        Returns:
            Input of attention, ``[T, 2 H]`` or ``[T, H]``, and the residual ``[T, H]``.
        """

    def gather_inputs(
        self,
        features: torch.Tensor,
        feature_rows: torch.Tensor | None,
        tokens: torch.Tensor,
        embedding: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`inputs`, with a gather of features and embeddings, which kernels fuse.

        Args:
            features: ``[R, H]``.
            feature_rows: int64 ``[T]``, index of each row's feature; None if row i reads feature i.
            tokens: int64 ``[T]``.
            embedding: ``[V, H]``.
        """
        feature = features if feature_rows is None else features[feature_rows]
        return self.inputs(feature, F.embedding(tokens, embedding))

    @abstractmethod
    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The part after attention.

        Args:
            residual: ``[T, H]``.
            attended: output of attention ``[T, Hq, D]``.

        Returns:
            Output of the layer ``[T, H]``.
        """


class DraftHead(nn.Module, ABC):
    """Base of draft heads. The embedding is the target's, unless the head has its own, and is passed in as
    ``embeds``.

    A new head defines :attr:`blocks`, :attr:`output`, :meth:`features` and :attr:`token_map`.
    :class:`TiedHead` has all of them but :attr:`blocks`.

    Attributes:
        config: its architecture.
        rope: rotation tables, fp32.
        t2d: bool ``[V]``, the tokens it can propose.
        first_position: position of the first token of a request that has an entry in the head's cache. 1 if
            an entry is made of its token and the feature of the position before; 0 if it is made of a feature
            alone.
        bound: the target's output layer, for heads that have none of their own and were bound to it; None
            otherwise.
        embed_tokens: its own embedding ``[V, H]``; None for heads that read the target's.
    """

    config: Any
    rope: Rope
    t2d: torch.Tensor
    first_position: int = 1
    bound: Linear | None = None

    def __init__(self, config: HeadArchitecture) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens: nn.Embedding | None = None
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
        """Take the target's output layer, if the head has none of its own; does nothing otherwise. The layer
        stays the target's: it is no submodule of the head."""
        return self

    def embedding(self, of_target: torch.Tensor) -> torch.Tensor:
        """Weight ``[V, H]`` of the embedding that it reads: its own, or else the target's."""
        return of_target if self.embed_tokens is None else self.embed_tokens.weight

    @property
    @abstractmethod
    def blocks(self) -> list[Block]:
        """Decoder layers that read features and embeddings; one per step if there are several, none where
        features are keys only."""

    @property
    def step_form(self) -> StepForm:
        """What a step reads of the step before."""
        return StepForm.MODULES if len(self.blocks) > 1 else StepForm.FED_BACK

    def training_steps(self, batch: Any, *, recompute: bool) -> list[torch.Tensor]:
        """Run all K steps of training-time test on one packed sequence.

        A head whose :attr:`step_form` is neither ``FED_BACK`` nor ``MODULES`` defines it; these two have
        shared forwards (:mod:`eagle_kit.objective.ttt`).

        Args:
            batch: a :class:`~eagle_kit.objective.loss.TTTBatch`.
            recompute: keep only the inputs of every layer, and run it again in the backward pass.

        Returns:
            Outputs at the supervised rows of each step, K tensors ``[R_k, H]``.
        """
        raise NotImplementedError

    @property
    def most_steps(self) -> int | None:
        """Steps of its longest draft; None for any number."""
        steps: int | None = self.config.most_steps
        return steps

    @property
    def extra_layers(self) -> Sequence[nn.Module]:
        """Decoder layers after the block, which read the states of the layer before."""
        return ()

    @property
    def attentions(self) -> list[Attention | LatentAttention]:
        """Attention of every layer."""
        return [block.self_attn for block in self.blocks]

    @property
    @abstractmethod
    def output(self) -> Linear:
        """The output layer, of weight ``[Vd, H]``."""

    @property
    def predicts_confidence(self) -> bool:
        """True for a head that has :meth:`confidence_logits`."""
        return False

    @property
    def output_weights(self) -> tuple[torch.Tensor, ...]:
        """Weight of the output layer ``[Vd, H]``, followed by that of the Markov head ``[Vd, r]`` if there is
        one. Logits are the sum of their products with the columns of :meth:`norm_for_lm_head`."""
        weights = (self.output.weight,)
        return weights if self.markov is None else (*weights, self.markov.markov_w2.weight)

    @property
    def markov(self) -> MarkovHead | None:
        """Correction of its logits by the token before; None where there is none."""
        return None

    @property
    def device(self) -> torch.device:
        """Device of its parameters."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its matrices; norms may be fp32."""
        return next(parameter.dtype for parameter in self.parameters() if parameter.ndim > 1)

    @property
    def cache(self) -> CacheSpec:
        """Cache layout of all blocks."""
        return self.config.cache

    @abstractmethod
    def features(self, hidden: torch.Tensor, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Features of step 0 ``[T, H]`` from the target's states.

        Args:
            hidden: final hidden states, after the target's last norm, ``[T, H_target]``.
            aux_hidden_states: the captured states of L layers, side by side, ``[T, L * H_target]``.
        """

    @property
    @abstractmethod
    def token_map(self) -> torch.Tensor | None:
        """Target id of every draft id, int64 ``[Vd]``; None when they are equal."""

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Convert draft ids of any shape to target ids."""
        return draft_ids if self.token_map is None else self.token_map[draft_ids]

    def forward(
        self,
        feature: torch.Tensor,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        block: int = 0,
    ) -> torch.Tensor:
        """Run one step at every row. Evaluation calls it (:meth:`chain`); serving calls :meth:`step`.

        Args:
            feature: ``[T, H]``, :meth:`features` of the target, or this method's output of the step before.
            embeds: ``[T, H]``, embeddings of the tokens x[p + 1], if the features stand for positions p.
            positions: int64 ``[T]``, p, for RoPE.
            attend: attention, called with layer 0.
            block: index of the block to run.

        Returns:
            ``[T, H]``, the input of :meth:`logits` and of the next step.
        """
        return self.step(self.blocks[block].inputs(feature, embeds), positions, attend, block).fed_back

    def step(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        attend: Attend,
        block: int = 0,
        output_rows: torch.Tensor | None = None,
    ) -> StepOutput:
        """Run one step from a block's ``inputs``; other arguments as of :meth:`forward`.

        Args:
            output_rows: int64 ``[n]``, rows to return; of the others only keys and values are computed.
        """
        layer = self.blocks[block]
        x, residual = inputs
        attended = layer.self_attn.attended(x, self.rope.at(positions), 0, attend)
        if output_rows is not None:
            attended = attended.index_select(0, output_rows)
            residual = residual.index_select(0, output_rows)
        return self.finish_step(layer, residual, attended)

    def finish_step(self, layer: Block, residual: torch.Tensor, attended: torch.Tensor) -> StepOutput:
        """Rest of a step after attention; arguments as of :meth:`Block.finish`."""
        fed_back = self.feed_back(layer.finish(residual, attended))
        return StepOutput(fed_back, self.norm_for_lm_head(fed_back))

    def chain(self, given: ChainRows, steps: int) -> list[torch.Tensor]:
        """Draft after many roots of a known text, for evaluation (:mod:`eagle_kit.models.draft_chain`).

        Returns:
            S tensors ``[R, H]``, inputs of :meth:`logits`.
        """
        rows = given.rows
        positions = given.positions
        everywhere = given.everywhere
        attention = RowAttention(self.config.layer.attention, given)
        out = self(given.features, given.embeds(everywhere, 0), positions, attention.first)
        outs = [out[rows]]

        # Each module runs at every row.
        if self.step_form is StepForm.MODULES:
            for step in range(1, steps):
                embeds = given.embeds(everywhere, step)
                out = self(out, embeds, positions + step, attention.first, step)
                outs.append(out[rows])
            return outs

        # A fed-back layer runs its later steps at the rows that draft.
        for step in range(1, steps):
            embeds = given.embeds(rows, step)
            outs.append(self(outs[-1], embeds, positions[rows] + step, attention.later))
        return outs

    def feed_back(self, out: torch.Tensor) -> torch.Tensor:
        """Feature of the next step from a block's output, both ``[T, H]``."""
        return out

    def norm_for_lm_head(self, fed_back: torch.Tensor) -> torch.Tensor:
        """Input of :attr:`output` from :meth:`forward`'s output, both ``[T, H]``."""
        return fed_back

    def logits(self, fed_back: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary ``[T, Vd]`` from :meth:`forward`'s output ``[T, H]``."""
        return self.output(self.norm_for_lm_head(fed_back))

    def confidence_logits(self, lm_head_input: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
        """Logit of each row's probability to be accepted where all before it are, ``[T]``; None for heads
        that do not predict it.

        Args:
            lm_head_input: ``[T, H]``, what :meth:`norm_for_lm_head` returns.
            before: int64 ``[T]``, the token before the one that the row drafts.
        """
        return None


class TiedHead(DraftHead):
    """Head that reads the target's final states and proposes any token through the target's output layer,
    which :meth:`bind` sets."""

    token_map = None

    def bind(self, output: Linear) -> Self:
        """Use the target's output layer without registering it as a submodule."""
        self.__dict__["bound"] = output
        return self

    @property
    def output(self) -> Linear:
        """The target's output layer, of weight ``[V, H]``."""
        assert self.bound is not None, "the head was not bound to a target"
        return self.bound

    def features(self, hidden: torch.Tensor, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """See :class:`DraftHead`: ``hidden`` unchanged."""
        return hidden
