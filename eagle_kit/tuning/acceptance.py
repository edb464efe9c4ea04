"""Acceptance of any shape of speculation, from drafts that were recorded at every position of replies.

A deep and wide draft holds the candidates of every smaller one. What a smaller shape would have kept of them
is grown again here, and compared with the reply; its cycles then walk through the reply as decoding would. So
one recording predicts all shapes, and it knows the positions that a cycle of another shape would begin at.

Legend: P positions, S steps, K top-k, N nodes with the root, n = K + (S - 1) K^2 candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from eagle_kit.core.shape import SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.kernels.tree_build import Candidates, top_scores

NOWHERE = 10**6
"""Rank of a token that was not drafted."""


@dataclass(frozen=True)
class Recording:
    """Drafts at every position of replies, one after another.

    Attributes:
        steps, topk: of the drafts.
        candidates: of all positions, ``[P, n]``.
        truth: int64 ``[P, S]``, the tokens of the reply behind the root, -1 behind its end.
        lengths: positions of each reply, in order.
    """

    steps: int
    topk: int
    candidates: Candidates
    truth: torch.Tensor
    lengths: Sequence[int]

    def ranks(self, steps: int, topk: int) -> torch.Tensor:
        """Rank among the candidates of a draft of ``steps``, ``topk`` of the reply's token at every depth,
        int64 ``[P, steps]``, :data:`NOWHERE` where it was not drafted. A window of N nodes has those below N
        - 1.

        Raises:
            ValueError: the recording is not that deep or wide.
        """
        if steps > self.steps or topk > self.topk:
            raise ValueError(f"a recording of {self.steps},{self.topk} has no {steps},{topk}")
        levels = [self._first_level(topk)]
        for depth in range(2, steps + 1):
            levels.append(self._next_level(levels[-1], depth, topk))
        scores = torch.cat([level.scores for level in levels], 1)
        order = top_scores(scores, scores.shape[1])
        rank = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1]).expand_as(order))
        rank = torch.where(scores == float("-inf"), NOWHERE, rank)
        found, before = [], 0
        for level in levels:
            mine = rank[:, before : before + level.numbers.shape[1]]
            found.append(torch.where(level.is_true, mine, NOWHERE).amin(1))
            before += level.numbers.shape[1]
        return torch.stack(found, 1)

    def _first_level(self, topk: int) -> "_Level":
        numbers = torch.arange(topk).expand(len(self.candidates.tokens), topk)
        return _Level(
            numbers, self.candidates.scores[:, :topk], self.candidates.tokens[:, :topk] == self.truth[:, :1]
        )

    def _next_level(self, above: "_Level", depth: int, topk: int) -> "_Level":
        """Children of the best ``topk`` of a level, as far as the wider draft extended them."""
        best = top_scores(above.scores, topk)
        parents, parent_scores, parent_is_true = (part.gather(1, best) for part in above)
        first = self.topk + (depth - 2) * self.topk**2
        extended = self.candidates.parents[:, first : first + self.topk**2 : self.topk]
        same = parents[:, :, None] == extended[:, None]
        place = same.int().argmax(2)
        numbers = (first + place * self.topk)[:, :, None] + torch.arange(topk)
        scores = self.candidates.scores.gather(1, numbers.flatten(1)).view_as(numbers)
        scores = torch.minimum(scores, parent_scores[:, :, None])  # as tree_build counts
        scores = scores.masked_fill(~same.any(2, keepdim=True), float("-inf"))
        tokens = self.candidates.tokens.gather(1, numbers.flatten(1)).view_as(numbers)
        is_true = parent_is_true[:, :, None] & (tokens == self.truth[:, depth - 1, None, None])
        return _Level(numbers.flatten(1), scores.flatten(1), is_true.flatten(1))

    def acceptance(self, shape: SpecShape) -> "Acceptance":
        """Predict what decoding these replies in ``shape`` accepts."""
        if not shape.steps:
            return Acceptance(1.0, ())
        ranks = self.ranks(shape.steps, shape.topk)
        return self._walk((ranks < shape.tokens - 1).long().cumprod(1).sum(1), shape.steps)

    def _walk(self, accepted: torch.Tensor, steps: int) -> "Acceptance":
        depths, stats, at = accepted.tolist(), SpecStats(), 0
        for length in self.lengths:
            end = at + length
            while at < end:
                emitted = min(depths[at] + 1, end - at)
                stats.observe(emitted, min(depths[at], end - at))
                at += emitted
        reach = stats.acceptance_per_position
        return Acceptance(stats.accept_length, (*reach, *[0.0] * (steps - len(reach))))


class _Level(NamedTuple):
    """Candidates of one depth, ``[P, m]`` each: their ``numbers`` in the recording, ``scores`` of the paths
    to them (-inf: not drafted), and whether they continue the reply."""

    numbers: torch.Tensor
    scores: torch.Tensor
    is_true: torch.Tensor


class Acceptance(NamedTuple):
    """Tokens per verify, the bonus token included, and the share of verifies that accepted each depth."""

    length: float
    reach: tuple[float, ...]
