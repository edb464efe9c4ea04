"""Keys of ``training:`` that several kinds of heads have, a class for each group of them."""

from typing import Any

from pydantic import Field, field_validator, model_validator

from eagle_kit.config.training import FeatureNoise, RowSampling, TrainingConfig
from eagle_kit.core.errors import UserError

LOSSES = ("ce", "hard-ce", "kl", "reverse-kl", "tv", "lk-alpha", "lk-hybrid")
"""Losses of ``training.loss``."""


class LossTrainingConfig(TrainingConfig):
    """Heads that learn the target's distribution, or the text."""

    loss: str | dict[str, float] = "ce"
    """``ce``, soft cross-entropy over the draft vocabulary; ``hard-ce``, cross-entropy with the text's token,
    as DFlash's authors train; ``kl``, the divergence (same gradient, 0 at best); ``reverse-kl``; ``tv``,
    total variation, 1 minus the acceptance rate; ``lk-alpha``, the rate's negative logarithm; ``lk-hybrid``,
    from ``kl`` to ``tv`` as the rate grows. Formulas and sources are in
    ``eagle_kit/ops/draft_loss/reference.py``. Or several with their weights, for example ``{ce: 0.1, tv:
    1.8}`` (DSpark's).
    """

    lk_eta: float = Field(default=3.0, gt=0.0)
    """Rate in the loss ``lk-hybrid``: ``kl`` weighs ``exp(-lk_eta * acceptance rate)``, ``tv`` the rest."""

    @field_validator("loss", mode="before")
    @classmethod
    def _losses_are_known(cls, loss: Any) -> Any:
        weights: dict[Any, Any] = {}
        if isinstance(loss, str):
            weights = {loss: 1.0}
        elif isinstance(loss, dict):
            weights = loss
        are_numbers = all(type(weight) in (int, float) for weight in weights.values())
        if not weights or set(weights) - set(LOSSES) or not are_numbers or min(weights.values()) <= 0:
            raise ValueError(
                f"use one of {', '.join(LOSSES)}, or several with weights above 0 such as "
                "{ce: 0.1, tv: 0.9}"
            )
        if isinstance(loss, str):
            return loss
        return {name: float(weight) for name, weight in weights.items()}

    @model_validator(mode="after")
    def _eta_is_used(self) -> "LossTrainingConfig":
        if "lk-hybrid" not in self.losses and self.is_changed("lk_eta"):
            raise ValueError("lk_eta has no meaning unless loss has lk-hybrid")
        return self

    @property
    def losses(self) -> dict[str, float]:
        """Weight of every loss of :attr:`loss`."""
        if isinstance(self.loss, str):
            return {self.loss: 1.0}
        return self.loss


class DPaceTrainingConfig(TrainingConfig):
    """Heads whose steps may be weighed by the draft's own confidence."""

    dpace_alpha: float | None = Field(default=None, gt=0.0, le=1.0)
    """Weigh the steps of each row by the draft's confidence as D-PACE does (arXiv 2605.18810, there 0.5), in
    place of ``step_decay`` and ``step_weights``: the nearer to 1, the less a weak step takes from those
    after it. Null does not. See ``eagle_kit/objective/dpace.py``.
    """

    @model_validator(mode="after")
    def _steps_have_one_weight(self) -> "DPaceTrainingConfig":
        self.refuse_both("step_decay", "dpace_alpha")
        self.refuse_both("step_weights", "dpace_alpha")
        return self

    @property
    def weights(self) -> tuple[float, ...]:
        """See :class:`TrainingConfig`; 1 with :attr:`dpace_alpha`."""
        if self.dpace_alpha is not None:
            return (1.0,) * self.ttt_length
        return super().weights


class NoiseTrainingConfig(TrainingConfig):
    """Heads that may read the target's states with noise."""

    feature_noise: FeatureNoise | None = None
    """Null adds none."""


class DetachTrainingConfig(TrainingConfig):
    """Heads whose steps read their own states of the step before."""

    detach_steps: bool = False
    """No gradient flows through the state that a step hands to the next (HASS)."""


class DownSampleTrainingConfig(TrainingConfig):
    """Heads whose later steps may be trained at a share of the rows."""

    down_sample_ratio: float | None = Field(default=None, gt=0.0, le=1.0)
    """Step k is trained at a share ``max(ratio ** k, min)`` of the rows that could learn there, others in
    every optimiser step. Null is 1, all rows.
    """

    down_sample_ratio_min: float = Field(default=0.2, ge=0.0, le=1.0)
    """Least share of ``down_sample_ratio``."""

    @property
    def effective_down_sample_ratio(self) -> float:
        """:attr:`down_sample_ratio`, or the kind's own default if it is null."""
        return 1.0 if self.down_sample_ratio is None else self.down_sample_ratio

    @model_validator(mode="after")
    def _rows_may_be_left_out(self) -> "DownSampleTrainingConfig":
        ratio = self.effective_down_sample_ratio
        if ratio == 1.0:
            if self.is_changed("down_sample_ratio_min"):
                raise UserError(
                    "down_sample_ratio_min is set, but no step leaves rows out.",
                    "Leave it out, or set training.down_sample_ratio below 1.",
                )
            return self
        if self.learning.dpace_alpha is not None:
            raise UserError(
                f"down_sample_ratio is {ratio}, but dpace_alpha needs all steps of a row.",
                "Leave one of the two out.",
            )
        if self.loss_normalisation != "tokens":
            raise UserError(
                f"down_sample_ratio is {ratio}, but loss_normalisation={self.loss_normalisation} weighs "
                "steps by rows that are left out.",
                "Set training.loss_normalisation=tokens, or training.down_sample_ratio=1.",
            )
        return self

    @property
    def row_sampling(self) -> RowSampling | None:
        """See :class:`TrainingConfig`."""
        ratio = self.effective_down_sample_ratio
        if ratio == 1.0:
            return None
        return RowSampling(ratio, self.down_sample_ratio_min)
