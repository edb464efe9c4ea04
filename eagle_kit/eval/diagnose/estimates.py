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
        """The mean in standard errors; infinite where the error is 0 and the mean is not."""
        if self.error > 0:
            return self.mean / self.error
        if self.mean == 0:
            return 0.0
        return math.copysign(math.inf, self.mean)

    @property
    def margin(self) -> float:
        """Half of the 95 % interval."""
        return 1.96 * self.error


def estimate(values: torch.Tensor, text_index: torch.Tensor) -> Estimate:
    """Mean of ``values [R]``, with the error of a ratio of sums over C texts (linearised, with C /
    (C - 1)).

    Args:
        text_index: int64 ``[R]``, the text of each value. The error is infinite for a single text.
    """
    values = values.double()
    mean = values.mean()
    _, number = text_index.unique(return_inverse=True)
    count = int(number.max()) + 1
    if count < 2:
        return Estimate(float(mean), math.inf)
    sums = torch.zeros(count, dtype=torch.float64, device=values.device)
    sums.index_add_(0, number, values - mean)
    variance = sums.square().sum() * count / (count - 1) / len(values) ** 2
    return Estimate(float(mean), float(variance.sqrt()))
