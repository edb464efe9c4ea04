"""EAGLE-1 heads, which EAGLE-2 serves too."""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from eagle_kit.config.drafts.base import HeadConfig
from eagle_kit.config.drafts.shared_training import (
    DetachTrainingConfig,
    DownSampleTrainingConfig,
    NoiseTrainingConfig,
)
from eagle_kit.config.training import LearningSettings, RegressionConfig, TrainingConfig


class Eagle1TrainingConfig(DownSampleTrainingConfig, DetachTrainingConfig, NoiseTrainingConfig):
    """Training of an EAGLE-1 head, which learns the target's next state and its distribution."""

    regression: RegressionConfig | None = None
    """Weights of the loss; null are the published ones."""

    @property
    def learning(self) -> LearningSettings:
        """See :class:`TrainingConfig`."""
        return replace(super().learning, regression=self.regression or RegressionConfig())


class Eagle1HeadConfig(HeadConfig):
    """EAGLE-1 and 2, with a Llama layer; proposes any token through the target's own output layer."""

    training_schema: ClassVar[type[TrainingConfig]] = Eagle1TrainingConfig

    kind: Literal["eagle1"] = "eagle1"
    """EAGLE-1 (arXiv 2401.15077)."""

    own_embedding: bool = False
    """An embedding of the head's own, which begins as the target's and is trained."""

    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the MLP; null is the target's."""

    fc_bias: bool = True
    """A bias in ``fc``, as EAGLE and SGLang have it; vLLM has none."""
