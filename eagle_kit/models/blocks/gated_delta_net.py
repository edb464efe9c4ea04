"""Layers with the gated delta rule (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

Legend: T packed tokens, H hidden, Hv / Hk heads of values and of queries and keys, V / K their sizes, C
channels and W width of the convolution.
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

L2_NORM_EPS = 1e-6
"""Added to the squared lengths by which queries and keys are normalised."""


class ShortConvolution(nn.Module):
    """Weight of a causal depthwise convolution, ``[C, 1, W]`` as published, and an optional bias ``[C]``."""

    def __init__(self, channels: int, width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(channels))
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)


class GatedDeltaNet(nn.Module):
    """Convolution, gated delta rule, gated norm.

    One matmul projects the input to queries, keys and values, then output gates, update strengths, and
    inputs of the decays.
    """

    def __init__(self, config: TargetConfig, delta: DeltaConfig) -> None:
        super().__init__()
        self.config = delta
        num_heads = delta.num_heads
        value_size = num_heads * delta.value_dim
        self.sizes = (delta.channels, value_size, num_heads, num_heads)
        self.in_proj = Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.conv1d = ShortConvolution(delta.channels, delta.conv_width)
        self.A_log = nn.Parameter(torch.linspace(1.0, 16.0, num_heads).log())
        self.dt_bias = nn.Parameter(torch.ones(num_heads))
        self.norm = RMSNorm(delta.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(value_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, number: int, attend: Attend) -> torch.Tensor:
        """Run the layer.

        Args:
            x: ``[T, H]``.
            number: index of the layer among those of its kind.
            attend: attention with recurrence.

        Returns:
            ``[T, H]``.
        """
        delta = self.config
        recur = recur_of(attend)
        value_size = self.sizes[1]
        key_size = delta.num_key_heads * delta.key_dim

        # Projection and convolution.
        mixed, gate, strength, step = self.in_proj(x).split(self.sizes, -1)
        mixed = F.silu(recur.convolve(number, mixed, self.conv1d.weight[:, 0], None))
        q, k, v = mixed.split((key_size, key_size, value_size), -1)

        # Inputs of the gated delta rule, in fp32 but for the values.
        q = _l2_norm(q.unflatten(-1, (-1, delta.key_dim))) * delta.key_dim**-0.5  # [T, Hk, K]
        k = _l2_norm(k.unflatten(-1, (-1, delta.key_dim)))  # [T, Hk, K]
        v = v.unflatten(-1, (-1, delta.value_dim))  # [T, Hv, V]
        decay = -self.A_log.float().exp() * softplus(step.float() + self.dt_bias.float())  # [T, Hv]
        inputs = Inputs(q, k, v, decay, sigmoid(strength.float()))

        # Outputs, normalised and gated.
        out = self.norm(recur.recur(number, inputs, delta=True))  # [T, Hv, V]
        out = out * F.silu(gate.float().view_as(out))
        return self.out_proj(out.to(x.dtype).flatten(1))


def _l2_norm(x: torch.Tensor) -> torch.Tensor:
    """Divide ``x [..., K]`` by its length, in fp32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_NORM_EPS)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + exp(x))``. On a CPU it is computed in fp64, because the last bits of torch's fp32 results
    depend on the position of an element in its tensor."""
    if x.device.type == "cpu":
        return F.softplus(x.double()).to(x.dtype)
    return F.softplus(x)
