"""What a cycle is expected to give in every shape, of text of any ease, by how sure the draft is.

Legend: G values of ease, M shapes, C classes of confidence, S steps of the deepest shape.
"""

import operator
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from eagle_kit.autotune.acceptance import AcceptanceTable
from eagle_kit.autotune.chances import EASE_SPACING, EASES, conditional_log_odds, place_of, reach_of
from eagle_kit.autotune.texts import Ease
from eagle_kit.core.shape import SpecShape


class Lengths:
    """Tables of expected tokens of a cycle, for arrays and for plain Python, which runs between two cycles.

    Args:
        acceptance: of average text.
        shapes: M of them, plain decoding first; others know them by their numbers.

    Attributes:
        edges: between the classes of confidence.
        usual_mix: how often each class comes up, ``[C]``.
        chains: steps of those shapes that are chains.
    """

    def __init__(self, acceptance: AcceptanceTable, shapes: Sequence[SpecShape]) -> None:
        self.edges = acceptance.edges
        odds = conditional_log_odds(acceptance, shapes)
        self._reach = reach_of(odds, EASES)
        self._lengths = 1.0 + self._reach.sum(3)
        self._by_class: list[list[list[float]]] = self._lengths.transpose(0, 2, 1).tolist()  # [G, C, M]
        self._by_shape: list[list[list[float]]] = self._lengths.transpose(1, 0, 2).tolist()  # [M, G, C]
        shares = np.stack([acceptance.shares.get(s, np.full(odds.shape[1], 0.0)) for s in shapes])
        shares[0] = 1 / odds.shape[1]
        drafts = len(shapes) > 1
        self.usual_mix = shares[1:].mean(0) if drafts else shares[0]
        self._tilts = shares / np.maximum(self.usual_mix, 1e-6)
        self._tilt_lists: list[list[float]] = self._tilts.tolist()
        mean = (self._lengths[:, 1:] * self.usual_mix).sum(2).mean(1) if drafts else self._lengths[:, 0, 0]
        self._usual: list[float] = mean.tolist()
        self._odds = [  # by shape, and class of confidence; last where it is not known
            [*(each[: shape.steps].tolist() for each in odds[i]), _mean_odds(acceptance, shape)]
            for i, shape in enumerate(shapes)
        ]
        self.chains = {i: s.steps for i, s in enumerate(shapes) if s.steps and s.topk == 1}
        self._chain_reach: dict[int, list[list[list[float]]]] = {  # [G, C, S]
            i: self._reach[:, i, :, :steps].tolist() for i, steps in self.chains.items()
        }

    def odds(self, number: int, known: int | None) -> list[float]:
        """Log-odds that each depth is accepted where all before it are, of average text in a shape, by the
        class of confidence ``known``."""
        return self._odds[number][-1 if known is None else known]

    def usual(self, places: Sequence[int]) -> float:
        """Tokens of a cycle that texts of eases at ``places`` usually give. The eases of few requests err, so
        of one the square root is followed."""
        return sum([self._usual[place] for place in places]) ** (len(places) / (1.0 + len(places)))

    def weights(self, mixes: Sequence[Sequence[float]]) -> np.ndarray:
        """How often each class of confidence comes up in requests' cycles of each shape, ``[B, M, C]``."""
        weights: np.ndarray = self._tilts * np.array(mixes)[:, None]
        return weights / weights.sum(2, keepdims=True)

    def mean(self, places: Sequence[int], weights: np.ndarray) -> np.ndarray:
        """Expected tokens of a batch's cycle on average, ``[M]``."""
        tokens: np.ndarray = (self._lengths[places] * weights).sum(2).sum(0)
        return tokens

    def reach(self, places: Sequence[int], number: int) -> np.ndarray:
        """Chance that each depth of a chain is accepted with all before it, ``[B, C, S]``."""
        reach: np.ndarray = self._reach[places, number, :, : self.chains[number]]
        return reach

    def expected(
        self, eases: Sequence[Ease], places: Sequence[int], told: Sequence[Sequence[float]]
    ) -> list[float]:
        """Expected tokens of a batch's next cycle in every shape.

        Args:
            places: of the eases among ``EASES``.
            told: chance that each depth of a chain is accepted with all before it, by the draft's own
                confidences; empty where it tells none.
        """
        lengths = []
        for ease, place in zip(eases, places, strict=True):
            if ease.confidence is None:  # it has just come
                lengths.append(self.mean([place], self.weights([ease.mix])).tolist())
            else:
                lengths.append(self._by_class[place][ease.confidence])
        for i, reach in enumerate(told):
            mine, reached = [*lengths[i]], [*accumulate(reach, initial=1.0)]
            for number, depth in self.chains.items():
                if depth < len(reached):
                    mine[number] = reached[depth]
            lengths[i] = mine
        return lengths[0] if len(lengths) == 1 else [*map(sum, zip(*lengths, strict=True))]

    def expected_reach(
        self, eases: Sequence[Ease], places: Sequence[int], told: Sequence[Sequence[float]], number: int
    ) -> list[float]:
        """Chance that each depth of each request's next cycle in a chain is accepted with all before it, one
        request behind another; arguments as of :meth:`expected`."""
        steps, reach = self.chains[number], self._chain_reach[number]
        found: list[float] = []
        for i, (ease, place) in enumerate(zip(eases, places, strict=True)):
            if told and len(told[i]) >= steps:
                found += told[i][:steps]
            elif ease.confidence is None:
                found += (self.weights([ease.mix])[0, number] @ self.reach([place], number)[0]).tolist()
            else:
                found += reach[place][ease.confidence]
        return found

    def relative_variance(self, eases: Sequence[Ease], number: int, shared_variance: float) -> float:
        """Variance of the expected tokens of a batch in a shape as a part of them: of the eases of its texts,
        and of what those that have not been drafted have in common."""
        tilts, lengths = self._tilt_lists[number], self._by_shape[number]
        total = variance = shared = 0.0
        for ease in eases:
            place = place_of(ease.value)
            mix = [*map(operator.mul, tilts, ease.mix)]
            here = sum(map(operator.mul, mix, lengths[place])) / sum(mix)
            easier = sum(map(operator.mul, mix, lengths[min(place + 1, len(EASES) - 1)])) / sum(mix)
            slope = (easier - here) / EASE_SPACING
            total += here
            variance += slope**2 * ease.variance
            shared += 0.0 if ease.information else slope
        return (variance + shared**2 * shared_variance) / total**2


def _mean_odds(acceptance: AcceptanceTable, shape: SpecShape) -> list[float]:
    """Log-odds of each depth where the confidence is not known."""
    if not shape.steps:
        return []
    mean = acceptance.shares[shape] @ acceptance.reach[shape]
    whole = AcceptanceTable((), {shape: np.ones(1)}, {shape: mean[None]})
    odds: list[float] = conditional_log_odds(whole, [shape])[0, 0].tolist()
    return odds
