"""Means over roots with their errors. Roots of one text are not independent, so errors are those of texts."""

import math
from typing import NamedTuple

import torch


class Estimate(NamedTuple):
    """A mean and its standard error."""

    mean: float
    error: float

    @property
    def score(self) -> float:
        """The mean in standard errors; infinite for a mean without any."""
        if self.error > 0:
            return self.mean / self.error
        return math.copysign(math.inf, self.mean) if self.mean else 0.0

    @property
    def margin(self) -> float:
        """Half of the 95 % interval."""
        return 1.96 * self.error


def estimate(values: torch.Tensor, texts: torch.Tensor) -> Estimate:
    """Mean of ``values [R]``, with the error of a ratio of sums over texts (linearised, with C / (C - 1)).

    Args:
        texts: int64 ``[R]``, the text of each value.
    """
    values = values.double()
    mean = values.mean()
    _, number = texts.unique(return_inverse=True)
    count = int(number.max()) + 1
    sums = torch.zeros(count, dtype=torch.float64, device=values.device).index_add_(0, number, values - mean)
    if count < 2:
        return Estimate(float(mean), math.inf)
    variance = sums.square().sum() * count / (count - 1) / len(values) ** 2
    return Estimate(float(mean), float(variance.sqrt()))
