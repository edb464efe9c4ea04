"""A mixture of experts (DeepSeek-V2, arXiv 2405.04434, section 2.2; DeepSeek-V3, arXiv 2412.19437, 2.1.2).

Legend: T tokens, E experts, K experts of a token, H hidden, I intermediate size of an expert.
"""

import torch
from torch import nn
from torch.nn import functional as F

from eagle_kit.models.blocks.layers import MLP, sigmoid
from eagle_kit.models.layer_configs import MoEConfig
from eagle_kit.ops.experts import PackedExperts, experts, fp8_experts, pack_experts
from eagle_kit.ops.fp8 import FP8Weight
from eagle_kit.ops.linear import Linear, MergedLinear, pack_merged, takes_packed

LEAST_SUM = 1e-20
"""Added to the sum that weights are divided by, so that they stay finite when all scores underflow."""


class Gate(Linear):
    """Top-k router: experts of each token and their weights, in fp32 for weights of any dtype. With expert
    parallelism experts have their numbers among those of this process, E of them, and E stands for others.

    ``e_score_correction_bias`` fp32 ``[E]`` takes part in the choice only, so no gradient reaches it.
    """

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__(hidden_size, config.num_experts, bias=False)
        self.config = config
        self.e_score_correction_bias = (
            nn.Parameter(torch.zeros(config.num_experts), requires_grad=False) if config.has_bias else None
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """``[T, H]`` -> experts int64 ``[T, K]`` and their weights fp32 ``[T, K]``."""
        if self.weight.dtype == x.dtype == torch.float32:
            return self.choose(super().forward(x))
        return self.choose(F.linear(x.float(), self.weight.float()))

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and weights, ``[T, K]`` each, from logits fp32 ``[T, E]``.

        A group's score is that of its best expert, or with a bias the sum of its best two; experts outside
        the best groups are not chosen.
        """
        config = self.config
        if config.scoring == "sigmoid":
            # On a CPU the last elements of a tensor are computed by other instructions than the rest: in fp32
            # a token's weights would depend on the number of tokens.
            scores = logits.double().sigmoid().float()
        else:
            scores = logits.softmax(-1)
        ranked = scores
        if self.e_score_correction_bias is not None:
            ranked = scores + self.e_score_correction_bias.float()
        if config.num_topk_groups < config.num_groups:
            groups = ranked.unflatten(-1, (config.num_groups, -1))
            best = groups.topk(min(2 if config.has_bias else 1, groups.shape[-1]), -1).values.sum(-1)
            kept = torch.zeros_like(best, dtype=torch.bool)
            kept = kept.scatter(1, best.topk(config.num_topk_groups, -1).indices, True)
            ranked = groups.masked_fill(~kept[:, :, None], float("-inf")).flatten(1)
        ids = ranked.topk(config.num_experts_per_token, -1).indices
        weights = scores.gather(1, ids)
        if config.normalises:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
        if (own := config.local_experts) is not None:
            local = ids - own.start
            ids = torch.where((local >= 0) & (local < len(own)), local, len(own))
        return ids, weights if config.scale == 1.0 else weights * config.scale


class Experts(nn.Module):
    """Routed experts: ``gate_up_proj [E, 2 I, H]``, the gate first, and ``down_proj [E, H, I]``."""

    _packed: PackedExperts | None = None

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        e, inner = config.num_local_experts, config.intermediate_size
        self.are_all = config.local_experts is None
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * inner, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(e, hidden_size, inner))

    def pack(self) -> None:
        """See :meth:`Linear.pack`."""
        self._packed = pack_experts(self.gate_up_proj, self.down_proj)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``[T, H]``, with experts and weights ``[T, K]`` -> ``[T, H]``."""
        weight = self.gate_up_proj, self.down_proj, self._packed
        return experts(x, ids, weights, *weight, are_all=self.are_all)


class FP8Experts(nn.Module):
    """Routed experts that hold :class:`~eagle_kit.ops.fp8.FP8Weight`, in place of :class:`Experts`; not
    trained.

    Attributes:
        gate_up_proj, down_proj: e4m3, shaped as those of :class:`Experts`.
        gate_up_scales, down_scales: fp32, see ``FP8Weight``.
    """

    def __init__(self, gate_up: FP8Weight, down: FP8Weight) -> None:
        super().__init__()
        self.gate_up_proj, self.gate_up_scales = _frozen(gate_up)
        self.down_proj, self.down_scales = _frozen(down)
        self.blocks = gate_up.block, down.block

    @property
    def quantized(self) -> tuple[FP8Weight, FP8Weight]:
        """The weights, ``[E, 2 I, H]`` and ``[E, H, I]``."""
        gate_up, down = self.blocks
        return (
            FP8Weight(self.gate_up_proj, self.gate_up_scales, gate_up),
            FP8Weight(self.down_proj, self.down_scales, down),
        )

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See :meth:`Experts.forward`."""
        return fp8_experts(x, ids, weights, *self.quantized)


def _frozen(weight: FP8Weight) -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(weight.values, requires_grad=False), nn.Parameter(weight.scales, requires_grad=False)


class MoE(nn.Module):
    """Routed experts, and shared experts that process every token."""

    _packed: MergedLinear | None = None

    def __init__(self, hidden_size: int, config: MoEConfig, *, bias: bool = False) -> None:
        super().__init__()
        self.gate = Gate(hidden_size, config)
        self.experts = Experts(hidden_size, config)
        shared = config.shared_intermediate_size
        self.shared_experts = MLP(hidden_size, shared, bias=bias) if shared else None
        self.shared_expert_gate = Linear(hidden_size, 1, bias=False) if config.gates_shared else None

    def pack(self) -> None:
        """See :meth:`Linear.pack`; the gate and the first layer of the shared experts are one matmul."""
        if self.shared_experts is not None:
            self._packed = pack_merged(self.gate, self.shared_experts.gate_up_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` -> ``[T, H]``."""
        shared = self.shared_experts
        if shared is None:
            return self.experts(x, *self.gate(x))
        if self._packed is not None and takes_packed(x, self._packed.weight):
            logits, gate_up = self._packed.outputs(x)
            return self.experts(x, *self.gate.choose(logits)) + self._gated(shared.down(gate_up), x)
        return self.experts(x, *self.gate(x)) + self._gated(shared(x), x)

    def _gated(self, shared: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return shared if self.shared_expert_gate is None else shared * sigmoid(self.shared_expert_gate(x))
