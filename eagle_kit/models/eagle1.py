"""The EAGLE-1 draft head (arXiv 2401.15077), which EAGLE-2 (arXiv 2406.16858) serves unchanged.

Legend: T packed tokens, H hidden.

At row i the head sees the target's last hidden state of position i, after the final norm, and the embedding
of the token after it, and predicts the target's last hidden state of position i + 1. The target's own output
layer turns that into logits, so the head has none.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from eagle_kit.kernels.linear import Linear
from eagle_kit.models.layers import MLP, Attend, Attention, RMSNorm, Rope


@dataclass(frozen=True)
class Eagle1Config:
    """An EAGLE-1 head: one decoder layer of the target's kind behind ``fc``, which may have a bias."""

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


class Eagle1Head(nn.Module):
    """An EAGLE-1 head. Embedding and output layer are the target's."""

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.fc = Linear(2 * size, size, bias=config.fc_bias)
        self.self_attn = Attention(
            size,
            size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            bias=config.attention_bias,
            out_bias=config.attention_out_bias,
        )
        self.post_attention_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.mlp = MLP(size, config.intermediate_size)
        self.rope = Rope(config.head_dim, config.rope_theta, config.rope_scaling)

    def forward(
        self, hidden: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """One step at every row.

        The layer has no norm in front of its attention: ``fc`` feeds it directly.

        Args:
            hidden: ``[T, H]``, the target's final-normed states, or this method's output of the step before.
            embeds: ``[T, H]``, the target's embedding of the token that follows the row.
            positions: ``[T]`` int64, the row's position plus the step.
            attend: attention, called with layer 0.

        Returns:
            ``[T, H]``, what the target's output layer reads and what is fed back as ``hidden``.
        """
        x = self.fc(torch.cat((embeds, hidden), -1))
        h = x + self.self_attn(x, self.rope.table(positions), 0, attend)
        return h + self.mlp(self.post_attention_layernorm(h))
