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
    """Top-k router: experts of each token and their weights, in fp32 for weights of any dtype.

    With expert parallelism, experts are numbered among the E local ones of this process, and E stands for all
    others.

    Attributes:
        e_score_correction_bias: fp32 ``[E]``, added to the scores for the choice of experts only, so it has
            no gradient; None where the config has none.
    """

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__(hidden_size, config.num_experts, bias=False)
        self.config = config
        self.e_score_correction_bias: nn.Parameter | None = None
        if config.has_bias:
            self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """``[T, H]`` -> experts int64 ``[T, K]`` and their weights fp32 ``[T, K]``."""
        if self.weight.dtype == x.dtype == torch.float32:
            return self.choose(super().forward(x))
        return self.choose(F.linear(x.float(), self.weight.float()))

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of each token.

        The score of a group is that of its best expert, or with a bias the sum of its best two. Experts
        outside the best groups are not chosen.

        Args:
            logits: fp32 ``[T, E]``.

        Returns:
            Experts int64 ``[T, K]`` and their weights fp32 ``[T, K]``.
        """
        # Scores of experts.
        config = self.config
        if config.scoring == "sigmoid":
            # On a CPU the last elements of a tensor are computed by other instructions than the rest: in fp32
            # a token's weights would depend on the number of tokens.
            scores = logits.double().sigmoid().float()
        else:
            scores = logits.softmax(-1)

        # Scores for the choice: with the bias, and -inf outside the best groups.
        ranked = scores
        if self.e_score_correction_bias is not None:
            ranked = scores + self.e_score_correction_bias.float()
        if config.num_topk_groups < config.num_groups:
            groups = ranked.unflatten(-1, (config.num_groups, -1))  # [T, groups, E / groups]
            num_best = 1
            if config.has_bias:
                num_best = min(2, groups.shape[-1])
            group_scores = groups.topk(num_best, -1).values.sum(-1)
            best_groups = group_scores.topk(config.num_topk_groups, -1).indices
            is_best = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, best_groups, True)
            ranked = groups.masked_fill(~is_best[:, :, None], float("-inf")).flatten(1)

        # The best experts, weighted by their scores.
        ids = ranked.topk(config.num_experts_per_token, -1).indices
        weights = scores.gather(1, ids)
        if config.normalises:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
        if config.scale != 1.0:
            weights = weights * config.scale

        # Numbers among the local experts.
        local_experts = config.local_experts
        if local_experts is not None:
            num_local = len(local_experts)
            local_ids = ids - local_experts.start
            is_local = (local_ids >= 0) & (local_ids < num_local)
            ids = torch.where(is_local, local_ids, num_local)
        return ids, weights


class Experts(nn.Module):
    """Routed experts: ``gate_up_proj [E, 2 I, H]``, the gate first, and ``down_proj [E, H, I]``."""

    _packed: PackedExperts | None = None

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        num_experts = config.num_local_experts
        size = config.intermediate_size
        self.are_all = config.local_experts is None
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, size))

    def pack(self) -> None:
        """See :meth:`Linear.pack`."""
        self._packed = pack_experts(self.gate_up_proj, self.down_proj)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``[T, H]``, with experts and weights ``[T, K]`` -> ``[T, H]``."""
        return experts(x, ids, weights, self.gate_up_proj, self.down_proj, self._packed, are_all=self.are_all)


class FP8Experts(nn.Module):
    """Routed experts with fp8 weights, in place of :class:`Experts`; not trained.

    Attributes:
        gate_up_proj: e4m3, shaped as that of :class:`Experts`.
        gate_up_scales: fp32, see :class:`~eagle_kit.ops.fp8.FP8Weight`.
        down_proj: e4m3, shaped as that of :class:`Experts`.
        down_scales: fp32.
        blocks: rows and columns of ``gate_up_proj`` that share a scale, and those of ``down_proj``.
    """

    def __init__(self, gate_up: FP8Weight, down: FP8Weight) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(gate_up.values, requires_grad=False)
        self.gate_up_scales = nn.Parameter(gate_up.scales, requires_grad=False)
        self.down_proj = nn.Parameter(down.values, requires_grad=False)
        self.down_scales = nn.Parameter(down.scales, requires_grad=False)
        self.blocks = (gate_up.block, down.block)

    @property
    def quantized(self) -> tuple[FP8Weight, FP8Weight]:
        """Weights ``[E, 2 I, H]`` and ``[E, H, I]``."""
        gate_up_block, down_block = self.blocks
        gate_up = FP8Weight(self.gate_up_proj, self.gate_up_scales, gate_up_block)
        down = FP8Weight(self.down_proj, self.down_scales, down_block)
        return gate_up, down

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See :meth:`Experts.forward`."""
        gate_up, down = self.quantized
        return fp8_experts(x, ids, weights, gate_up, down)


class MoE(nn.Module):
    """Routed experts, and shared experts that process every token."""

    _packed: MergedLinear | None = None

    def __init__(self, hidden_size: int, config: MoEConfig, *, bias: bool = False) -> None:
        super().__init__()
        self.gate = Gate(hidden_size, config)
        self.experts = Experts(hidden_size, config)
        self.shared_experts: MLP | None = None
        self.shared_expert_gate: Linear | None = None
        if config.shared_intermediate_size:
            self.shared_experts = MLP(hidden_size, config.shared_intermediate_size, bias=bias)
        if config.gates_shared:
            self.shared_expert_gate = Linear(hidden_size, 1, bias=False)

    def pack(self) -> None:
        """See :meth:`Linear.pack`; the gate and the first layer of the shared experts are one matmul."""
        if self.shared_experts is not None:
            self._packed = pack_merged(self.gate, self.shared_experts.gate_up_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` -> ``[T, H]``."""
        # Routed experts alone.
        if self.shared_experts is None:
            ids, weights = self.gate(x)
            return self.experts(x, ids, weights)

        # The gate and the shared experts in one matmul.
        if self._packed is not None and takes_packed(x, self._packed.weight):
            logits, gate_up = self._packed.outputs(x)
            ids, weights = self.gate.choose(logits)
            return self.experts(x, ids, weights) + self._gated(self.shared_experts.down(gate_up), x)

        ids, weights = self.gate(x)
        return self.experts(x, ids, weights) + self._gated(self.shared_experts(x), x)

    def _gated(self, shared: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Multiply the output ``[T, H]`` of the shared experts by their gate, if they have one."""
        if self.shared_expert_gate is None:
            return shared
        return shared * sigmoid(self.shared_expert_gate(x))
