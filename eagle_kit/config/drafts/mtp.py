"""Multi-token prediction modules."""

from typing import ClassVar, Literal

from pydantic import Field

from eagle_kit.config.drafts.base import HeadConfig
from eagle_kit.config.drafts.shared_training import (
    DetachTrainingConfig,
    DPaceTrainingConfig,
    LossTrainingConfig,
)
from eagle_kit.config.training import TrainingConfig


class MTPTrainingConfig(DetachTrainingConfig, DPaceTrainingConfig, LossTrainingConfig):
    """Training of MTP modules."""


class MTPHeadConfig(HeadConfig):
    """DeepSeek's multi-token prediction modules, which propose tokens through the target's output layer."""

    training_schema: ClassVar[type[TrainingConfig]] = MTPTrainingConfig

    kind: Literal["mtp"] = "mtp"
    """MTP (DeepSeek-V3, arXiv 2412.19437)."""

    num_modules: int | None = Field(default=None, ge=1, le=16)
    """1 drafts every step, and is trained on its own output; of several, each is trained for its own step,
    and ``training.ttt_length`` must be their number. Null is as many as the target's checkpoint has, or 1.
    """

    init: Literal["auto", "checkpoint", "last-layer", "random"] = "auto"
    """``checkpoint`` (the target's own modules), ``last-layer`` (copies of the target's last decoder layer)
    or ``random``; ``auto`` takes the first of these that can be had.
    """
