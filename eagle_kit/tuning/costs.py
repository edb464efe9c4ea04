"""Time of a cycle in any shape of speculation, from the times of a few.

A cycle is one forward of the target over the window, one of the draft over the emitted tokens, and one of the
draft for each further step. The time of a forward grows with its rows, piece by piece linearly, and with the
tokens before them; the pieces are fitted to measured cycles with coefficients that are never negative, so
that more rows never cost less.

Legend: B requests, S steps, K top-k, N nodes with the root.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from eagle_kit.core.shape import SpecShape

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Rows of a forward between which its time is linear."""
FORWARDS = ("target", "extend", "step")
NUM_SWEEPS = 2000


class Timing(NamedTuple):
    """Measured ``seconds`` of a cycle of ``batch_size`` requests of ``context`` tokens."""

    batch_size: int
    shape: SpecShape
    context: int
    seconds: float


@dataclass(frozen=True)
class CostTable:
    """Fitted times of cycles.

    Attributes:
        coefficients: seconds of every feature of a cycle (:func:`_features`).
        error: largest relative error at the measured cycles.
    """

    coefficients: tuple[float, ...]
    error: float

    @classmethod
    def fit(cls, timings: Sequence[Timing]) -> "CostTable":
        """Fit a table that makes relative errors small.

        Raises:
            ValueError: there are no timings.
        """
        if not timings:
            raise ValueError("nothing was timed")
        rows = np.array([_features(*timing[:3]) for timing in timings])
        seconds = np.array([timing.seconds for timing in timings])
        coefficients = _non_negative_least_squares(rows / seconds[:, None], np.ones(len(seconds)))
        error = np.abs(rows @ coefficients / seconds - 1).max()
        return cls(tuple(map(float, coefficients)), float(error))

    def seconds(self, batch_size: int, shape: SpecShape, context: int) -> float:
        """Predict the time of a cycle."""
        return float(np.dot(_features(batch_size, shape, context), self.coefficients))

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` takes."""
        return {"coefficients": list(self.coefficients), "error": self.error}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "CostTable":
        """Make a table of :meth:`to_json`'s result. Raise ValueError or KeyError for anything else."""
        coefficients = tuple(map(float, data["coefficients"]))
        if len(coefficients) != len(_features(1, SpecShape(1, 1, 2), 1)):
            raise ValueError("the table has another number of coefficients")
        return cls(coefficients, float(data["error"]))


def _features(batch_size: int, shape: SpecShape, context: int) -> list[float]:
    """What a cycle's time is linear in: a constant, whether it speculates, pieces of the rows of each
    forward, and the keys that each reads."""
    steps, topk, tokens = shape
    rows = {"target": batch_size * tokens}
    counts = {"target": 1, "extend": 0, "step": 0}
    if steps:
        rows |= {"extend": batch_size * (steps + 1), "step": batch_size * topk}
        counts |= {"extend": 1, "step": steps - 1}
    found = [1.0, float(bool(steps)), float(steps * (topk > 1))]
    for name in FORWARDS:
        pieces = _pieces(rows.get(name, 1))
        found += [counts[name] * piece for piece in pieces]
        found += [counts[name] * batch_size * context, counts[name] * rows.get(name, 0) * context]
    return found


def _pieces(rows: int) -> list[float]:
    """1, then the part of every interval between knots that lies below ``rows``."""
    spans = pairwise(KNOTS)
    return [1.0, *(min(max((rows - low) / (high - low), 0.0), 1.0) for low, high in spans)]


def _non_negative_least_squares(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Minimise ``|rows x - wanted|`` over x >= 0, one coordinate after another."""
    gram, target = rows.T @ rows, rows.T @ wanted
    x = np.zeros(rows.shape[1])
    slope = -target
    for _ in range(NUM_SWEEPS):
        for i in range(len(x)):
            if gram[i, i] > 0:
                moved = max(x[i] - slope[i] / gram[i, i], 0.0)
                slope += gram[:, i] * (moved - x[i])
                x[i] = moved
    return x
