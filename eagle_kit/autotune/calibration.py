"""Calibration of the confidences that a draft tells of each depth, learnt while it serves.

A confidence head is trained on other text, behind the target's own tokens; in use its log-odds x of a depth
are too high or too low, and too far or not far enough apart, by depth. What they stand for is ``slope * x +
offset``, a line for each depth, which all requests teach: a step of logistic regression (a Kalman filter of a
binary outcome) for every depth that a cycle has reached.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from eagle_kit.autotune.chances import chance_of
from eagle_kit.core.shape import MAX_WINDOW

SLOPE_VARIANCE, OFFSET_VARIANCE = 0.25, 1.0
"""Of the slope about 1 and of the offset about 0, before anything was seen."""
DRIFT = 3e-5
"""What every outcome adds to both variances, up to the first: texts change."""
MOST_SLOPE = 4.0


@dataclass
class Line:
    """Calibrated log-odds of a depth, ``slope * x + offset``, with variances and covariance of the two."""

    slope: float = 1.0
    offset: float = 0.0
    slope_variance: float = SLOPE_VARIANCE
    offset_variance: float = OFFSET_VARIANCE
    covariance: float = 0.0

    def at(self, odds: float) -> float:
        """Log-odds that told ``odds`` stand for."""
        return self.slope * odds + self.offset

    def learn(self, odds: float, bias: float, is_accepted: bool) -> None:
        """Learn from an outcome of a request whose log-odds are off by ``bias`` beside what all share."""
        slope_gain = self.slope_variance * odds + self.covariance
        offset_gain = self.covariance * odds + self.offset_variance
        chance = chance_of(self.at(odds) + bias)
        information = chance * (1.0 - chance)
        left = 1.0 + information * (slope_gain * odds + offset_gain)
        surprise = (is_accepted - chance) / left
        self.slope = min(max(self.slope + slope_gain * surprise, 0.0), MOST_SLOPE)
        self.offset += offset_gain * surprise
        share = information / left
        self.slope_variance -= share * slope_gain**2
        self.offset_variance -= share * offset_gain**2
        self.covariance -= share * slope_gain * offset_gain
        self.slope_variance = min(self.slope_variance + DRIFT, SLOPE_VARIANCE)
        self.offset_variance = min(self.offset_variance + DRIFT, OFFSET_VARIANCE)


class Calibration:
    """Lines of all depths that a window may have."""

    def __init__(self) -> None:
        self.lines = [Line() for _ in range(MAX_WINDOW)]

    def log_odds(self, told: Sequence[float]) -> list[float]:
        """Log-odds of each depth, where all before it are accepted, that told ones stand for."""
        return [line.at(odds) for line, odds in zip(self.lines, told, strict=False)]

    def learn(self, told: Sequence[float], bias: float, num_accepted: int) -> None:
        """Learn from a cycle that verified drafts with ``told`` log-odds and accepted the first so many, of a
        request whose log-odds are off by ``bias`` beside what all share."""
        for depth, odds in enumerate(told[: num_accepted + 1]):
            self.lines[depth].learn(odds, bias, depth < num_accepted)
