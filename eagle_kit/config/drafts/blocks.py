"""Heads that draft blocks of masks after captured states: DFlash and DSpark."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from eagle_kit.config.drafts.base import CapturedStatesHeadConfig
from eagle_kit.config.drafts.shared_training import (
    DPaceTrainingConfig,
    LossTrainingConfig,
    NoiseTrainingConfig,
)
from eagle_kit.config.training import RowSampling, TrainingConfig
from eagle_kit.core.errors import UserError


class BlockTrainingConfig(NoiseTrainingConfig, DPaceTrainingConfig, LossTrainingConfig):
    """Training of blocks after anchors."""

    num_anchors: int = Field(default=512, ge=1)
    """Anchors of a conversation, drawn anew in every optimiser step, each with a block after it; all tokens
    of responses where there are fewer.
    """

    @property
    def row_sampling(self) -> RowSampling | None:
        """See :class:`TrainingConfig`."""
        return RowSampling(most=self.num_anchors)


class DSparkTrainingConfig(BlockTrainingConfig):
    """Training of blocks after anchors, and of the confidence in their tokens."""

    confidence_weight: float = Field(default=1.0, gt=0.0)
    """Weight of the cross-entropy between the confidence in a token and that token's acceptance rate."""


class BlockHeadConfig(CapturedStatesHeadConfig):
    """Heads of Qwen3 layers over blocks of masks, with captured states as keys."""

    training_schema: ClassVar[type[TrainingConfig]] = BlockTrainingConfig

    draft_vocab_size: int | None = Field(default=None, ge=2)
    """Tokens that the head can propose by an output layer of its own, chosen by frequency in the supervised
    tokens. Null is every token, through the target's output layer.
    """

    aux_layer_ids: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Captured states, as "input of layer i"; null is five spread from 2 to L - 2."""

    sliding_window: int | None = Field(default=None, ge=33)
    """Tokens that all layers but the last attend to, their own included; more than ``training.ttt_length``.
    Null is all.
    """

    num_layers: int | None = Field(default=None, ge=1, le=64)
    """Decoder layers; null is 5."""

    mask_token_id: int | None = Field(default=None, ge=0)
    """Token whose embedding is the mask's. Null is the last one of the target's vocabulary."""

    block_size: int = Field(default=8, ge=2, le=32)
    """Rows of a block, the sampled token's included; ``training.ttt_length`` must be the tokens that it
    drafts, one less.
    """

    @model_validator(mode="after")
    def _nothing_is_set_in_vain(self) -> "BlockHeadConfig":
        if self.sliding_window is not None and self.num_layers == 1:
            raise UserError(
                "sliding_window is for all layers but the last, and num_layers is 1.",
                "Set head.num_layers above 1, or leave head.sliding_window out.",
            )
        if self.start_from is None and self.draft_vocab_size is None and self.lm_head_init == "random":
            raise UserError(
                "lm_head_init is random, but the head has the target's output layer.",
                "Set head.draft_vocab_size, or leave head.lm_head_init out.",
            )
        return self

    @property
    def num_counted_tokens(self) -> int | None:
        """See :class:`~eagle_kit.config.drafts.base.HeadConfig`; None if every token is proposed."""
        if self.draft_vocab_size is None:
            return None
        return super().num_counted_tokens


class DFlashHeadConfig(BlockHeadConfig):
    """DFlash."""

    kind: Literal["dflash"] = "dflash"
    """DFlash (arXiv 2602.06036)."""


class DSparkHeadConfig(BlockHeadConfig):
    """DSpark: DFlash whose logits are corrected by the token before, with a confidence head."""

    training_schema: ClassVar[type[TrainingConfig]] = DSparkTrainingConfig

    kind: Literal["dspark"] = "dspark"
    """DSpark (arXiv 2607.05147)."""

    block_size: int = Field(default=8, ge=2, le=32)
    """Rows of a block, each of which predicts the next token; ``training.ttt_length`` must be as many."""

    markov_rank: int = Field(default=256, ge=0, le=4096)
    """Rank of the correction of logits by the token before; 0 for none."""

    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    """``vanilla`` reads that token's embedding alone, ``gated`` and ``rnn`` the row too, and ``rnn`` all
    tokens before.
    """

    confidence_head: bool = True
    """Have a head that predicts how likely each token is accepted."""

    @model_validator(mode="after")
    def _form_has_a_rank(self) -> "DSparkHeadConfig":
        if self.markov_rank == 0 and self.markov_head_type != "vanilla":
            raise UserError(
                f"markov_head_type is {self.markov_head_type}, but markov_rank is 0.",
                "Set head.markov_rank above 0, or leave head.markov_head_type out.",
            )
        return self

    def check_training(self, training: TrainingConfig) -> None:
        """See :class:`~eagle_kit.config.drafts.base.HeadConfig`."""
        if not self.confidence_head and training.is_changed("confidence_weight"):
            raise UserError(
                "training.confidence_weight is set, but head.confidence_head is false.",
                "Leave one of them out.",
            )
