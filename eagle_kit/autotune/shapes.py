"""Shapes worth considering, and the few of them that an engine chooses from."""

from collections.abc import Callable, Iterable

import numpy as np

from eagle_kit.autotune.acceptance import AcceptanceTable
from eagle_kit.autotune.chances import conditional_log_odds, expected_lengths
from eagle_kit.core.shape import MAX_WINDOW, NO_SPECULATION, SpecShape

MOST_STEPS = 7
WIDTHS = 2, 3, 4, 8
WINDOWS = 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64
MENU = 5
"""Shapes for a batch size besides plain decoding. Each has a graph, or a recording, of its own."""
MENU_OFFSETS = np.linspace(-2.5, 2.5, 6)
"""Acceptance offsets of the texts that a menu serves; average text has 0, other languages -2 and less."""
MENU_CONTEXTS = 64, 1024

Seconds = Callable[[int, SpecShape, int], float]
"""Time of a cycle of a batch size, a shape and a context."""


def candidate_shapes(steps: int = MOST_STEPS, topk: int = max(WIDTHS)) -> list[SpecShape]:
    """List chains, and trees of a few widths and sizes, of at most ``steps`` and ``topk``."""
    shapes = [SpecShape(depth, 1, depth + 1) for depth in range(1, steps + 1)]
    for width in (k for k in WIDTHS if k <= topk):
        for depth in range(1, steps + 1):
            most = min(1 + width + (depth - 1) * width**2, MAX_WINDOW)
            if width * (depth - 1) <= MAX_WINDOW:
                shapes += [SpecShape(depth, width, n) for n in WINDOWS if depth < n <= most and n > width]
    return shapes


def choose_menu(
    seconds: Seconds, acceptance: AcceptanceTable, batch_size: int, shapes: Iterable[SpecShape]
) -> list[SpecShape]:
    """Choose the few of ``shapes`` that together serve easy and hard text, sure and unsure drafts best."""
    allowed = [shape for shape in acceptance.shapes if shape in set(shapes)]
    if not allowed:
        return []
    gains = []
    for context in MENU_CONTEXTS:
        plain = seconds(batch_size, NO_SPECULATION, context)
        costs = np.array([seconds(batch_size, shape, context) for shape in allowed]) / plain
        lengths = expected_lengths(conditional_log_odds(acceptance, allowed), MENU_OFFSETS)
        gains.append((lengths / costs[:, None]).transpose(0, 2, 1).reshape(-1, len(allowed)))
    speeds = np.concatenate(gains)  # [scenarios, shapes], over plain decoding
    menu: list[int] = []
    reached = np.ones(len(speeds))
    for _ in range(min(MENU, len(allowed))):
        values = np.log(np.maximum(speeds, reached[:, None])).sum(0)
        best = int(values.argmax())
        if menu and values[best] <= np.log(reached).sum() + 1e-9:
            break
        menu.append(best)
        reached = np.maximum(reached, speeds[:, best])
    return sorted(allowed[i] for i in menu)
