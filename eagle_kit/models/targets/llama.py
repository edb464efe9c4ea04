"""Target decoders: Llama 2 / 3 / 3.1+, Mistral, Qwen2, Qwen3; with other layers inside, Mixtral, Qwen3-MoE,
DeepSeek-V2 / V3, GLM-4.5, Qwen3-Next, Qwen3.5 and Falcon-H1.

Legend: T packed tokens, H hidden, V vocabulary. Parameters have Hugging Face's names without ``model.``,
except that q, k, v and gate, up are fused (``qkv_proj``, ``gate_up_proj``).
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
    """Pre-norm attention, Mamba-2 beside it, or the gated delta rule, and MLP or experts, with residuals."""

    def __init__(self, config: TargetConfig, layer: int, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.ranks, self.shares_heads = ranks, not config.attends_whole
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        recurrent = () if config.delta is None else config.delta.layers
        self.number = sum((each in recurrent) == (layer in recurrent) for each in range(layer))
        """Of the layer among those of its kind."""
        if config.delta is not None and layer in recurrent:
            self.linear_attn = GatedDeltaNet(config, config.delta)
        else:
            self.self_attn = make_attention(config, config.hidden_size)
        self.mamba = None if config.mamba is None else Mamba2(config, config.mamba)
        self.is_recurrent = layer in recurrent
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = make_mlp(config, layer)

    def forward(
        self,
        normed: torch.Tensor,
        h: torch.Tensor,
        rotation: Rotation,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer on ``h [T, H]`` and its norm -> ``h`` after attention, and the MLP's output, which
        the next norm adds because it reads both."""
        if self.is_recurrent:
            added = self.linear_attn(normed, self.number, attend)
        elif (shard := shard_rows_of(attend)) is not None:
            added = self._gathered(normed, rotation, attend, shard)
        else:
            added = self.self_attn(normed, rotation, self.number, attend)
        if self.mamba is not None:
            added = added + self.mamba(normed, self.number, attend)
        if self.shares_heads:
            added = self._summed(added)
        normed, h = self.post_attention_layernorm.add(added, h)
        del added  # the MLP needs its memory
        return h, self._summed(self.mlp(normed))

    def _gathered(
        self, normed: torch.Tensor, rotation: Rotation, attend: Attend, shard: ShardRows
    ) -> torch.Tensor:
        """Compute attention for the rows of this rank, and gather the outputs ``[T, H]`` of all ranks.

        Args:
            rotation: rotary embedding at the rows of this rank.
        """
        assert self.ranks is not None and not self.shares_heads
        mine = normed[shard.rows]
        if len(mine):
            mine = self.self_attn(mine, rotation, self.number, attend)
        padded = F.pad(mine, (0, 0, 0, shard.most - len(mine)))
        return self.ranks.stack(padded).flatten(0, 1)[shard.indices]

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of what every rank's heads or inner values give."""
        return x if self.ranks is None else self.ranks.sum(x)


class LlamaModel(Target):
    """Target of the families that are written here.

    Args:
        config: with ``ranks``, of this rank's part (:meth:`~eagle_kit.models.sharding.Sharding.rank_config`).
        ranks: the processes that share it.
    """

    def __init__(self, config: TargetConfig, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.config, self.logit_form = config, LogitForm(config.logit_scale)
        self.ranks, self.has_whole_embedding = ranks, ranks is None
        num_words = config.vocab_size if ranks is None else len(ranks.share.of(config.vocab_size))
        self.embed_tokens = nn.Embedding(num_words, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i, ranks) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rope = Rope(config.rope_dim, config.rope_theta, config.rope_scaling)
        self.lm_head = Linear(config.hidden_size, num_words, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self._devices: Sequence[torch.device] | None = None

    @property
    def variants(self) -> list[AttentionVariant]:
        """See :class:`Target`: all layers attend alike."""
        return [self.config.attention] * self.config.num_attention_layers

    def place_layers(self, devices: Sequence[torch.device] | None) -> None:
        """See :class:`Target`."""
        assert devices is None or (len(devices) == len(self.layers) + 1 and devices[0] == devices[-1])
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
        shard = shard_rows_of(attend)
        rotation = self.rope.at(positions if shard is None else positions[shard.rows])
        h = self.embed(ids)
        if self.config.embedding_scale != 1.0:
            h = h * self.config.embedding_scale
        states: dict[int, torch.Tensor] = {}
        norms: list[Any] = [*(layer.input_layernorm for layer in self.layers), self.norm]
        normed = norms[0](h)
        for i, layer in enumerate(self.layers):
            if i in capture:
                states[i] = h
            if self._devices is not None:
                normed, h = self._layer_elsewhere(i, norms[i + 1], normed, h, rotation, attend)
                continue
            h, added = layer(normed, h, rotation, attend)
            normed, h = norms[i + 1].add(added, h)
            del added  # the next layer needs its memory
        states[len(self.layers)] = h
        aux = torch.cat([states[i].to(h.device) for i in capture], -1) if capture else h[:, :0]
        return TargetOutput(normed, aux)

    def _layer_elsewhere(
        self,
        i: int,
        next_norm: RMSNorm,
        normed: torch.Tensor,
        h: torch.Tensor,
        rotation: Rotation,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run layer i on its device, then the next norm on the device of the layer it belongs to."""
        assert self._devices is not None
        here, there = self._devices[i], self._devices[i + 1]
        with current_device(here):
            h, added = self.layers[i](normed, h, rotation.to(here), attend)
        with current_device(there):
            return next_norm.add(added.to(there), h.to(there))
