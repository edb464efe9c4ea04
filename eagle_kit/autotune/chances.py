"""Probabilities of acceptance and their log-odds. The offset of a request is added to log-odds.

Legend: M shapes, C confidence classes, S draft steps, G offsets.
"""

import math
from collections.abc import Sequence

import numpy as np

from eagle_kit.autotune.acceptance import AcceptanceTable
from eagle_kit.core.shape import SpecShape

LEAST = 0.02
MOST = 0.98
"""Bounds of a chance: text that was not measured may be different."""
UNKNOWN = 0.05
"""Chance of a depth that was never reached."""


def conditional_log_odds(acceptance: AcceptanceTable, shapes: Sequence[SpecShape]) -> np.ndarray:
    """Log-odds ``[M, C, S]`` that each depth is accepted once the one before it was; -inf beyond a shape's
    steps."""
    deepest = max(shape.steps for shape in shapes)
    odds = np.full((len(shapes), len(acceptance.edges) + 1, deepest), -np.inf)
    for i, shape in enumerate(shapes):
        if not shape.steps:
            continue
        reach = acceptance.reach[shape]
        before = np.concatenate([np.ones((len(reach), 1)), reach[:, :-1]], 1)
        chance = np.divide(reach, before, out=np.full(reach.shape, UNKNOWN), where=before > 0)
        chance = chance.clip(LEAST, MOST)
        odds[i, :, : shape.steps] = np.log(chance / (1 - chance))
    return odds


def reach_of(odds: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Chance ``[G, M, C, S]`` that each depth is accepted with all before it, for every offset."""
    reach: np.ndarray = sigmoid(odds[None] + offsets[:, None, None, None]).cumprod(3)
    return reach


def expected_lengths(odds: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Tokens per verify ``[G, M, C]`` for every offset ``[G]``."""
    lengths: np.ndarray = 1.0 + reach_of(odds, offsets).sum(3)
    return lengths


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Chance of log-odds ``x``."""
    with np.errstate(over="ignore"):
        chance: np.ndarray = 1.0 / (1.0 + np.exp(-x))
    return chance


def chance_of(odds: float) -> float:
    """Chance of log-odds."""
    return 1.0 / (1.0 + math.exp(-max(odds, -700.0)))


def log_odds_of(survival: Sequence[float]) -> list[float]:
    """Log-odds that each depth is accepted once all before it are.

    Args:
        survival: probability of each depth to be accepted with all before it.

    Returns:
        A number for each depth, or an empty list if a probability is NaN or out of range.
    """
    if not all(0.0 <= each <= 1.0 for each in survival):
        return []
    pairs = zip(survival, (1.0, *survival), strict=False)
    chances = [min(max(each / max(before, 1e-6), 1e-4), 1.0 - 1e-4) for each, before in pairs]
    return [math.log(chance / (1.0 - chance)) for chance in chances]
