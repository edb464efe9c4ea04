"""The EAGLE-3 draft head (arXiv 2503.01840), one definition for training and serving.

Legend: T packed tokens, H hidden, Vd draft vocabulary, V target vocabulary.

At row i the head sees a feature of position i (the fused target states, or its own output of the step before)
and the embedding of the token *after* it, and predicts the token after that one. EAGLE-3.1 (arXiv 2605.09992)
is two flags of :class:`~eagle_kit.models.config.DraftConfig`.
"""

import torch
from torch import nn

from eagle_kit.kernels.linear import Linear
from eagle_kit.models.config import DraftConfig
from eagle_kit.models.layers import MLP, Attend, Attention, RMSNorm, Rope, place_of

RopeTable = tuple[torch.Tensor, torch.Tensor]


class Eagle3Layer(nn.Module):
    """The decoder layer over cat(norm(embedding), norm(feature)), with the feature as residual."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(
            2 * size, size, config.num_heads, config.num_kv_heads, config.head_dim, bias=config.attention_bias
        )
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size)
        self.norm_before_residual = config.norm_before_residual

    def inputs(self, hidden: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden`` and ``embeds [T, H]`` -> attention's input ``[T, 2H]`` and the residual ``[T, H]``."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return torch.cat((self.input_layernorm(embeds), normed), -1), residual

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Everything after attention: ``residual [T, H]``, ``attended [T, Hq, D]`` -> ``[T, H]``."""
        h = residual + self.self_attn.o_proj(attended.flatten(1))
        return h + self.mlp(self.post_attention_layernorm(h))


class Eagle3Head(nn.Module):
    """An EAGLE-3 head. The embedding is the target's and is passed in as ``embeds``.

    Buffers: ``d2t`` int64 ``[Vd]``, offsets (target id = draft id + ``d2t[draft id]``); ``t2d`` bool ``[V]``.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        num_aux = len(config.aux_layer_ids)
        self.fc_norm = (
            nn.ModuleList(RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in range(num_aux))
            if config.fc_norm
            else None
        )
        self.fc = Linear(num_aux * config.target_hidden_size, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = Linear(size, config.draft_vocab_size, bias=False)
        self.rope = Rope(config.head_dim, config.rope_theta, config.rope_scaling)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[: config.draft_vocab_size] = True
        self.register_buffer("t2d", t2d)

    def set_vocab_map(self, d2t: torch.Tensor, t2d: torch.Tensor) -> None:
        """Copy the hot-token map in: ``d2t`` int64 ``[Vd]`` of offsets, ``t2d`` bool ``[V]``."""
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)

    @property
    def target_ids(self) -> torch.Tensor:
        """The target id of every draft id, int64 ``[Vd]``."""
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids of any shape -> target ids."""
        return draft_ids + self.d2t[draft_ids]

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """The captured target states ``[T, 3 * H_target]`` -> the feature ``[T, H]`` of step 0."""
        if self.fc_norm is not None:
            parts = aux.split(self.config.target_hidden_size, -1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(aux)

    def forward(
        self, hidden: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """One step at every row.

        Args:
            hidden: ``[T, H]``, :meth:`fuse` of the target's states, or this method's output of the step
                before.
            embeds: ``[T, H]``, the target's embedding of the token that follows the row.
            positions: ``[T]`` int64, the row's position plus the step.
            attend: attention, called with layer 0.

        Returns:
            ``[T, H]``, what :meth:`logits` reads and what is fed back as ``hidden``.
        """
        layer = self.midlayer
        x, residual = layer.inputs(hidden, embeds)
        q, k, v = layer.self_attn.qkv(x, self.rope.table(positions), place_of(attend, 0))
        return self.feed_back(layer.finish(residual, attend(0, q, k, v)))

    def feed_back(self, out: torch.Tensor) -> torch.Tensor:
        """The layer's output ``[T, H]`` -> the state that the next step gets: normed for EAGLE-3.1, else as
        it is."""
        return self.norm(out) if self.config.norm_output else out

    def norm_for_head(self, fed_back: torch.Tensor) -> torch.Tensor:
        """:meth:`forward`'s output ``[T, H]`` -> what ``lm_head`` multiplies."""
        return fed_back if self.config.norm_output else self.norm(fed_back)

    def logits(self, fed_back: torch.Tensor) -> torch.Tensor:
        """:meth:`forward`'s output ``[T, H]`` -> logits over the draft vocabulary ``[T, Vd]``."""
        return self.lm_head(self.norm_for_head(fed_back))
