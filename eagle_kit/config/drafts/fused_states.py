"""Heads that read captured states through ``fc``: EAGLE-3, with a layer of either attention, and P-EAGLE."""

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
    """Training of a P-EAGLE head, whose later steps are masks."""

    down_sample_ratio: float | None = Field(default=None, gt=0.0, le=1.0)
    """Step k is trained at a share ``max(ratio ** k, min)`` of the rows that could learn there, others in
    every optimiser step. Null is 0.8, 1 is all rows.
    """

    @property
    def effective_down_sample_ratio(self) -> float:
        """See :class:`DownSampleTrainingConfig`."""
        return 0.8 if self.down_sample_ratio is None else self.down_sample_ratio


class FusedStatesHeadConfig(CapturedStatesHeadConfig):
    """Heads whose ``fc`` joins captured states."""

    fc_norm: bool = False
    """One RMSNorm per captured state in front of ``fc`` (EAGLE-3.1, arXiv 2605.09992)."""

    norm_before_residual: bool = False
    """Take the layer's residual after its norm of the feature, as heads of the speculators project do."""

    norm_before_fc: bool = False
    """One RMSNorm over all captured states in front of ``fc`` (the same project's default)."""

    own_embedding: bool = False
    """An embedding of the head's own, which begins as the target's and is trained."""


class LlamaLayerHeadConfig(FusedStatesHeadConfig):
    """Heads with a layer of ordinary attention."""

    qk_norm: bool = False
    """Norms of queries and keys, as Qwen3's layers have them."""

    sliding_window: int | None = Field(default=None, ge=33)
    """Tokens that the layer attends to, its own included: a head's cost then ends with it; more than
    ``training.ttt_length``. Null is all.
    """


class AnyEagle3HeadConfig(FusedStatesHeadConfig):
    """EAGLE-3 with a layer of either attention."""

    training_schema: ClassVar[type[TrainingConfig]] = Eagle3TrainingConfig

    aux_layer_ids: tuple[int, ...] | None = None
    """Captured states, as "input of layer i"; null is ``(2, L//2, L-3)``, an empty list is the target's final
    states in their place.
    """

    norm_output: bool = False
    """Feed the normed state back (EAGLE-3.1)."""

    init: Literal["auto", "last-layer", "random"] = "auto"
    """``last-layer`` (the target's last layer behind its last captured state) or ``random``, which ``auto``
    is.
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
    """Captured states, as "input of layer i"; null is ``(2, L//2, L-3)``."""

    num_layers: int | None = Field(default=None, ge=1, le=64)
    """Decoder layers; null is 4."""

    mask_token_id: int | None = Field(default=None, ge=0)
    """Token whose embedding is the mask's in exported heads; choose one that texts do not have. Null is the
    last one of the target's vocabulary.
    """
