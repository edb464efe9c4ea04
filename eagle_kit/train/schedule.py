"""Learning rate by step: linear warm-up, then a cosine. A pure function, so resume needs no state."""

import math
from dataclasses import dataclass

from eagle_kit.config.train import TrainingConfig


@dataclass(frozen=True)
class Schedule:
    """Warm-up and cosine over ``total_steps``.

    Attributes:
        peak: learning rate after warm-up.
        warmup_steps: steps of warm-up; the first step has ``peak / warmup_steps``.
        total_steps: length of the schedule; later steps keep the last value.
        floor_ratio: the cosine ends at ``peak * floor_ratio``.
    """

    peak: float
    warmup_steps: int
    total_steps: int
    floor_ratio: float

    @classmethod
    def from_config(cls, training: TrainingConfig, num_rows: int) -> "Schedule":
        """The schedule of a run over ``num_rows`` rows; the flag ``--max-steps`` does not change it."""
        total = training.max_steps or max(
            1, math.ceil(training.epochs * num_rows / training.sequences_per_step)
        )
        warmup = training.warmup_steps
        if warmup is None:
            warmup = round(training.warmup_ratio * total)
        return cls(training.learning_rate, min(warmup, total), total, training.min_learning_rate_ratio)

    def learning_rate(self, step: int) -> float:
        """Learning rate of the step that follows ``step`` finished ones."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        share = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))
        return self.peak * (self.floor_ratio + (1.0 - self.floor_ratio) * cosine)
