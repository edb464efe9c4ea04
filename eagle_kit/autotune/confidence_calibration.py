"""Calibration, by depth and while serving, of the confidences of heads that predict acceptance (DSpark).

A confidence head is trained on other text and after the target's own tokens, so its log-odds x of a depth are
biased and of the wrong scale in use. The calibrated log-odds are ``slope * x + offset``, with a line for each
depth. The lines are learnt from the outcomes of all requests by logistic regression (a Kalman filter of a
binary outcome).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from eagle_kit.autotune.chances import chance_of
from eagle_kit.core.shape import MAX_WINDOW

SLOPE_VARIANCE = 0.25  # of the slope about 1 at first
OFFSET_VARIANCE = 1.0  # of the offset about 0 at first
DRIFT = 3e-5  # added to both variances by every outcome, up to their first values: texts change
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
        """Return the calibrated log-odds."""
        return self.slope * odds + self.offset

    def learn(self, odds: float, is_accepted: bool) -> None:
        """Learn from an outcome of a draft with log-odds ``odds``."""
        # Surprise and Fisher information of the outcome.
        slope_gain = self.slope_variance * odds + self.covariance
        offset_gain = self.covariance * odds + self.offset_variance
        chance = chance_of(self.at(odds))
        information = chance * (1.0 - chance)
        spread = 1.0 + information * (slope_gain * odds + offset_gain)
        surprise = (is_accepted - chance) / spread

        # Update the line and its covariances.
        self.slope = min(max(self.slope + slope_gain * surprise, 0.0), MOST_SLOPE)
        self.offset += offset_gain * surprise
        share = information / spread
        self.slope_variance -= share * slope_gain**2
        self.offset_variance -= share * offset_gain**2
        self.covariance -= share * slope_gain * offset_gain

        # Let the variances grow.
        self.slope_variance = min(self.slope_variance + DRIFT, SLOPE_VARIANCE)
        self.offset_variance = min(self.offset_variance + DRIFT, OFFSET_VARIANCE)


class Calibration:
    """Lines of all depths that a window may have."""

    def __init__(self) -> None:
        self.lines = [Line() for _ in range(MAX_WINDOW)]

    def log_odds(self, confidences: Sequence[float]) -> list[float]:
        """Calibrated log-odds that each depth is accepted once all before it are."""
        return [line.at(odds) for line, odds in zip(self.lines, confidences, strict=False)]

    def learn(self, confidences: Sequence[float], num_accepted: int) -> None:
        """Learn from a cycle that verified drafts of these log-odds and accepted the first
        ``num_accepted``."""
        for depth, odds in enumerate(confidences[: num_accepted + 1]):
            self.lines[depth].learn(odds, depth < num_accepted)
