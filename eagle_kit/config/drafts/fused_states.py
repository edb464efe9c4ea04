"""Options of EAGLE-3 and P-EAGLE heads: the sections ``head`` and ``training`` of a training config.

Both kinds fuse captured hidden states of the target by ``fc``. ``FusedStatesHeadConfig`` has the options of
both. The docstring below an option is its help text.
"""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from eagle_kit.config.drafts.base import CapturedStatesHeadConfig
from eagle_kit.config.drafts.shared_training import (
    DetachTrainingConfig,
    DownSampleTrainingConfig,
    DPaceTrainingConfig,
    LossTrainingConfig,
    NoiseTrainingConfig,
)
from eagle_kit.config.training import TrainingConfig
from eagle_kit.core.errors import UserError


class Eagle3TrainingConfig(
    DownSampleTrainingConfig,
    DetachTrainingConfig,
    NoiseTrainingConfig,
    DPaceTrainingConfig,
    LossTrainingConfig,
):
    """Training-time test of an EAGLE-3 head."""


class PEagleTrainingConfig(DownSampleTrainingConfig, NoiseTrainingConfig, LossTrainingConfig):
    """Training of a P-EAGLE head, whose later steps read masks."""

    down_sample_ratio: float | None = Field(default=None, gt=0.0, le=1.0)
    """Step k is trained at a share ``max(ratio ** k, min)`` of its rows, drawn anew in every optimiser step.
    Null is 0.8, 1 is all rows.
    """

    @property
    def effective_down_sample_ratio(self) -> float:
        """See :class:`DownSampleTrainingConfig`."""
        return 0.8 if self.down_sample_ratio is None else self.down_sample_ratio


class FusedStatesHeadConfig(CapturedStatesHeadConfig):
    """Heads whose ``fc`` fuses captured hidden states (EAGLE-3, section 3.1)."""

    fc_norm: bool = False
    """One RMSNorm for each captured layer in front of ``fc`` (EAGLE-3.1, arXiv 2605.09992)."""

    norm_before_residual: bool = False
    """The residual of the decoder layer is the normed feature instead of the feature, as in the speculators
    project.
    """

    norm_before_fc: bool = False
    """One RMSNorm over all captured states in front of ``fc`` (the default of speculators)."""

    own_embedding: bool = False
    """Train an embedding of the head's own, which starts as a copy of the target's. The published heads read
    the target's.
    """


class LlamaLayerHeadConfig(FusedStatesHeadConfig):
    """Heads with Llama layers."""

    qk_norm: bool = False
    """RMSNorms of queries and keys, as in Qwen3."""

    sliding_window: int | None = Field(default=None, ge=33)
    """Number of tokens that the layer attends to, its own included, more than ``training.ttt_length``. Null
    is all.
    """


class AnyEagle3HeadConfig(FusedStatesHeadConfig):
    """EAGLE-3 with a Llama layer or latent attention."""

    training_schema: ClassVar[type[TrainingConfig]] = Eagle3TrainingConfig

    aux_layer_ids: tuple[int, ...] | None = None
    """Captured layers, as "input of layer i". Null is ``(2, L//2, L-3)``. With an empty list the head reads
    the target's final hidden states instead.
    """

    norm_output: bool = False
    """The next step reads the output after the last norm instead of before it (EAGLE-3.1)."""

    init: Literal["auto", "last-layer", "random"] = "auto"
    """First weights of the decoder layer: ``last-layer`` copies the target's last layer, ``random`` does not.
    ``auto`` is ``random``.
    """

    @model_validator(mode="after")
    def _there_are_states_to_norm(self) -> "AnyEagle3HeadConfig":
        if self.aux_layer_ids == () and (self.fc_norm or self.norm_before_fc):
            raise UserError(
                "aux_layer_ids is empty, and fc_norm and norm_before_fc norm captured states.",
                "Leave them out, or name inputs of layers.",
            )
        return self


class Eagle3HeadConfig(AnyEagle3HeadConfig, LlamaLayerHeadConfig):
    """EAGLE-3 with a Llama layer."""

    kind: Literal["eagle3"] = "eagle3"
    """EAGLE-3 (arXiv 2503.01840) with a Llama layer."""


class LatentEagle3HeadConfig(AnyEagle3HeadConfig):
    """EAGLE-3 with a layer of latent attention, for targets that have it."""

    kind: Literal["eagle3-mla"] = "eagle3-mla"
    """EAGLE-3 with a layer of latent attention."""


class PEagleHeadConfig(LlamaLayerHeadConfig):
    """P-EAGLE: several Llama layers, all steps in one pass."""

    training_schema: ClassVar[type[TrainingConfig]] = PEagleTrainingConfig

    kind: Literal["p-eagle"] = "p-eagle"
    """P-EAGLE (arXiv 2602.01469)."""

    aux_layer_ids: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Captured layers, as "input of layer i". Null is ``(2, L//2, L-3)``."""

    num_layers: int | None = Field(default=None, ge=1, le=64)
    """Number of decoder layers. Null is 4."""

    mask_token_id: int | None = Field(default=None, ge=0)
    """Token whose embedding is the mask's in exported heads. Choose one that texts do not contain. Null is
    the last token of the target's vocabulary.
    """
