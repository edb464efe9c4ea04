"""Shapes worth considering, and the few candidates of them that an engine chooses from."""

from collections.abc import Callable, Iterable

import numpy as np

from eagle_kit.autotune.acceptance import AcceptanceTable
from eagle_kit.autotune.chances import conditional_log_odds, expected_lengths
from eagle_kit.core.shape import MAX_WINDOW, NO_SPECULATION, SpecShape

MOST_STEPS = 7
WIDTHS = (2, 3, 4, 8)
"""``topk`` of trees."""
WINDOWS = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
"""``tokens`` of trees."""
MAX_CANDIDATES = 5
"""Candidates of a batch size besides plain decoding. Each has a graph, or a recording, of its own."""
TEXT_OFFSETS = np.linspace(-2.5, 2.5, 6)
"""Acceptance offsets of texts that the candidates must serve; average text has 0, other languages -2 and
less."""
TEXT_CONTEXTS = (64, 1024)

Seconds = Callable[[int, SpecShape, int], float]
"""Time of a cycle of a batch size, a shape and a context."""


def all_shapes(steps: int = MOST_STEPS, topk: int = max(WIDTHS)) -> list[SpecShape]:
    """List chains, and trees of a few widths and sizes, of at most ``steps`` and ``topk``."""
    shapes = [SpecShape(depth, 1, depth + 1) for depth in range(1, steps + 1)]
    for width in WIDTHS:
        for depth in range(1, steps + 1):
            num_drafted = width + (depth - 1) * width**2
            if width > topk or width * (depth - 1) > MAX_WINDOW:
                continue
            for tokens in WINDOWS:
                if max(depth, width) < tokens <= min(1 + num_drafted, MAX_WINDOW):
                    shapes.append(SpecShape(depth, width, tokens))
    return shapes


def choose_candidates(
    seconds: Seconds, acceptance: AcceptanceTable, batch_size: int, shapes: Iterable[SpecShape]
) -> list[SpecShape]:
    """Choose the few of ``shapes`` that together are fastest over easy and hard text, high and low
    confidence, and short and long contexts.

    Args:
        seconds: time of a cycle.
        acceptance: of average text. Shapes that it does not have are left out.

    Returns:
        At most :data:`MAX_CANDIDATES` shapes, sorted; without plain decoding.
    """
    allowed_shapes = set(shapes)
    allowed = [shape for shape in acceptance.shapes if shape in allowed_shapes]
    if not allowed:
        return []

    # Speed over plain decoding in each scenario: a context, an offset of the text, and a confidence class.
    scenarios = []
    for context in TEXT_CONTEXTS:
        plain = seconds(batch_size, NO_SPECULATION, context)
        costs = np.array([seconds(batch_size, shape, context) for shape in allowed]) / plain
        lengths = expected_lengths(conditional_log_odds(acceptance, allowed), TEXT_OFFSETS)
        scenarios.append((lengths / costs[:, None]).transpose(0, 2, 1).reshape(-1, len(allowed)))
    speeds = np.concatenate(scenarios)  # [scenarios, shapes]

    # Add the shape that raises the speed of the best candidate most, in the geometric mean of scenarios.
    chosen: list[int] = []
    best_speeds = np.ones(len(speeds))
    for _ in range(min(MAX_CANDIDATES, len(allowed))):
        values = np.log(np.maximum(speeds, best_speeds[:, None])).sum(0)
        best = int(values.argmax())
        if chosen and values[best] <= np.log(best_speeds).sum() + 1e-9:
            break
        chosen.append(best)
        best_speeds = np.maximum(best_speeds, speeds[:, best])
    return sorted(allowed[i] for i in chosen)
