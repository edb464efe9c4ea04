"""EAGLE-1 draft head (arXiv 2401.15077), which EAGLE-2 (arXiv 2406.16858) uses unchanged.

Legend: T packed tokens, H hidden, Hq heads, D head size.

At row i the head reads the target's last hidden state of position i, after the final norm, and the embedding
of the token after it, and predicts the target's last hidden state of position i + 1. The target's own output
layer turns that into logits, so the head has none.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from eagle_kit.models.blocks.layers import MLP, Attention, RMSNorm
from eagle_kit.models.config import DecoderConfig, TiedArchitecture
from eagle_kit.models.draft_head import Block, TiedHead
from eagle_kit.ops.linear import Linear


@dataclass(frozen=True)
class Eagle1Config(DecoderConfig, TiedArchitecture):
    """Architecture of an EAGLE-1 head: one Llama decoder layer after ``fc``, which may have a bias.

    Attributes:
        logit_scale: the target's factor of logits.
        own_embedding: the head has an embedding of its own.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    attention_bias: bool = False
    attention_out_bias: bool = False
    fc_bias: bool = True
    rotary_dim: int | None = None
    own_embedding: bool = False
    logit_scale: float = 1.0
    max_position_embeddings: int = 0
    target: str = ""
    template_hash: str = ""


class Eagle1Head(TiedHead, Block):
    """EAGLE-1 head. It is its own single block: ``fc`` runs at every step."""

    config: Eagle1Config
    self_attn: Attention

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.fc = Linear(2 * size, size, bias=config.fc_bias)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.self_attn = Attention(config, size)
        self.post_attention_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.mlp = MLP(size, config.intermediate_size)

    @property
    def blocks(self) -> list[Block]:
        """The head itself."""
        return [self]

    def inputs(self, feature: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~eagle_kit.models.draft_head.Block`; there is no norm between ``fc`` and
        attention, so both results are the same ``[T, H]``."""
        x = self.fc(torch.cat((embeds, feature), -1))
        return x, x

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """See :class:`~eagle_kit.models.draft_head.Block`."""
        normed, h = self.post_attention_layernorm.add(self.self_attn.o_proj(attended.flatten(1)), residual)
        return h + self.mlp(normed)

    def norm_for_lm_head(self, fed_back: torch.Tensor) -> torch.Tensor:
        """See :class:`~eagle_kit.models.draft_head.DraftHead`; the output layer is the target's, whose
        logits have a factor."""
        return fed_back if self.config.logit_scale == 1.0 else fed_back * self.config.logit_scale
