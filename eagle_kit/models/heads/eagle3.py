"""EAGLE-3 draft head (arXiv 2503.01840), one definition for training and serving.

Legend: T packed tokens, H hidden, Vd draft vocabulary, V target vocabulary.

The feature is the fused target states of three layers, then the head's own output of the step before. The
decoder layer is a Llama layer, or has latent attention. EAGLE-3.1 (arXiv 2605.09992) is two flags of
:class:`~eagle_kit.models.config.DraftConfig`.
"""

import torch
from torch import nn

from eagle_kit.kernels.linear import Linear
from eagle_kit.models.blocks.layers import MLP, RMSNorm
from eagle_kit.models.blocks.mla import make_attention
from eagle_kit.models.config import DraftConfig
from eagle_kit.models.heads.draft_head import Block, DraftHead


class Eagle3Layer(Block):
    """Decoder layer over cat(norm(embedding), norm(feature)), with the feature as residual."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = make_attention(config, 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size)
        self.norm_before_residual = config.norm_before_residual

    def inputs(self, hidden: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~eagle_kit.models.heads.draft_head.Block`; attention's input is ``[T, 2H]``."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return torch.cat((self.input_layernorm(embeds), normed), -1), residual

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """See :class:`~eagle_kit.models.heads.draft_head.Block`."""
        h = residual + self.self_attn.o_proj(attended.flatten(1))
        return h + self.mlp(self.post_attention_layernorm(h))


class Eagle3Head(DraftHead):
    """EAGLE-3 head.

    Buffers: ``d2t`` int64 ``[Vd]``, offsets (target id = draft id + ``d2t[draft id]``); ``t2d`` bool ``[V]``.
    """

    config: DraftConfig
    d2t: torch.Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
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
    def last_norm(self) -> RMSNorm:
        """The norm in front of ``lm_head``."""
        return self.norm

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
        if self.fc_norm is not None:
            parts = aux.split(self.config.target_hidden_size, -1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(aux)

    def features(self, hidden: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        """:meth:`fuse` of ``aux``."""
        return self.fuse(aux)

    def feed_back(self, out: torch.Tensor) -> torch.Tensor:
        """State for the next step from the layer's output, both ``[T, H]``: normed for EAGLE-3.1, else
        unchanged."""
        return self.norm(out) if self.config.norm_output else out

    def norm_for_head(self, fed_back: torch.Tensor) -> torch.Tensor:
        """Input of ``lm_head`` from :meth:`forward`'s output, both ``[T, H]``."""
        return fed_back if self.config.norm_output else self.norm(fed_back)
