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

from eagle_kit.core.shape import MAX_WINDOW, SpecShape
from eagle_kit.kernels.tree_build import top_scores

NOWHERE = 10**6
"""Rank of a token that was not drafted."""


@dataclass(frozen=True)
class Recording:
    """Drafts at every position of replies, one after another.

    Attributes:
        steps, topk: of the drafts.
        tokens, scores, parents: ``[P, n]``, the candidates of each position as
            :class:`~eagle_kit.kernels.tree_build.Candidates` has them.
        truth: int64 ``[P, S]``, the tokens of the reply behind the root, -1 behind its end.
        lengths: positions of each reply, in order.
    """

    steps: int
    topk: int
    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor
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
        numbers = torch.arange(topk).expand(len(self.tokens), topk)
        return _Level(numbers, self.scores[:, :topk], self.tokens[:, :topk] == self.truth[:, :1])

    def _next_level(self, above: "_Level", depth: int, topk: int) -> "_Level":
        """Children of the best ``topk`` of a level, as far as the wider draft extended them."""
        best = top_scores(above.scores, topk)
        parents, parent_scores, parent_is_true = (part.gather(1, best) for part in above)
        first = self.topk + (depth - 2) * self.topk**2
        extended = self.parents[:, first : first + self.topk**2 : self.topk]
        same = parents[:, :, None] == extended[:, None]
        place = same.int().argmax(2)
        numbers = (first + place * self.topk)[:, :, None] + torch.arange(topk)
        scores = self.scores.gather(1, numbers.flatten(1)).view_as(numbers)
        scores = torch.minimum(scores, parent_scores[:, :, None])  # as tree_build counts
        scores = scores.masked_fill(~same.any(2, keepdim=True), float("-inf"))
        tokens = self.tokens.gather(1, numbers.flatten(1)).view_as(numbers)
        is_true = parent_is_true[:, :, None] & (tokens == self.truth[:, depth - 1, None, None])
        return _Level(numbers.flatten(1), scores.flatten(1), is_true.flatten(1))

    def acceptance(self, shape: SpecShape) -> "Acceptance":
        """Predict what decoding these replies in ``shape`` accepts."""
        if not shape.steps:
            return Acceptance(1.0, ())
        ranks = self.ranks(shape.steps, shape.topk)
        return self._walk((ranks < shape.tokens - 1).long().cumprod(1).sum(1), shape.steps)

    def _walk(self, accepted: torch.Tensor, steps: int) -> "Acceptance":
        counts, num_verifies, num_emitted, start = [0] * steps, 0, 0, 0
        depths = accepted.tolist()
        for length in self.lengths:
            at = start
            while at < start + length:
                kept = min(depths[at], start + length - at)
                emitted = min(depths[at] + 1, start + length - at)
                for depth in range(kept):
                    counts[depth] += 1
                num_verifies, num_emitted, at = num_verifies + 1, num_emitted + emitted, at + emitted
            start += length
        if not num_verifies:
            return Acceptance(1.0, (0.0,) * steps)
        return Acceptance(num_emitted / num_verifies, tuple(count / num_verifies for count in counts))


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


def shapes_within(steps: int, topk: int, max_tokens: int = MAX_WINDOW) -> list[SpecShape]:
    """List shapes worth trying of at most ``steps`` and ``topk``: chains, and trees of a few widths and
    sizes."""
    shapes = [SpecShape(depth, 1, depth + 1) for depth in range(1, steps + 1) if depth < max_tokens]
    for width in (k for k in (2, 3, 4, 6, 8) if k <= topk):
        for depth in range(1, steps + 1):
            most = min(1 + width + (depth - 1) * width**2, max_tokens)
            sizes = [n for n in (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64) if depth < n <= most]
            if width * (depth - 1) <= MAX_WINDOW:
                shapes += [SpecShape(depth, width, n) for n in sizes]
    return shapes
