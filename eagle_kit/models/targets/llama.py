"""Target decoder of Llama 2 / 3 / 3.1+, Mistral, Qwen2 and Qwen3, and with experts, latent attention or
recurrent layers of Mixtral, Qwen3-MoE, DeepSeek-V2 / V3, GLM-4.5, Qwen3-Next, Qwen3.5 and Falcon-H1.

Parameters have Hugging Face's names without ``model.``, except that q, k, v and gate, up are fused
(``qkv_proj``, ``gate_up_proj``).

Legend: T packed tokens, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from eagle_kit.distributed.collectives import Ranks
from eagle_kit.models.blocks.gated_delta_net import GatedDeltaNet
from eagle_kit.models.blocks.layers import MLP, Attend, RMSNorm, Rope, ShardRows, shard_rows_of
from eagle_kit.models.blocks.mamba import Mamba2
from eagle_kit.models.blocks.mla import make_attention
from eagle_kit.models.blocks.moe import MoE
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.targets.target import LogitForm, Target, TargetOutput
from eagle_kit.ops.attention.variant import AttentionVariant
from eagle_kit.ops.backend import current_device
from eagle_kit.ops.linear import Linear
from eagle_kit.ops.rope import Rotation


def make_mlp(config: TargetConfig, layer: int) -> nn.Module:
    """MLP or mixture of experts of layer ``layer``."""
    if config.moe is None or layer in config.moe.dense_layers:
        return MLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
    return MoE(config.hidden_size, config.moe, bias=config.mlp_bias)


class DecoderLayer(nn.Module):
    """Pre-norm decoder layer with residuals: attention, attention beside Mamba-2, or the gated delta rule,
    then an MLP or experts.

    Args:
        config: architecture of the target.
        layer: index of the layer.
        ranks: the processes that share the target (tensor parallelism); None without others.

    Attributes:
        is_recurrent: True with the gated delta rule in place of attention.
        number: index of the layer among the recurrent layers, or among those with attention.
        shares_heads: True if ranks have different heads, whose outputs are summed; False if this rank has the
            attention of all heads.
    """

    def __init__(self, config: TargetConfig, layer: int, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.ranks = ranks
        self.shares_heads = not config.data_parallel_attention
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

        # Attention or the gated delta rule, and its number among the earlier layers.
        recurrent_layers: tuple[int, ...] = ()
        if config.delta is not None:
            recurrent_layers = config.delta.layers
        self.is_recurrent = layer in recurrent_layers
        num_recurrent = sum(each < layer for each in recurrent_layers)
        if config.delta is not None and self.is_recurrent:
            self.number = num_recurrent
            self.linear_attn = GatedDeltaNet(config, config.delta)
        else:
            self.number = layer - num_recurrent
            self.self_attn = make_attention(config, config.hidden_size)

        self.mamba: Mamba2 | None = None
        if config.mamba is not None:
            self.mamba = Mamba2(config, config.mamba)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = make_mlp(config, layer)

    def forward(
        self,
        normed: torch.Tensor,
        h: torch.Tensor,
        rotation: Rotation,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer.

        The caller adds the output of the MLP to the residual, in the kernel of the next norm.

        Args:
            normed: ``input_layernorm`` of ``h``, ``[T, H]``.
            h: residual ``[T, H]``.
            rotation: rotary embedding at the positions of the rows.
            attend: attention of the layer.

        Returns:
            The residual after attention and the output of the MLP, ``[T, H]`` each.
        """
        # Attention or recurrence.
        shard = shard_rows_of(attend)
        if self.is_recurrent:
            added = self.linear_attn(normed, self.number, attend)
        elif shard is not None:
            added = self._gathered(normed, rotation, attend, shard)
        else:
            added = self.self_attn(normed, rotation, self.number, attend)
        if self.mamba is not None:
            added = added + self.mamba(normed, self.number, attend)
        if self.shares_heads:
            added = self._summed(added)

        # MLP.
        normed, h = self.post_attention_layernorm.add(added, h)
        del added  # the MLP needs its memory
        return h, self._summed(self.mlp(normed))

    def _gathered(
        self, normed: torch.Tensor, rotation: Rotation, attend: Attend, shard: ShardRows
    ) -> torch.Tensor:
        """Compute attention for the rows of this rank, and gather the outputs ``[T, H]`` of all ranks.

        Args:
            rotation: rotary embedding at the rows of this rank.
            shard: rows of this rank, and where each row of the forward is among the gathered ones.
        """
        assert self.ranks is not None and not self.shares_heads
        local = normed[shard.rows]
        if len(local) > 0:
            local = self.self_attn(local, rotation, self.number, attend)
        padded = F.pad(local, (0, 0, 0, shard.most - len(local)))
        return self.ranks.stack(padded).flatten(0, 1)[shard.indices]

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the outputs ``[T, H]`` of all ranks."""
        if self.ranks is None:
            return x
        return self.ranks.sum(x)


class LlamaModel(Target):
    """Target of one of :data:`~eagle_kit.models.config.FAMILIES`.

    Args:
        config: architecture; with ``ranks`` that of this rank's model
            (:meth:`~eagle_kit.models.sharding.Sharding.rank_config`).
        ranks: the processes that share the target (tensor parallelism); None without others.
    """

    def __init__(self, config: TargetConfig, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.config = config
        self.logit_form = LogitForm(config.logit_scale)
        self.ranks = ranks
        self.has_whole_embedding = ranks is None

        # Ranks share embedding and output layer by tokens.
        num_tokens = config.vocab_size
        if ranks is not None:
            num_tokens = len(ranks.share.of(config.vocab_size))
        self.embed_tokens = nn.Embedding(num_tokens, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i, ranks) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rope = Rope(config.rope_dim, config.rope_theta, config.rope_scaling)
        self.lm_head = Linear(config.hidden_size, num_tokens, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self._devices: Sequence[torch.device] | None = None

    @property
    def variants(self) -> list[AttentionVariant]:
        """See :class:`Target`. All layers have the same variant."""
        return [self.config.attention] * self.config.num_attention_layers

    def place_layers(self, devices: Sequence[torch.device] | None) -> None:
        """See :class:`Target`."""
        if devices is not None:
            assert len(devices) == len(self.layers) + 1, "one device a layer, and one for the rest"
            assert devices[0] == devices[-1], "the first layer is on the device of the inputs"
        self._devices = devices

    @property
    def norm_weight(self) -> torch.Tensor:
        """See :class:`Target`."""
        return self.norm.weight

    def final_norm(self, states: torch.Tensor) -> torch.Tensor:
        """See :class:`Target`."""
        return self.norm(states)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, capture: tuple[int, ...] = ()
    ) -> TargetOutput:
        """See :class:`Target`."""
        assert len(self.layers) == self.config.num_layers, "the target was loaded without its layers"

        # Rotations of the rows whose attention this rank computes.
        shard = shard_rows_of(attend)
        if shard is not None:
            positions = positions[shard.rows]
        rotation = self.rope.at(positions)

        # Embeddings.
        h = self.embed(ids)
        if self.config.embedding_scale != 1.0:
            h = h * self.config.embedding_scale

        # Layers; each is followed by the norm of the next one, or by the final norm.
        norms: list[Any] = [layer.input_layernorm for layer in self.layers]
        norms.append(self.norm)
        captured: dict[int, torch.Tensor] = {}
        normed = norms[0](h)
        for i, layer in enumerate(self.layers):
            if i in capture:
                captured[i] = h
            if self._devices is not None:
                normed, h = self._run_placed_layer(i, norms[i + 1], normed, h, rotation, attend)
                continue
            h, added = layer(normed, h, rotation, attend)
            normed, h = norms[i + 1].add(added, h)
            del added  # the next layer needs its memory
        captured[len(self.layers)] = h

        # Captured hidden states, in the order of ``capture``.
        aux_hidden_states = h[:, :0]
        if capture:
            aux_hidden_states = torch.cat([captured[i].to(h.device) for i in capture], -1)
        return TargetOutput(normed, aux_hidden_states)

    def _run_placed_layer(
        self,
        i: int,
        next_norm: RMSNorm,
        normed: torch.Tensor,
        h: torch.Tensor,
        rotation: Rotation,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run layer i on its device, then the next norm on the device of the layer that it belongs to."""
        assert self._devices is not None
        device = self._devices[i]
        next_device = self._devices[i + 1]
        with current_device(device):
            h, added = self.layers[i](normed, h, rotation.to(device), attend)
        with current_device(next_device):
            return next_norm.add(added.to(next_device), h.to(next_device))
