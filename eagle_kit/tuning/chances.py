"""Chances of acceptance as log-odds, which easier and harder text shifts.

Legend: M shapes, C classes of confidence, S steps of the deepest shape, G values of ease.
"""

from collections.abc import Sequence

import numpy as np

from eagle_kit.core.shape import SpecShape
from eagle_kit.tuning.acceptance import AcceptanceTable

LEAST, MOST = 0.02, 0.98
"""Bounds of a chance: text that was never seen may be different."""
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


def expected_lengths(odds: np.ndarray, eases: np.ndarray) -> np.ndarray:
    """Tokens per verify ``[G, M, C]`` of text of every ease ``[G]``."""
    chances = sigmoid(odds[None] + eases[:, None, None, None])
    lengths: np.ndarray = 1.0 + chances.cumprod(3).sum(3)
    return lengths


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Chance of log-odds ``x``."""
    with np.errstate(over="ignore"):
        chance: np.ndarray = 1.0 / (1.0 + np.exp(-x))
    return chance
