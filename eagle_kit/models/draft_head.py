"""Base classes of draft heads over a target's hidden states, for training, evaluation and serving.

A step reads features and tokens, row by row. The feature stands for some position p: it is the target's
feature of p, or the output of the step before. The token is x[p + 1], and the head predicts x[p + 2]. In
training row i of step k has p = i + k (:mod:`eagle_kit.objective.align`). The decoder layer is a
:class:`Block`; a head of several blocks uses one per step.

Legend: T packed tokens, R rows, H hidden, Hq heads, D head size, Vd / V draft / target vocabulary, S steps
of a draft, K steps of training-time test.
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
        FED_BACK: one block runs in every step and reads its own output of the step before (EAGLE).
        MODULES: each step has its own block (MTP).
        MASKED: all steps are rows of one pass; later steps read mask embeddings (P-EAGLE).
        BLOCK: as ``MASKED``, and features of the target are keys and values only (DFlash).
    """

    FED_BACK = "fed back"
    MODULES = "modules"
    MASKED = "masked"
    BLOCK = "block"


class StepOutput(NamedTuple):
    """Result of a step.

    Attributes:
        fed_back: features that the next step reads, ``[T, H]``: a of the EAGLE-3 paper.
        lm_head_input: input of the output layer, ``[T, H]``.
    """

    fed_back: torch.Tensor
    lm_head_input: torch.Tensor


class Block(nn.Module, ABC):
    """Decoder layer over a feature and an embedding, split around its attention.

    Every block has attention, because the cache of a head has an entry for each token. The estimates of
    :mod:`eagle_kit.train.plan` count ``self_attn.o_proj`` and the parameters under ``mlp`` as the part after
    attention, and all others as the part before it.
    """

    self_attn: Attention | LatentAttention

    @abstractmethod
    def inputs(self, feature: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the part before attention.

        Args:
            feature: ``[T, H]``.
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
        """Gather features and embeddings, and compute :meth:`inputs` of them. Subclasses fuse this in a
        kernel.

        Args:
            features: ``[R, H]``.
            feature_rows: int64 ``[T]``, index of each row's feature; None if row i reads feature i.
            tokens: int64 ``[T]``.
            embedding: ``[V, H]``.
        """
        if feature_rows is not None:
            features = features[feature_rows]
        return self.inputs(features, F.embedding(tokens, embedding))

    @abstractmethod
    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Compute the part after attention.

        Args:
            residual: ``[T, H]``.
            attended: output of attention ``[T, Hq, D]``.

        Returns:
            Output of the layer ``[T, H]``.
        """


class DraftHead(nn.Module, ABC):
    """Base of draft heads.

    A new head defines :attr:`blocks`, :attr:`output`, :meth:`features` and :attr:`token_map`.
    :class:`TiedHead` defines all of them but :attr:`blocks`. Embeddings are passed in as ``embeds``: those
    of the target, unless the head has its own.

    Attributes:
        config: architecture of the head.
        rope: rotary position embedding.
        t2d: bool ``[V]``, tokens that the head can propose.
        first_position: position of the first token of a request that has an entry in the head's cache. 1 if
            an entry is computed from its token and the feature of the position before; 0 if it is computed
            from a feature alone. See :mod:`eagle_kit.drafts.base.cycle_state`.
        bound: output layer of the target, of heads without their own; None until :meth:`bind`.
        embed_tokens: the head's own embedding ``[V, H]``; None for heads that read the target's.
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
        """Make all buffers on the default device. It is called again for a head whose parameters were made
        on the meta device."""
        layer = self.config.layer
        self.rope = Rope(layer.rope_dim, layer.rope_theta, layer.rope_scaling)
        t2d = torch.ones(self.config.vocab_size, dtype=torch.bool)
        self.register_buffer("t2d", t2d, persistent=False)

    @property
    def capture(self) -> tuple[int, ...]:
        """Target layers whose inputs the head reads."""
        return self.config.aux_layer_ids

    def bind(self, output: Linear) -> Self:
        """Set the target's output layer in a head without its own. It does not become a submodule of the
        head."""
        return self

    def embedding(self, of_target: torch.Tensor) -> torch.Tensor:
        """Weight ``[V, H]`` of the embedding that the head reads: its own, or else the target's."""
        if self.embed_tokens is None:
            return of_target
        return self.embed_tokens.weight

    @property
    @abstractmethod
    def blocks(self) -> list[Block]:
        """Decoder layers that read features and embeddings: one for all steps, or one per step. Empty where
        features are keys and values only."""

    @property
    def step_form(self) -> StepForm:
        """How the steps of a draft are computed."""
        if len(self.blocks) > 1:
            return StepForm.MODULES
        return StepForm.FED_BACK

    def training_steps(self, batch: Any, *, recompute: bool) -> list[torch.Tensor]:
        """Run all K steps of training-time test on one packed sequence.

        A head whose :attr:`step_form` is ``MASKED`` or ``BLOCK`` defines it. The other two forms have shared
        forwards (:mod:`eagle_kit.objective.ttt`).

        Args:
            batch: a :class:`~eagle_kit.objective.loss.TTTBatch`.
            recompute: keep only the inputs of every layer, and run it again in the backward pass.

        Returns:
            Outputs at the supervised rows of each step, K tensors ``[R_k, H]``.
        """
        raise NotImplementedError

    @property
    def most_steps(self) -> int | None:
        """Number of steps of the longest draft; None for any number."""
        steps: int | None = self.config.most_steps
        return steps

    @property
    def extra_layers(self) -> Sequence[nn.Module]:
        """Decoder layers after a block, which read hidden states only."""
        return ()

    @property
    def attentions(self) -> list[Attention | LatentAttention]:
        """Attention of every layer."""
        return [block.self_attn for block in self.blocks]

    @property
    @abstractmethod
    def output(self) -> Linear:
        """Output layer, of weight ``[Vd, H]``."""

    @property
    def predicts_confidence(self) -> bool:
        """True for a head that has :meth:`confidence_logits`."""
        return False

    @property
    def output_weights(self) -> tuple[torch.Tensor, ...]:
        """Weights ``[Vd, H_j]`` of the output layer and of :attr:`markov`.

        The output of :meth:`norm_for_lm_head` has the columns ``[T, H_j]`` of each, side by side. Logits are
        the sum of the products.
        """
        if self.markov is None:
            return (self.output.weight,)
        return (self.output.weight, self.markov.markov_w2.weight)

    @property
    def markov(self) -> MarkovHead | None:
        """Correction of the logits by the token before; None for heads without one."""
        return None

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrices; norms may be fp32."""
        return next(parameter.dtype for parameter in self.parameters() if parameter.ndim > 1)

    @property
    def cache(self) -> CacheSpec:
        """Cache layout of all blocks."""
        return self.config.cache

    @abstractmethod
    def features(self, hidden: torch.Tensor, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Features of step 0 ``[T, H]`` from the target's hidden states.

        Args:
            hidden: final hidden states, after the target's last norm, ``[T, H_target]``.
            aux_hidden_states: inputs of the L captured layers, side by side, ``[T, L * H_target]``.
        """

    @property
    @abstractmethod
    def token_map(self) -> torch.Tensor | None:
        """Target id of every draft id, int64 ``[Vd]``; None if draft ids are target ids."""

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Convert draft ids of any shape to target ids."""
        if self.token_map is None:
            return draft_ids
        return self.token_map[draft_ids]

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
        inputs = self.blocks[block].inputs(feature, embeds)
        return self.step(inputs, positions, attend, block).fed_back

    def step(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        attend: Attend,
        block: int = 0,
        output_rows: torch.Tensor | None = None,
    ) -> StepOutput:
        """Run one step from the inputs of a block.

        Args:
            inputs: result of :meth:`Block.inputs`.
            positions: int64 ``[T]``, for RoPE: the position that each row's feature stands for.
            attend: attention, called with layer 0.
            block: index of the block to run.
            output_rows: int64 ``[n]``, rows to return; only keys and values are computed for others. None
                returns all rows.
        """
        layer = self.blocks[block]
        x, residual = inputs
        attended = layer.self_attn.attended(x, self.rope.at(positions), 0, attend)
        if output_rows is not None:
            attended = attended.index_select(0, output_rows)
            residual = residual.index_select(0, output_rows)
        return self.finish_step(layer, residual, attended)

    def finish_step(self, layer: Block, residual: torch.Tensor, attended: torch.Tensor) -> StepOutput:
        """Run the part of a step after attention; arguments as in :meth:`Block.finish`."""
        fed_back = self.feed_back(layer.finish(residual, attended))
        return StepOutput(fed_back, self.norm_for_lm_head(fed_back))

    def chain(self, given: ChainRows, steps: int) -> list[torch.Tensor]:
        """Draft at rows of a known text, for evaluation (:mod:`eagle_kit.models.draft_chain`).

        Args:
            given: rows and what they read.
            steps: S, at most :attr:`most_steps`.

        Returns:
            Inputs of :meth:`logits`, S tensors ``[R, H]``.
        """
        # Step 0 runs at every row.
        rows = given.rows
        positions = given.positions
        all_rows = given.all_rows
        attention = RowAttention(self.config.layer.attention, given)
        out = self(given.features, given.embeds(all_rows, 0), positions, attention.first)
        outs = [out[rows]]

        # So does every module.
        if self.step_form is StepForm.MODULES:
            for step in range(1, steps):
                embeds = given.embeds(all_rows, step)
                out = self(out, embeds, positions + step, attention.first, step)
                outs.append(out[rows])
            return outs

        # A block that reads its own output runs at the rows that draft.
        for step in range(1, steps):
            embeds = given.embeds(rows, step)
            out = self(outs[-1], embeds, positions[rows] + step, attention.later)
            outs.append(out)
        return outs

    def feed_back(self, out: torch.Tensor) -> torch.Tensor:
        """Features of the next step from the output of a block, both ``[T, H]``."""
        return out

    def norm_for_lm_head(self, fed_back: torch.Tensor) -> torch.Tensor:
        """Input of :attr:`output` from the output of :meth:`forward`, both ``[T, H]``."""
        return fed_back

    def logits(self, fed_back: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary ``[T, Vd]`` from the output ``[T, H]`` of :meth:`forward`."""
        return self.output(self.norm_for_lm_head(fed_back))

    def confidence_logits(self, lm_head_input: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
        """Logits ``[T]`` of the probability that a row's token is accepted if all tokens before it are;
        None for heads that do not predict it.

        Args:
            lm_head_input: ``[T, H]``, result of :meth:`norm_for_lm_head`.
            before: int64 ``[T]``, token before the one that the row drafts.
        """
        return None


class TiedHead(DraftHead):
    """Head that reads the target's final hidden states and proposes any token through the target's output
    layer, which :meth:`bind` sets."""

    token_map = None

    def bind(self, output: Linear) -> Self:
        """See :class:`DraftHead`. ``__dict__`` is written directly, since assignment would register a
        submodule."""
        self.__dict__["bound"] = output
        return self

    @property
    def output(self) -> Linear:
        """Output layer of the target."""
        assert self.bound is not None, "the head was not bound to a target"
        return self.bound

    def features(self, hidden: torch.Tensor, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """See :class:`DraftHead`. Returns ``hidden``."""
        return hidden
