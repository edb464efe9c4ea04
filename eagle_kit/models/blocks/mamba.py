"""Mamba-2 layers (arXiv 2405.21060), as in Falcon-H1.

Legend: T packed tokens, H hidden, Hm heads, V size of a value, G groups of heads, K size of a key.
"""

import torch
from torch import nn
from torch.nn import functional as F

from eagle_kit.models.blocks.gated_delta_net import ShortConvolution, softplus
from eagle_kit.models.blocks.layers import Attend
from eagle_kit.models.blocks.recurrence import recur_of
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.layer_configs import MambaConfig
from eagle_kit.ops.linear import Linear
from eagle_kit.ops.norm import rms_norm
from eagle_kit.ops.recurrence import Inputs


class GroupedNorm(nn.Module):
    """RMSNorm of each of ``num_groups`` groups of channels."""

    def __init__(self, size: int, num_groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.num_groups = num_groups
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, size]`` -> the same shape."""
        groups = x.unflatten(-1, (self.num_groups, -1))
        ones = torch.ones(groups.shape[-1], dtype=x.dtype, device=x.device)
        return rms_norm(groups, ones, self.eps).flatten(1) * self.weight.to(x.dtype)


class Mamba2(nn.Module):
    """Convolution, recurrence, gate.

    One matmul projects the input to output gates, then the channels of the convolution (values, keys,
    queries) and the time steps.
    """

    def __init__(self, config: TargetConfig, mamba: MambaConfig) -> None:
        super().__init__()
        self.config = mamba
        self.sizes = (mamba.intermediate_size, mamba.channels, mamba.num_heads)
        self.in_proj = Linear(config.hidden_size, sum(self.sizes), bias=mamba.in_proj_bias)
        self.conv1d = ShortConvolution(mamba.channels, mamba.conv_width, bias=mamba.conv_bias)
        self.A_log = nn.Parameter(torch.arange(1.0, mamba.num_heads + 1).log())
        self.D = nn.Parameter(torch.ones(mamba.num_heads))
        self.dt_bias = nn.Parameter(torch.ones(mamba.num_heads))
        self.norm: GroupedNorm | None = None
        if mamba.has_norm:
            self.norm = GroupedNorm(mamba.intermediate_size, mamba.num_groups, config.rms_norm_eps)
        self.out_proj = Linear(mamba.intermediate_size, config.hidden_size, bias=mamba.out_proj_bias)

    def forward(self, x: torch.Tensor, number: int, attend: Attend) -> torch.Tensor:
        """Run the layer.

        Args:
            x: ``[T, H]``.
            number: index of the layer among those of its kind.
            attend: attention with recurrence.

        Returns:
            ``[T, H]``.
        """
        mamba = self.config
        recur = recur_of(attend)
        key_size = mamba.num_groups * mamba.state_dim

        # Projection and convolution.
        gate, mixed, step = self.in_proj(x).split(self.sizes, -1)
        mixed = F.silu(recur.convolve(number, mixed, self.conv1d.weight[:, 0], self.conv1d.bias))
        v, k, q = mixed.float().split((mamba.intermediate_size, key_size, key_size), -1)

        # Inputs of the recurrence, in fp32.
        q = q.unflatten(-1, (mamba.num_groups, -1))  # [T, G, K]
        k = k.unflatten(-1, (mamba.num_groups, -1))  # [T, G, K]
        v = v.unflatten(-1, (mamba.num_heads, -1))  # [T, Hm, V]
        step = softplus(step.float() + self.dt_bias.float()).clamp(*mamba.time_step_limit)  # [T, Hm]
        inputs = Inputs(q, k, v, -self.A_log.float().exp() * step, step)

        # Outputs with the skip connection D, normalised and gated.
        out = recur.recur(number, inputs, delta=False) + self.D.float()[:, None] * v  # [T, Hm, V]
        return self.out_proj(self._gated(out.flatten(1), gate.float()).to(x.dtype))

    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Multiply ``out [T, Hm * V]`` by its gate, before or after the norm."""
        if self.norm is None:
            return out * F.silu(gate)
        if self.config.norm_before_gate:
            return self.norm(out) * F.silu(gate)
        return self.norm(out * F.silu(gate))
