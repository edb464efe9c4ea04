"""Layers with the gated delta rule (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

Legend: T packed tokens, H hidden, Hv / Hk heads of values and of queries and keys, V / K their sizes.
"""

import torch
from torch import nn
from torch.nn import functional as F

from eagle_kit.models.blocks.layers import Attend, RMSNorm, sigmoid
from eagle_kit.models.blocks.recurrence import recur_of
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.layer_configs import DeltaConfig
from eagle_kit.ops.linear import Linear
from eagle_kit.ops.recurrence import Inputs

LENGTH_EPS = 1e-6
"""Added to the squares of the lengths that queries and keys are divided by."""


class ShortConvolution(nn.Module):
    """Weight of a causal depthwise convolution, ``[C, 1, W]`` as published, and perhaps a bias ``[C]``."""

    def __init__(self, channels: int, width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)


class GatedDeltaNet(nn.Module):
    """Convolution, gated delta rule, gated norm; queries, keys, values, gates and strengths are one matmul,
    in that order, its last outputs being the inputs of the decays."""

    def __init__(self, config: TargetConfig, delta: DeltaConfig) -> None:
        super().__init__()
        self.config = delta
        heads, gates = delta.num_heads, delta.num_heads * delta.value_dim
        self.sizes = (delta.channels, gates, heads, heads)
        self.in_proj = Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.conv1d = ShortConvolution(delta.channels, delta.conv_width)
        self.A_log = nn.Parameter(torch.linspace(1.0, 16.0, heads).log())
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.norm = RMSNorm(delta.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(gates, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, number: int, attend: Attend) -> torch.Tensor:
        """``[T, H]`` -> ``[T, H]``; ``number`` of the layer among its kind."""
        delta, recur = self.config, recur_of(attend)
        mixed, gate, strength, step = self.in_proj(x).split(self.sizes, -1)
        mixed = recur.convolve(number, mixed, self.conv1d.weight[:, 0], None)
        mixed = F.silu(mixed)
        keys = delta.num_key_heads * delta.key_dim
        q, k, v = mixed.split((keys, keys, self.sizes[1]), -1)
        q, k = (_unit(part.unflatten(-1, (-1, delta.key_dim))) for part in (q, k))
        decay = -self.A_log.float().exp() * softplus(step.float() + self.dt_bias.float())
        v = v.unflatten(-1, (-1, delta.value_dim))
        inputs = Inputs(q * delta.key_dim**-0.5, k, v, decay, sigmoid(strength.float()))
        out = self.norm(recur.recur(number, inputs, delta=True))
        gated = out * F.silu(gate.float().view_as(out))
        return self.out_proj(gated.to(x.dtype).flatten(1))


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1, in fp32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LENGTH_EPS)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + exp(x))``; on a CPU in fp64, since the bits of its fp32 depend on an element's place."""
    return F.softplus(x.double()).to(x.dtype) if x.device.type == "cpu" else F.softplus(x)
