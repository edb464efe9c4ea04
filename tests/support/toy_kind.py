"""A kind of head made up for tests: its module and its kind, as the tree has them in two files.

The head reads the target's last state and the embedding of the token after it: one linear layer, one head of
attention, no MLP.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from eagle_kit.config.drafts.base import HeadConfig
from eagle_kit.config.drafts.shared_training import LossTrainingConfig
from eagle_kit.config.train import TrainConfig
from eagle_kit.drafts.base.kind import HeadKind
from eagle_kit.drafts.files.config_json import layer_to_dict
from eagle_kit.drafts.files.draft_files import DraftFiles
from eagle_kit.models.blocks.layers import Attention, RMSNorm
from eagle_kit.models.config import DecoderConfig, TargetConfig, TiedArchitecture
from eagle_kit.models.config_values import read_size
from eagle_kit.models.draft_head import Block, TiedHead
from eagle_kit.ops.linear import Linear


@dataclass(frozen=True)
class ToyConfig(DecoderConfig, TiedArchitecture):
    """Architecture of a toy head: sizes of its target, and one head of attention."""

    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 8
    intermediate_size: int = 0
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    target: str = ""
    template_hash: str = ""


class ToyHead(TiedHead, Block):
    """Toy head. It is its own single block."""

    config: ToyConfig
    self_attn: Attention

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.fc = Linear(2 * size, size, bias=False)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.self_attn = Attention(config, size)

    @property
    def blocks(self) -> list[Block]:
        """The head itself."""
        return [self]

    def inputs(self, feature: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~eagle_kit.models.draft_head.Block`."""
        x = self.fc(torch.cat((embeds, feature), -1))
        return self.norm(x), x

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """See :class:`~eagle_kit.models.draft_head.Block`; there is no MLP."""
        return residual + self.self_attn.o_proj(attended.flatten(1))


class ToyHeadConfig(HeadConfig):
    """What a training config may say of a toy."""

    training_schema = LossTrainingConfig

    kind: Literal["toy"] = "toy"


class ToyTrainConfig(TrainConfig):
    """A run that trains a toy. A kind of the tree has a line in the union of ``config/drafts`` instead."""

    head: ToyHeadConfig = ToyHeadConfig()  # type: ignore[assignment]


class ToyKind(HeadKind[ToyConfig, ToyHead, ToyHeadConfig]):
    """Toy heads on disk, in training and in service."""

    name = "toy"
    title = "Toy draft head"
    algorithms = ("TOY",)
    config_class = ToyConfig
    head_class = ToyHead
    trained_as = ("toy",)

    def recognises(self, files: DraftFiles) -> bool:
        """See :class:`~eagle_kit.drafts.base.kind.DraftKind`."""
        return files.architecture == "ToyDraft"

    def read_config(self, files: DraftFiles, target: TargetConfig | None = None) -> ToyConfig:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        keys = ("hidden_size", "vocab_size", "max_position_embeddings")
        sizes: dict[str, Any] = {key: read_size(files.config, key, files.where) for key in keys}
        return ToyConfig(**sizes, **files.about)

    def write_config(self, config: ToyConfig) -> dict[str, Any]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        return {"architectures": ["ToyDraft"], **layer_to_dict(config, config.rms_norm_eps)}

    def describe(self, config: ToyConfig, dtype: str) -> str:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        return f"One linear layer of {config.hidden_size} values in {dtype}."

    def new_config(self, settings: ToyHeadConfig, target: TargetConfig) -> ToyConfig:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        return ToyConfig(target.hidden_size, target.vocab_size, target.max_position_embeddings)
