"""Mamba-2 layers (arXiv 2405.21060), as in Falcon-H1.

Legend: T packed tokens, H hidden, heads of V values each, G groups that share states of K.
"""

import torch
from torch import nn
from torch.nn import functional as F

from eagle_kit.models.blocks.delta import ShortConvolution, softplus
from eagle_kit.models.blocks.layers import Attend
from eagle_kit.models.blocks.recurrence import recur_of
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.layer_configs import MambaConfig
from eagle_kit.ops.linear import Linear
from eagle_kit.ops.norm import rms_norm
from eagle_kit.ops.recurrence import Inputs


class GroupedNorm(nn.Module):
    """RMSNorm of each of some groups of channels."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups, self.eps = groups, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, size]`` -> the same."""
        parts = x.unflatten(-1, (self.groups, -1))
        ones = torch.ones(parts.shape[-1], dtype=x.dtype, device=x.device)
        return rms_norm(parts, ones, self.eps).flatten(1) * self.weight.to(x.dtype)


class Mamba2(nn.Module):
    """Convolution, decayed sums, gate; gates, convolved channels and steps are one matmul, in that order."""

    def __init__(self, config: TargetConfig, mamba: MambaConfig) -> None:
        super().__init__()
        self.config = mamba
        self.sizes = (mamba.intermediate_size, mamba.channels, mamba.num_heads)
        self.in_proj = Linear(config.hidden_size, sum(self.sizes), bias=mamba.in_proj_bias)
        self.conv1d = ShortConvolution(mamba.channels, mamba.conv_width, bias=mamba.conv_bias)
        self.A_log = nn.Parameter(torch.arange(1.0, mamba.num_heads + 1).log())
        self.D, self.dt_bias = (nn.Parameter(torch.ones(mamba.num_heads)) for _ in range(2))
        self.norm = (
            GroupedNorm(mamba.intermediate_size, mamba.num_groups, config.rms_norm_eps)
            if mamba.has_norm
            else None
        )
        self.out_proj = Linear(mamba.intermediate_size, config.hidden_size, bias=mamba.out_proj_bias)

    def forward(self, x: torch.Tensor, number: int, attend: Attend) -> torch.Tensor:
        """``[T, H]`` -> ``[T, H]``; ``number`` of the layer among its kind."""
        mamba, recur = self.config, recur_of(attend)
        gate, mixed, step = self.in_proj(x).split(self.sizes, -1)
        mixed = F.silu(recur.convolve(number, mixed, self.conv1d.weight[:, 0], self.conv1d.bias))
        shared = mamba.num_groups * mamba.state_dim
        values, k, q = mixed.float().split((mamba.intermediate_size, shared, shared), -1)
        q, k = (part.unflatten(-1, (mamba.num_groups, -1)) for part in (q, k))
        v = values.unflatten(-1, (mamba.num_heads, -1))
        step = softplus(step.float() + self.dt_bias.float()).clamp(*mamba.time_step_limit)
        inputs = Inputs(q, k, v, -self.A_log.float().exp() * step, step)
        out = recur.recur(number, inputs, delta=False) + self.D.float()[:, None] * v
        return self.out_proj(self._gated(out.flatten(1), gate.float()).to(x.dtype))

    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if self.norm is None:
            return out * F.silu(gate)
        if self.config.norm_before_gate:
            return self.norm(out) * F.silu(gate)
        return self.norm(out * F.silu(gate))
