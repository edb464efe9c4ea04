"""EAGLE-3 draft head (arXiv 2503.01840), one definition for training and serving.

The paper's symbols (section 3.1, figure 5) and the code:

    l, m, h    hidden states of a low, a middle and a high target layer (inputs of the layers 2, n // 2
               and n - 3 of n by default): ``aux_hidden_states``
    g          their fusion ``fc([l; m; h])``, the feature of step 0: :meth:`Eagle3Head.fuse`
    e          embedding of the next token: ``embeds``
    a          output of the decoder layer, which is the feature of the next step in place of g:
               :meth:`Eagle3Head.feed_back`, ``StepOutput.fed_back``
    LM head    ``lm_head(norm(a))`` over the draft vocabulary: :meth:`Eagle3Head.logits`

A step in order: :meth:`Eagle3Layer.inputs` (norms, ``[e; g]``), attention, :meth:`AfterAttention.finish`
(``o_proj``, MLP), :meth:`Eagle3Head.feed_back`, LM head.

* Training (training-time test, section 3.2) runs these parts in :mod:`eagle_kit.objective.ttt`, over all rows
  of a packed sequence.
* Serving runs them in :meth:`DraftHead.step`, over a paged cache, with fused kernels for the first
  (:meth:`Eagle3Layer.gather_inputs`) and the last (:meth:`Eagle3Head.finish_step`). Drafting is
  :class:`eagle_kit.drafts.base.autoregressive.AutoregressiveDrafter`.

The paper reduces ``[e; g]`` to H by a second linear layer. The published checkpoints and this head do not:
the projections of queries, keys and values read 2 H values. The draft vocabulary
(``d2t``, ``t2d``) is of the published code. EAGLE-3.1 (arXiv 2605.09992) is ``fc_norm`` and ``norm_output``
of :class:`Eagle3Config`.

Legend: T packed tokens, H hidden, Ht hidden of the target, L captured layers, Hq query heads, D head size, Vd
draft vocabulary, V target vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from eagle_kit.drafts.base.captured_states import (
    CapturedStatesArchitecture,
    CapturedStatesHead,
    default_sizes,
)
from eagle_kit.models.blocks.layers import MLP, Attention, RMSNorm
from eagle_kit.models.blocks.mla import LatentAttention, make_attention
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.draft_head import Block, StepOutput
from eagle_kit.models.layer_configs import MLAConfig
from eagle_kit.ops.draft_inputs import draft_inputs
from eagle_kit.ops.linear import Linear


@dataclass(frozen=True)
class Eagle3Config(CapturedStatesArchitecture):
    """Architecture of an EAGLE-3 head. The sizes are those of its base class.

    Attributes:
        aux_layer_ids: target layers whose inputs are captured. An empty tuple: the head has no ``fc``
            and reads the target's final hidden states.
        fc_norm: one RMSNorm for each captured layer in front of ``fc`` (EAGLE-3.1).
        norm_output: the next step reads ``norm(a)`` instead of ``a`` (EAGLE-3.1).
        norm_before_residual: the residual is ``hidden_norm(feature)``, not the feature (speculators).
        norm_before_fc: one RMSNorm over all captured states in front of ``fc`` (speculators).
        attention_bias: the projections of queries, keys and values have biases.
        qk_norm: RMSNorms of queries and keys, as in Qwen3.
        mla: sizes of latent attention; None for the attention of a Llama layer.
        own_embedding: the head has a trained embedding. The published heads read the target's, frozen.
        target: name of the target that the head was trained for.
        template_hash: hash of the chat template of its training data.
    """

    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    mla: MLAConfig | None = None
    sliding_window: int | None = None
    rotary_dim: int | None = None
    own_embedding: bool = False
    target: str = ""
    template_hash: str = ""

    @classmethod
    def for_target(
        cls, model: TargetConfig, draft_vocab_size: int, *, latent: bool = False, **overrides: Any
    ) -> Self:
        """Default architecture for a target: the target's sizes, RoPE and default captured layers.

        Args:
            model: architecture of the target.
            draft_vocab_size: Vd.
            latent: latent attention with the target's sizes, instead of a Llama layer.
            overrides: fields that differ from the default.
        """
        assert model.mla is not None or not latent
        sizes = default_sizes(model, draft_vocab_size, latent=latent)
        default = cls(**sizes, mla=model.mla if latent else None)
        return replace(default, **overrides)


class AfterAttention(nn.Module):
    """The part of a Llama layer after attention: output projection, norm and MLP."""

    self_attn: Attention | LatentAttention
    post_attention_layernorm: RMSNorm
    mlp: MLP

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """See :class:`~eagle_kit.models.draft_head.Block`."""
        after_attention, mlp_output = self.residual_and_mlp(residual, attended)
        return after_attention + mlp_output

    def residual_and_mlp(
        self, residual: torch.Tensor, attended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two summands of :meth:`finish`, for a fused norm that adds them.

        Args:
            residual: ``[T, H]``.
            attended: output of attention ``[T, Hq, D]``.

        Returns:
            The states after attention and the output of the MLP, ``[T, H]`` each.
        """
        attention_output = self.self_attn.o_proj(attended.flatten(1))  # [T, H]
        normed, after_attention = self.post_attention_layernorm.add(attention_output, residual)  # [T, H] each
        return after_attention, self.mlp(normed)


class Eagle3Layer(AfterAttention, Block):
    """The single decoder layer (section 3.1).

    The feature f is g in step 0 and a, the output of the step before, in later steps. Attention reads
    ``[input_layernorm(e); hidden_norm(f)]``, and the residual is f.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = make_attention(config, 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size)
        self.norm_before_residual = config.norm_before_residual

    def inputs(self, feature: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~eagle_kit.models.draft_head.Block`; attention's input is ``[T, 2H]``."""
        normed = self.hidden_norm(feature)  # [T, H]
        x = torch.cat((self.input_layernorm(embeds), normed), -1)  # [T, 2 H]
        if self.norm_before_residual:
            return x, normed
        return x, feature

    def gather_inputs(
        self,
        features: torch.Tensor,
        feature_rows: torch.Tensor | None,
        tokens: torch.Tensor,
        embedding: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~eagle_kit.models.draft_head.Block`."""
        norms = (self.input_layernorm.weight, self.hidden_norm.weight)
        x, feature = draft_inputs(features, feature_rows, tokens, embedding, norms, self.hidden_norm.eps)
        # x: [T, 2 H], feature: [T, H]
        if self.norm_before_residual:
            return x, x[:, features.shape[1] :]
        return x, feature


class Eagle3Head(CapturedStatesHead):
    """EAGLE-3 head.

    Attributes:
        d2t, t2d: draft vocabulary, see :class:`CapturedStatesHead`.
        input_norm: RMSNorm over all captured states; None without ``norm_before_fc``.
        fc_norm: one RMSNorm for each captured layer; None without ``fc_norm``.
        fc: fusion of the captured states, ``[H, L * Ht]``; None without captured layers.
        embed_tokens: the head's own embedding ``[V, H]``; None for the target's.
        midlayer: the decoder layer.
        norm: RMSNorm in front of ``lm_head``.
        lm_head: output layer ``[Vd, H]``.
    """

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        size = config.hidden_size
        num_aux = len(config.aux_layer_ids)
        target_size = config.target_hidden_size
        eps = config.rms_norm_eps

        # Fusion of the captured states.
        self.input_norm: RMSNorm | None = None
        if config.norm_before_fc:
            self.input_norm = RMSNorm(num_aux * target_size, eps)
        self.fc_norm: nn.ModuleList | None = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(target_size, eps) for _ in range(num_aux))
        self.fc: Linear | None = None
        if num_aux:
            self.fc = Linear(num_aux * target_size, size, bias=False)

        # Embedding, decoder layer and output layer.
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, eps)
        self.lm_head = Linear(size, config.draft_vocab_size, bias=False)

    @property
    def blocks(self) -> list[Block]:
        """The single decoder layer."""
        return [self.midlayer]

    @property
    def output(self) -> Linear:
        """The LM head, of weight ``[Vd, H]``."""
        return self.lm_head

    @property
    def token_map(self) -> torch.Tensor:
        """Target id of every draft id, int64 ``[Vd]``."""
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Convert draft ids of any shape to target ids."""
        return draft_ids + self.d2t[draft_ids]

    def fuse(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Fuse low, middle and high hidden states (section 3.1): g = fc([l; m; h]).

        Args:
            aux_hidden_states: captured states of the target ``[T, L * Ht]``, in the order of
                ``aux_layer_ids``.

        Returns:
            g, the feature of step 0, ``[T, H]``.
        """
        if self.input_norm is not None:
            aux_hidden_states = self.input_norm(aux_hidden_states)  # [T, L * Ht]
        if self.fc_norm is not None:
            layers = aux_hidden_states.split(self.config.target_hidden_size, -1)  # L of [T, Ht]
            normed = [norm(layer) for norm, layer in zip(self.fc_norm, layers, strict=True)]
            aux_hidden_states = torch.cat(normed, -1)  # [T, L * Ht]
        assert self.fc is not None
        return self.fc(aux_hidden_states)  # [T, H]

    def features(self, hidden: torch.Tensor, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """See :class:`DraftHead`: :meth:`fuse`, or ``hidden`` for a head without captured layers."""
        if self.fc is None:
            return hidden
        return self.fuse(aux_hidden_states)

    def feed_back(self, out: torch.Tensor) -> torch.Tensor:
        """Feature of the next step from the layer's output ``out``, both ``[T, H]`` (section 3.1): a itself,
        or ``norm(a)`` in EAGLE-3.1."""
        if self.config.norm_output:
            return self.norm(out)
        return out

    def finish_step(self, layer: Block, residual: torch.Tensor, attended: torch.Tensor) -> StepOutput:
        """See :class:`DraftHead`: ``feed_back(layer.finish(...))`` and :meth:`norm_for_lm_head`. The last
        addition of the layer and :attr:`norm` are one operation."""
        assert isinstance(layer, AfterAttention)
        after_attention, mlp_output = layer.residual_and_mlp(residual, attended)  # [T, H] each
        normed, out = self.norm.add(mlp_output, after_attention)  # [T, H] each
        fed_back = out
        if self.config.norm_output:
            fed_back = normed
        return StepOutput(fed_back, normed)

    def norm_for_lm_head(self, fed_back: torch.Tensor) -> torch.Tensor:
        """Input of ``lm_head`` from :meth:`forward`'s output, both ``[T, H]``."""
        if self.config.norm_output:
            return fed_back
        return self.norm(fed_back)
