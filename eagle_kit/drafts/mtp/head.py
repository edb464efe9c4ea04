"""DeepSeek's multi-token prediction modules as a draft head (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Legend: T packed tokens, H hidden, V vocabulary, D modules.

A module is a decoder layer of the target's kind over ``eh_proj(cat(enorm(embedding), hnorm(feature)))``, a
norm, and the target's output layer. The feature of the first module is the target's final-normed state, and
every module passes on its own *normed* output, as in SGLang; vLLM passes on the state before that norm. One
module drafts every step; of several, module d drafts step d.
"""

from dataclasses import dataclass

import torch
from torch import nn

from eagle_kit.models.blocks.layers import RMSNorm
from eagle_kit.models.blocks.mla import make_attention
from eagle_kit.models.config import TargetConfig, TiedArchitecture
from eagle_kit.models.draft_head import Block, TiedHead
from eagle_kit.models.targets.llama import make_mlp
from eagle_kit.ops.linear import Linear


@dataclass(frozen=True)
class MTPConfig(TiedArchitecture):
    """Architecture of MTP modules.

    Attributes:
        decoder: a target's config whose last layer has the sizes of a module's decoder layer.
        num_modules: D.
        own_head: True if the output layer is the head's own instead of the target's.
    """

    decoder: TargetConfig
    num_modules: int = 1
    own_head: bool = False
    target: str = ""
    template_hash: str = ""

    @property
    def layer(self) -> TargetConfig:
        """:attr:`decoder`."""
        return self.decoder

    @property
    def owns_output(self) -> bool:
        """:attr:`own_head`."""
        return self.own_head

    @property
    def hidden_size(self) -> int:  # type: ignore[override]
        """H, the target's."""
        return self.decoder.hidden_size

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        """V, the target's."""
        return self.decoder.vocab_size

    @property
    def max_position_embeddings(self) -> int:  # type: ignore[override]
        """Positions of the target."""
        return self.decoder.max_position_embeddings


class SharedHead(nn.Module):
    """Norm in front of the output layer, which all modules share."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MTPModule(Block):
    """One module, with a normed output."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.enorm = RMSNorm(size, eps)
        self.hnorm = RMSNorm(size, eps)
        self.eh_proj = Linear(2 * size, size, bias=False)
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = make_attention(config, size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = make_mlp(config, config.num_layers)
        self.shared_head = SharedHead(config)

    def inputs(self, feature: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~eagle_kit.models.draft_head.Block`; attention's input is ``[T, H]``."""
        h = self.eh_proj(torch.cat((self.enorm(embeds), self.hnorm(feature)), -1))
        return self.input_layernorm(h), h

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """See :class:`~eagle_kit.models.draft_head.Block`."""
        normed, h = self.post_attention_layernorm.add(self.self_attn.o_proj(attended.flatten(1)), residual)
        return self.shared_head.norm.add(self.mlp(normed), h)[0]


class MTPHead(TiedHead):
    """D modules. Without an output layer of its own, :meth:`bind` must set the target's."""

    config: MTPConfig

    def __init__(self, config: MTPConfig) -> None:
        super().__init__(config)
        layer = config.layer
        self.layers = nn.ModuleList(MTPModule(layer) for _ in range(config.num_modules))
        self.lm_head = Linear(layer.hidden_size, layer.vocab_size, bias=False) if config.own_head else None

    @property
    def blocks(self) -> list[Block]:
        """The modules."""
        return list(self.layers)  # type: ignore[arg-type]

    @property
    def output(self) -> Linear:
        """The head's own output layer, or the target's."""
        return self.lm_head or super().output
