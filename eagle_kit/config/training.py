"""Keys of ``training:`` that all kinds of heads have; :mod:`eagle_kit.config.drafts` adds those of each kind.

Sizes are in tokens or packed sequences, times in seconds.
"""

from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from eagle_kit.config.options import Section
from eagle_kit.core.errors import UserError


class RowSampling(NamedTuple):
    """Rows that an optimiser step trains.

    Attributes:
        ratio: at depth d a share ``max(ratio ** d, floor)`` of the rows is trained.
        floor: least share.
        most: most rows of a document; None for all.
    """

    ratio: float = 1.0
    floor: float = 1.0
    most: int | None = None

    def shares(self, num_depths: int) -> tuple[float, ...]:
        """Share of the rows of each depth that is trained."""
        return tuple(max(self.ratio**depth, self.floor) for depth in range(num_depths))


class RegressionConfig(Section):
    """The loss of an EAGLE-1 head: its output shall be the target's next state and give its distribution."""

    feature_weight: float = Field(default=1.0, ge=0.0)
    """Weight of the smooth L1 distance to the target's state, the mean over its values (EAGLE)."""

    token_weight: float = Field(default=0.1, ge=0.0)
    """Weight of the cross-entropy against the target's distribution over all tokens (EAGLE)."""

    topk_weight: float = Field(default=0.0, ge=0.0)
    """Weight of the part of that cross-entropy that the target's best tokens make (HASS: 1.0)."""

    topk: int = Field(default=10, ge=1)
    """Number of the best tokens."""

    @model_validator(mode="after")
    def _something_is_learned(self) -> "RegressionConfig":
        if not self.feature_weight and not self.token_weight and not self.topk_weight:
            raise ValueError("one of the weights must be above 0")
        return self

    @model_validator(mode="after")
    def _nothing_is_set_in_vain(self) -> "RegressionConfig":
        if not self.topk_weight and self.topk != type(self).model_fields["topk"].default:
            raise ValueError("topk has no meaning unless topk_weight is above 0")
        return self


class FeatureNoise(Section):
    """Noise on the states that the head reads, the captured ones or, of ``eagle1``, the final one; the
    teacher's state has none.
    """

    kind: Literal["uniform", "gaussian", "dropout"]
    """``uniform``, ``gaussian``, or ``dropout`` (values set to zero, the others grown to make up)."""

    amount: float = Field(gt=0.0)
    """Half the width of the uniform, the standard deviation of the gaussian, or the probability of dropout,
    below 1.
    """

    unit: Literal["absolute", "rms"] = "absolute"
    """``absolute``; or ``rms``: ``amount`` times the root mean square of each captured layer's state at the
    token, because layers differ in size by orders of magnitude. Dropout knows no unit.
    """

    per_tokens: int | None = Field(default=None, ge=1)
    """``amount`` is that of conversations of so many tokens, longer ones have less in proportion; null is the
    same for all. EAGLE-1's noise is uniform, 0.1 per 512. Not for dropout.
    """

    @model_validator(mode="after")
    def _amount_fits_the_kind(self) -> "FeatureNoise":
        is_plain = self.unit == "absolute" and self.per_tokens is None
        if self.kind == "dropout" and (self.amount >= 1.0 or not is_plain):
            raise ValueError("dropout needs an amount below 1, its probability, and no unit nor per_tokens")
        return self


@dataclass(frozen=True)
class LearningSettings:
    """Settings of ``training:`` that only some kinds of head have, for code that is the same for all kinds.

    A setting that a kind does not have has its default here, which has no effect.
    """

    losses: dict[str, float] = field(default_factory=dict)
    lk_eta: float = 3.0
    regression: RegressionConfig | None = None
    confidence_weight: float = 0.0
    dpace_alpha: float | None = None
    detach_steps: bool = False
    feature_noise: FeatureNoise | None = None


class Curriculum(Section):
    """A growing number of steps of training-time test."""

    start: int = Field(default=1, ge=1)
    """Steps at the beginning; every number up to ``ttt_length`` then has an equal part of ``share``."""

    share: float = Field(default=0.3, gt=0.0, le=1.0)
    """Share of the schedule after which all ``ttt_length`` steps are trained."""


class TrainingConfig(Section):
    """Training-time test, loss, optimiser and schedule."""

    ttt_length: int = Field(default=7, ge=1, le=32)
    """Steps K of training-time test; 7 as published."""

    ttt_curriculum: Curriculum | None = None
    """Begin with fewer steps; null trains all from the start."""

    step_decay: float = Field(default=0.8, gt=0.0, le=1.0)
    """Weight of step k is ``step_decay ** k``, 0.8 as published; exclusive with ``step_weights``."""

    step_weights: tuple[float, ...] | None = None
    """Weight of each step, ``ttt_length`` numbers."""

    loss_rows: Literal["serving", "published"] = "serving"
    """Rows that are supervised at step k. ``serving``: row i if x[i + 1] and x[i + 2 + k] are of one
    response, where a draft round can be when serving. ``published``: row i if x[i + 1 + k] and x[i + 2 + k]
    are of one response, as in the code of EAGLE-3.
    """

    loss_normalisation: Literal["tokens", "sequence", "published"] = "tokens"
    """``tokens``: the mean over the supervised rows of the global batch, so long responses weigh more;
    ``sequence``: the mean over conversations of each one's own mean. Both divide by the sum of the step
    weights, so that the learning rate does not depend on ``ttt_length``. ``published``: as in the code of
    EAGLE-3, each conversation's sum over its rows and steps divided by the number of its tokens, prompts
    included, and the mean of that over conversations; not divided by the sum of the step weights.
    """

    optimizer: Literal["adamw", "muon"] = "adamw"
    """``adamw``; or ``muon`` for the matrices inside the head with AdamW for its output layer, norms and
    experts (torch's, arXiv 2502.16982, whose updates are scaled to AdamW's size).
    """

    learning_rate: float = Field(default=5.0e-4, gt=0.0)
    """Learning rate of AdamW after the warm-up. The code of EAGLE-3 has 5e-5."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's averages of the gradient and of its square."""

    eps: float = Field(default=1.0e-8, gt=0.0)
    """Number that AdamW adds to the divisor of an update."""

    weight_decay: float = Field(default=0.0, ge=0.0)
    """Weight decay of matrices, with AdamW and with Muon; vectors have none."""

    muon_learning_rate_ratio: float = Field(default=1.0, gt=0.0)
    """Muon's learning rate as a multiple of ``learning_rate``."""

    muon_momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Momentum of Muon."""

    ema_decay: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Keep an exponential moving average of the weights, which is what is validated, saved and served; null
    keeps none. Step t uses ``min(ema_decay, (1 + t) / (10 + t))``, so that the untrained weights are soon
    gone.
    """

    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Course after the warm-up: ``cosine``, ``linear``, ``constant``, or ``wsd`` (warm-up, stable, decay),
    which is constant until a linear end.
    """

    decay_ratio: float = Field(default=0.2, gt=0.0, le=1.0)
    """Share of the schedule that the linear end of ``wsd`` takes."""

    warmup: Literal["linear", "log"] = "linear"
    """``linear``; or ``log``, DeepSpeed's default: log(step) / log(steps of warm-up) of the rate."""

    warmup_steps: int | None = Field(default=None, ge=0)
    """Optimiser steps of warm-up; exclusive with ``warmup_ratio``."""

    warmup_ratio: float = Field(default=0.02, ge=0.0, lt=1.0)
    """Warm-up as a share of the schedule."""

    min_learning_rate_ratio: float = Field(default=0.05, ge=0.0, le=1.0)
    """``cosine``, ``linear`` and ``wsd`` end at this share of ``learning_rate``; ``constant`` does not fall
    and leaves it alone.
    """

    epochs: float = Field(default=1.0, gt=0.0)
    """Passes over the data; sets the length of the schedule unless ``max_steps`` does."""

    max_steps: int | None = Field(default=None, ge=1)
    """Length of the schedule in optimiser steps. The flag ``--max-steps`` stops earlier and leaves the
    schedule alone.
    """

    sequences_per_step: int = Field(default=4, ge=1)
    """Packed sequences of one optimiser step, over all processes."""

    gradient_accumulation: int | None = Field(default=None, ge=1)
    """Forwards per optimiser step in each process; null is one packed sequence per forward."""

    gradient_checkpointing: Literal["off", "steps"] = "off"
    """``steps`` keeps only what goes into every step of training-time test and runs the step again in the
    backward pass: less memory for about a third more time.
    """

    target_placement: str = Field(
        default="same", pattern=r"^(same|cpu|auto|fsdp|tensor-parallel|cuda(:\d+)?)$"
    )
    """Device of the target: ``same`` (the head's device), ``cpu``, ``cuda:N``, ``auto`` (its layers spread
    over all devices that a process sees), ``fsdp`` (its layers sharded over the processes, and gathered for a
    forward), or ``tensor-parallel`` (its heads and inner values cut over the processes, which run each one's
    row together).
    """

    clip_norm: float | None = Field(default=0.5, gt=0.0)
    """Largest gradient norm; null does not clip."""

    precision: Literal["auto", "float32", "tf32", "bfloat16"] = "auto"
    """``float32``; ``tf32`` (float32 with TF32 matmuls on CUDA); ``bfloat16`` (target and matmuls in
    bfloat16, weights of the head and optimiser in float32); ``auto`` is ``bfloat16`` on CUDA and ``float32``
    on a CPU.
    """

    cache_hidden_states: Literal["off", "disk"] = "off"
    """``disk`` keeps the target's states of every row in the cache directory, so that later epochs and runs
    skip the target forward.
    """

    state_format: Literal["computed", "bf16", "fp8"] = "computed"
    """Format of captured states: ``computed``, to the bit; ``bf16``; or ``fp8`` (e4m3 with a scale per token
    and layer). A ``data.store`` that has another one than is set is refused.
    """

    cpu_threads: int | None = Field(default=None, ge=1)
    """Threads per process on a CPU; null uses the cores shared out over the processes."""

    peer_timeout_s: float = Field(default=300.0, gt=0.0)
    """Seconds without a heartbeat of one of several processes, as of a machine without power or network,
    after which the others end.
    """

    save_every: int = Field(default=200, ge=1)
    """Optimiser steps between checkpoints."""

    keep_last: int = Field(default=2, ge=1)
    """Checkpoints kept besides ``best/``."""

    log_every: int = Field(default=1, ge=1)
    """Optimiser steps between reports to the tracker; ``metrics.jsonl`` gets every step."""

    @property
    def shares_target(self) -> bool:
        """True if all processes must run the target together."""
        return self.target_placement in ("fsdp", "tensor-parallel")

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError("both betas must lie in [0, 1)")
        return betas

    @model_validator(mode="after")
    def _nothing_is_set_in_vain(self) -> "TrainingConfig":
        needs = {
            "muon_learning_rate_ratio": ("optimizer", "muon"),
            "muon_momentum": ("optimizer", "muon"),
            "decay_ratio": ("schedule", "wsd"),
        }
        for name, (key, value) in needs.items():
            if self.is_changed(name) and getattr(self, key) != value:
                raise ValueError(f"{name} has no meaning unless {key} is {value}")
        self.refuse_both("step_decay", "step_weights")
        self.refuse_both("warmup_ratio", "warmup_steps")
        return self

    def is_changed(self, name: str) -> bool:
        """True if a setting has another value than its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    def refuse_both(self, name: str, other: str) -> None:
        """Raise UserError if ``name`` and ``other`` are both set; ``other`` would take effect."""
        if getattr(self, other) is None or not self.is_changed(name):
            return
        default = type(self).model_fields[name].default
        shown_default = "null" if default is None else default
        raise UserError(
            f"{name} is {getattr(self, name)}, but {other} is set too and would be what counts.",
            f"Set training.{other}=null, or training.{name}={shown_default}, which is its default.",
        )

    @model_validator(mode="after")
    def _curriculum_fits_the_steps(self) -> "TrainingConfig":
        if self.ttt_curriculum is not None and self.ttt_curriculum.start > self.ttt_length:
            raise ValueError(
                f"ttt_curriculum.start is {self.ttt_curriculum.start}, ttt_length is {self.ttt_length}"
            )
        return self

    @model_validator(mode="after")
    def _weights_fit_the_steps(self) -> "TrainingConfig":
        if self.step_weights is None:
            return self
        if len(self.step_weights) != self.ttt_length:
            raise ValueError(
                f"step_weights has {len(self.step_weights)} numbers, ttt_length is {self.ttt_length}"
            )
        if min(self.step_weights) < 0 or sum(self.step_weights) <= 0:
            raise ValueError("step_weights must be >= 0 and not all zero")
        if self.ttt_curriculum is not None and not sum(self.step_weights[: self.ttt_curriculum.start]):
            raise ValueError("step_weights are zero for all steps that ttt_curriculum starts with")
        return self

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each step: as given, or ``step_decay ** k``."""
        return self.step_weights or tuple(self.step_decay**k for k in range(self.ttt_length))

    @property
    def learning(self) -> LearningSettings:
        """Settings that only some kinds of head have, with the values of this kind's settings."""
        names = [each.name for each in fields(LearningSettings)]
        return LearningSettings(**{name: getattr(self, name) for name in names if hasattr(self, name)})

    @property
    def row_sampling(self) -> RowSampling | None:
        """Rows that an optimiser step trains; None for all."""
        return None
