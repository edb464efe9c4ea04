"""Learning rate and length of training-time test by step: pure functions, so that resume needs no state."""

import math
from dataclasses import dataclass

from eagle_kit.config.train import TrainingConfig


@dataclass(frozen=True)
class Schedule:
    """Warm-up and what follows it, over ``total_steps``.

    Attributes:
        peak: learning rate after warm-up.
        warmup_steps: steps of warm-up; the first step has ``peak / warmup_steps``.
        total_steps: length of the schedule; later steps keep the last value.
        floor_ratio: a falling schedule ends at ``peak * floor_ratio``.
        kind: ``cosine``, ``linear``, ``constant`` or ``wsd``.
        decay_steps: of ``wsd``: the steps of its linear end.
        warmup: ``linear`` or ``log``.
    """

    peak: float
    warmup_steps: int
    total_steps: int
    floor_ratio: float
    kind: str = "cosine"
    decay_steps: int = 0
    warmup: str = "linear"

    @classmethod
    def from_config(cls, training: TrainingConfig, num_rows: int) -> "Schedule":
        """The schedule of a run over ``num_rows`` rows; the flag ``--max-steps`` does not change it."""
        total = training.max_steps or max(
            1, math.ceil(training.epochs * num_rows / training.sequences_per_step)
        )
        warmup = training.warmup_steps
        if warmup is None:
            warmup = round(training.warmup_ratio * total)
        warmup = min(warmup, total)
        return cls(
            training.learning_rate,
            warmup,
            total,
            training.min_learning_rate_ratio,
            training.schedule,
            min(round(training.decay_ratio * total), total - warmup),
            training.warmup,
        )

    def learning_rate(self, step: int) -> float:
        """Learning rate of the step that follows ``step`` finished ones."""
        if step < self.warmup_steps:
            return self.peak * self._warm(step)
        if self.kind == "constant":
            return self.peak
        falling = self.total_steps - self.warmup_steps
        if self.kind == "wsd":
            falling = self.decay_steps
        share = min(1.0, max(0.0, step - (self.total_steps - falling)) / max(1, falling))
        left = 0.5 * (1.0 + math.cos(math.pi * share)) if self.kind == "cosine" else 1.0 - share
        return self.peak * (self.floor_ratio + (1.0 - self.floor_ratio) * left)

    def _warm(self, step: int) -> float:
        """Share of the peak during warm-up. ``log`` is DeepSpeed's ``WarmupLR``, whose first two steps do
        nothing, since log 1 is 0."""
        if self.warmup == "log" and self.warmup_steps > 1:
            return math.log(max(1, step)) / math.log(self.warmup_steps)
        return (step + 1) / self.warmup_steps


def ttt_length_at(training: TrainingConfig, step: int, total_steps: int) -> int:
    """Steps of training-time test that the optimiser step after ``step`` finished ones trains."""
    full, curriculum = training.ttt_length, training.ttt_curriculum
    if curriculum is None:
        return full
    grown = int((full - curriculum.start) * step / (curriculum.share * total_steps))
    return min(full, curriculum.start + grown)
