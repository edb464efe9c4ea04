"""EAGLE-3 draft head (arXiv 2503.01840), one definition for training and serving.

Legend: T packed tokens, H hidden, Vd draft vocabulary, V target vocabulary.

The feature is the fused target states of three layers, then the head's own output of the step before. The
decoder layer is a Llama layer, or has latent attention. EAGLE-3.1 (arXiv 2605.09992) is two flags of
:class:`Eagle3Config`.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from eagle_kit.models.blocks.layers import MLP, Attention, RMSNorm
from eagle_kit.models.blocks.mla import LatentAttention, make_attention
from eagle_kit.models.config import DecoderConfig, HeadArchitecture, TargetConfig
from eagle_kit.models.config_parts import MLAConfig
from eagle_kit.models.draft_head import Block, DraftHead, StepOutput
from eagle_kit.ops.draft_inputs import draft_inputs
from eagle_kit.ops.linear import Linear


@dataclass(frozen=True)
class Eagle3Config(DecoderConfig, HeadArchitecture):
    """Architecture of an EAGLE-3 head.

    Attributes:
        fc_norm: an RMSNorm per captured state in front of ``fc`` (EAGLE-3.1, arXiv 2605.09992).
        norm_output: feed the normed state back at the next step instead of the raw one (EAGLE-3.1).
        norm_before_residual: take the residual after ``hidden_norm`` (heads of the speculators project).
        norm_before_fc: one RMSNorm over all captured states in front of ``fc`` (the same project's default).
        aux_layer_ids: captured states; without any the head reads the target's final states, through no
            ``fc``.
        own_embedding: the head has an embedding of its own.
    """

    hidden_size: int
    target_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    aux_layer_ids: tuple[int, ...]
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
        """Default head for a target: its sizes, its RoPE, its default captured layers.

        The head's layer is a Llama layer for any target, or, with ``latent``, has latent attention of the
        target's sizes. A Llama layer for a target with latent attention has heads of the size of the target's
        values, as many as the hidden size holds, grouped for at most 8 keys, and plain RoPE: engines disagree
        on YaRN's magnitudes outside of latent attention.
        """
        num_heads, num_kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
        assert model.mla is not None or not latent
        is_llama = model.mla is not None and not latent
        if model.mla is not None and is_llama:
            head_dim = model.mla.v_head_dim
            num_heads = max(1, model.hidden_size // head_dim)
            num_kv_heads = next(count for count in range(8, 0, -1) if num_heads % count == 0)
        base = cls(
            hidden_size=model.hidden_size,
            target_hidden_size=model.hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=model.intermediate_size,
            vocab_size=model.vocab_size,
            draft_vocab_size=draft_vocab_size,
            rms_norm_eps=model.rms_norm_eps,
            rope_theta=model.rope_theta,
            rope_scaling=None if is_llama else model.rope_scaling,
            max_position_embeddings=model.max_position_embeddings,
            aux_layer_ids=model.default_aux_layer_ids,
            mla=model.mla if latent else None,
        )
        return replace(base, **overrides)


class AfterAttention(nn.Module):
    """Rest of a Llama layer after its attention."""

    self_attn: Attention | LatentAttention
    post_attention_layernorm: RMSNorm
    mlp: MLP

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """See :class:`~eagle_kit.models.draft_head.Block`."""
        h, added = self.parts(residual, attended)
        return h + added

    def parts(self, residual: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`finish` as two summands, for a norm that adds them: the states after attention, and the
        MLP's output."""
        normed, h = self.post_attention_layernorm.add(self.self_attn.o_proj(attended.flatten(1)), residual)
        return h, self.mlp(normed)


class Eagle3Layer(AfterAttention, Block):
    """Decoder layer over cat(norm(embedding), norm(feature)), with the feature as residual."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = make_attention(config, 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size)
        self.norm_before_residual = config.norm_before_residual

    def inputs(self, hidden: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~eagle_kit.models.draft_head.Block`; attention's input is ``[T, 2H]``."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return torch.cat((self.input_layernorm(embeds), normed), -1), residual

    def inputs_of(
        self,
        features: torch.Tensor,
        feature_rows: torch.Tensor | None,
        tokens: torch.Tensor,
        embedding: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~eagle_kit.models.draft_head.Block`."""
        norms = self.input_layernorm.weight, self.hidden_norm.weight
        x, hidden = draft_inputs(features, feature_rows, tokens, embedding, norms, self.hidden_norm.eps)
        return x, x[:, features.shape[1] :] if self.norm_before_residual else hidden


class Eagle3Head(DraftHead):
    """EAGLE-3 head.

    Buffers: ``d2t`` int64 ``[Vd]``, offsets (target id = draft id + ``d2t[draft id]``); ``t2d`` bool ``[V]``.
    """

    config: Eagle3Config
    d2t: torch.Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        size = config.hidden_size
        num_aux = len(config.aux_layer_ids)
        self.input_norm = (
            RMSNorm(num_aux * config.target_hidden_size, config.rms_norm_eps)
            if config.norm_before_fc
            else None
        )
        self.fc_norm = (
            nn.ModuleList(RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in range(num_aux))
            if config.fc_norm
            else None
        )
        self.fc: Linear | None = None
        if num_aux:
            self.fc = Linear(num_aux * config.target_hidden_size, size, bias=False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = Linear(size, config.draft_vocab_size, bias=False)

    def make_buffers(self) -> None:
        """See :class:`DraftHead`; the map is that of the first Vd tokens."""
        super().make_buffers()
        self.register_buffer("d2t", torch.zeros(self.config.draft_vocab_size, dtype=torch.int64))
        t2d = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        t2d[: self.config.draft_vocab_size] = True
        self.register_buffer("t2d", t2d)

    def set_vocab_map(self, d2t: torch.Tensor, t2d: torch.Tensor) -> None:
        """Copy in the draft vocabulary: ``d2t`` int64 ``[Vd]`` of offsets, ``t2d`` bool ``[V]``."""
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)

    @property
    def blocks(self) -> list[Block]:
        """The single decoder layer."""
        return [self.midlayer]

    @property
    def output(self) -> Linear:
        """Weight of ``lm_head``."""
        return self.lm_head

    @property
    def target_ids(self) -> torch.Tensor:
        """Target id of every draft id, int64 ``[Vd]``."""
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    @property
    def token_map(self) -> torch.Tensor:
        """See :attr:`target_ids`."""
        return self.target_ids

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Convert draft ids of any shape to target ids."""
        return draft_ids + self.d2t[draft_ids]

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """Feature ``[T, H]`` of step 0 from the captured target states ``[T, 3 * H_target]``."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            parts = aux.split(self.config.target_hidden_size, -1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        assert self.fc is not None
        return self.fc(aux)

    def features(self, hidden: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        """:meth:`fuse` of ``aux``, or ``hidden`` where no states are captured."""
        return hidden if self.fc is None else self.fuse(aux)

    def feed_back(self, out: torch.Tensor) -> torch.Tensor:
        """State for the next step from the layer's output, both ``[T, H]``: normed for EAGLE-3.1, else
        unchanged."""
        return self.norm(out) if self.config.norm_output else out

    def finish_step(self, layer: Block, residual: torch.Tensor, attended: torch.Tensor) -> StepOutput:
        """See :class:`DraftHead`; the last addition is the norm's."""
        assert isinstance(layer, AfterAttention)
        h, added = layer.parts(residual, attended)
        normed, out = self.norm.add(added, h)
        return StepOutput(normed if self.config.norm_output else out, normed)

    def norm_for_head(self, fed_back: torch.Tensor) -> torch.Tensor:
        """Input of ``lm_head`` from :meth:`forward`'s output, both ``[T, H]``."""
        return fed_back if self.config.norm_output else self.norm(fed_back)
