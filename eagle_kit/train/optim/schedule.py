"""Learning rate and length of training-time test by step: pure functions, so that resume needs no state."""

import math
from dataclasses import dataclass

from eagle_kit.config.train import TrainingConfig


@dataclass(frozen=True)
class Schedule:
    """Learning rate by optimiser step: warm-up, then a constant or falling rate.

    Attributes:
        peak: learning rate after warm-up.
        warmup_steps: steps of warm-up.
        total_steps: length of the schedule; later steps keep the last value.
        floor_ratio: a falling schedule ends at ``peak * floor_ratio``.
        kind: ``cosine``, ``linear``, ``constant``, or ``wsd`` (constant, then linear).
        decay_steps: steps of the linear end of ``wsd``.
        warmup: ``linear``, whose first step has ``peak / warmup_steps``, or ``log``.
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
        """Schedule of a run over ``num_rows`` packed sequences. The flag ``--max-steps`` does not change
        it."""
        total_steps = training.max_steps
        if not total_steps:
            total_steps = max(1, math.ceil(training.epochs * num_rows / training.sequences_per_step))
        warmup_steps = training.warmup_steps
        if warmup_steps is None:
            warmup_steps = round(training.warmup_ratio * total_steps)
        warmup_steps = min(warmup_steps, total_steps)
        return cls(
            peak=training.learning_rate,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            floor_ratio=training.min_learning_rate_ratio,
            kind=training.schedule,
            decay_steps=min(round(training.decay_ratio * total_steps), total_steps - warmup_steps),
            warmup=training.warmup,
        )

    def learning_rate(self, step: int) -> float:
        """Learning rate of the step after ``step`` finished ones."""
        if step < self.warmup_steps:
            return self.peak * self._warmup_share(step)
        if self.kind == "constant":
            return self.peak

        # The rate falls over the last steps of the schedule.
        falling_steps = self.total_steps - self.warmup_steps
        if self.kind == "wsd":
            falling_steps = self.decay_steps
        share = min(1.0, max(0.0, step - (self.total_steps - falling_steps)) / max(1, falling_steps))
        left = 1.0 - share
        if self.kind == "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * share))
        return self.peak * (self.floor_ratio + (1.0 - self.floor_ratio) * left)

    def _warmup_share(self, step: int) -> float:
        """Share of the peak during warm-up.

        ``log`` is DeepSpeed's ``WarmupLR``. Its first two steps have the rate 0, because log 1 is 0.
        """
        if self.warmup == "log" and self.warmup_steps > 1:
            return math.log(max(1, step)) / math.log(self.warmup_steps)
        return (step + 1) / self.warmup_steps


def ttt_length_at(training: TrainingConfig, step: int, total_steps: int) -> int:
    """Number of TTT steps that the optimiser step after ``step`` finished ones trains."""
    ttt_length = training.ttt_length
    curriculum = training.ttt_curriculum
    if curriculum is None:
        return ttt_length
    num_added = int((ttt_length - curriculum.start) * step / (curriculum.share * total_steps))
    return min(ttt_length, curriculum.start + num_added)
