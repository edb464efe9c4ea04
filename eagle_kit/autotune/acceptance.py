"""Acceptance of any shape of speculation, from drafts that were recorded at every position of replies.

A deep and wide draft holds the candidates of every smaller one. What a smaller shape would have kept of them
is grown again here, and compared with the reply; its cycles then walk through the reply as decoding would. So
one recording predicts all shapes, and it knows the positions that a cycle of another shape would begin at.
Candidates that a draft has ready for all depths give their trees best-first, and the window of a tree is the
beginning of that of a larger one.

Legend: P positions, S steps, K top-k, N nodes with the root, n = K + (S - 1) K^2 candidates, G 1 or K, C
classes of confidence.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from eagle_kit.core.shape import MAX_WINDOW, SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.ops.best_first import best_first
from eagle_kit.ops.tree_build import Candidates, top_scores

NOWHERE = 10**6
"""Rank of a token that was not drafted."""
EDGES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95)
"""Probabilities of the first drafted token that separate the classes of confidence."""
NUM_ASSUMED = 8
"""Cycles of average text that a class is credited with, so that a rare one is not taken for extreme."""


class ReadyCandidates(NamedTuple):
    """Candidates of a draft that has those of all depths ready: target ids ``tokens`` int64 ``[P, S, K]``,
    and their log-probabilities ``scores`` fp32 ``[P, S, G, K]`` given each candidate of the depth before; G
    is 1 where depths are drafted independently."""

    tokens: torch.Tensor
    scores: torch.Tensor


Drafts = Candidates | ReadyCandidates


@dataclass(frozen=True)
class Recording:
    """Drafts at every position of replies, one after another.

    Attributes:
        steps, topk: of the drafts.
        candidates: of all positions, ``[P, n]``, or by depth.
        confidence: fp32 ``[P]``, the probability that the draft gives its first token, or with which it
            calls it accepted.
        truth: int64 ``[P, S]``, the tokens of the reply behind the root, -1 behind its end.
        lengths: positions of each reply, in order.
    """

    steps: int
    topk: int
    candidates: Drafts
    confidence: torch.Tensor
    truth: torch.Tensor
    lengths: Sequence[int]

    @classmethod
    def join(cls, recordings: Sequence["Recording"]) -> "Recording":
        """Put recordings of drafts of one size one behind another."""
        first = recordings[0]
        parts = zip(*(each.candidates for each in recordings), strict=True)
        return cls(
            first.steps,
            first.topk,
            type(first.candidates)(*(torch.cat(part) for part in parts)),
            torch.cat([each.confidence for each in recordings]),
            torch.cat([each.truth for each in recordings]),
            [length for each in recordings for length in each.lengths],
        )

    def ranks(self, steps: int, topk: int) -> torch.Tensor:
        """Rank among the candidates of a draft of ``steps``, ``topk`` of the reply's token at every depth,
        int64 ``[P, steps]``, :data:`NOWHERE` where it was not drafted. A window of N nodes has those below N
        - 1.

        Raises:
            ValueError: the recording is not that deep or wide.
        """
        if steps > self.steps or topk > self.topk:
            raise ValueError(f"a recording of {self.steps},{self.topk} has no {steps},{topk}")
        if isinstance(self.candidates, ReadyCandidates):
            return self._ready_ranks(self.candidates, steps, topk)
        levels = [self._first_level(self.candidates, topk)]
        for depth in range(2, steps + 1):
            levels.append(self._next_level(self.candidates, levels[-1], depth, topk))
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

    def _ready_ranks(self, ready: ReadyCandidates, steps: int, topk: int) -> torch.Tensor:
        """Follow the reply through the largest tree of the candidates, whose nodes lie in the order in which
        smaller ones have them."""
        paths = sum(topk**depth for depth in range(1, steps + 1))
        tokens, scores = ready.tokens[:, :steps, :topk], ready.scores[:, :steps, :topk, :topk]
        shape = SpecShape(steps, topk, min(MAX_WINDOW, 1 + paths))
        tree = best_first(self.truth[:, 0], tokens, scores, shape)
        node, found = torch.zeros_like(self.truth[:, :1]), []
        for depth in range(1, steps + 1):
            is_next = (tree.parents == node) & (tree.depths == depth)
            is_next &= tree.tokens == self.truth[:, depth - 1, None]
            node = torch.where(is_next.any(1, keepdim=True), is_next.int().argmax(1, keepdim=True), NOWHERE)
            found.append(torch.where(node == NOWHERE, NOWHERE, node - 1))
        return torch.cat(found, 1)

    def _first_level(self, drafted: Candidates, topk: int) -> "_Level":
        numbers = torch.arange(topk).expand(len(drafted.tokens), topk)
        return _Level(numbers, drafted.scores[:, :topk], drafted.tokens[:, :topk] == self.truth[:, :1])

    def _next_level(self, drafted: Candidates, above: "_Level", depth: int, topk: int) -> "_Level":
        """Children of the best ``topk`` of a level, as far as the wider draft extended them."""
        best = top_scores(above.scores, topk)
        parents, parent_scores, parent_is_true = (part.gather(1, best) for part in above)
        first = self.topk + (depth - 2) * self.topk**2
        extended = drafted.parents[:, first : first + self.topk**2 : self.topk]
        same = parents[:, :, None] == extended[:, None]
        place = same.int().argmax(2)
        numbers = (first + place * self.topk)[:, :, None] + torch.arange(topk)
        scores = drafted.scores.gather(1, numbers.flatten(1)).view_as(numbers)
        scores = torch.minimum(scores, parent_scores[:, :, None])  # as tree_build counts
        scores = scores.masked_fill(~same.any(2, keepdim=True), float("-inf"))
        tokens = drafted.tokens.gather(1, numbers.flatten(1)).view_as(numbers)
        is_true = parent_is_true[:, :, None] & (tokens == self.truth[:, depth - 1, None, None])
        return _Level(numbers.flatten(1), scores.flatten(1), is_true.flatten(1))

    def acceptance(self, shape: SpecShape) -> "Acceptance":
        """Predict what decoding these replies in ``shape`` accepts."""
        if not shape.steps:
            return Acceptance(1.0, ())
        return self._walk(self._accepted(self.ranks(shape.steps, shape.topk), shape), shape.steps)[0]

    def table(self, shapes: Iterable[SpecShape]) -> "AcceptanceTable":
        """Predict what every one of ``shapes`` accepts, by the confidence of the draft."""
        first = self.confidence.double()
        classes = torch.bucketize(first, torch.tensor(EDGES, dtype=torch.float64), right=True).numpy()
        shares, reach, ranks = {}, {}, {}
        for shape in shapes:
            key = shape.steps, shape.topk
            if key not in ranks:
                ranks[key] = self.ranks(*key)
            accepted = self._accepted(ranks[key], shape)
            begins = np.array(self._walk(accepted, shape.steps)[1])  # more often where text is hard
            whole = begins[(self.truth[begins, shape.steps - 1] >= 0).numpy()]  # others end before the draft
            counted = whole if len(whole) else begins
            depths = accepted.numpy()[counted, None] > np.arange(shape.steps)
            average = depths.mean(0)
            mine = [depths[classes[counted] == c] for c in range(len(EDGES) + 1)]
            counts = np.bincount(classes[begins], minlength=len(EDGES) + 1)
            shares[shape] = counts / counts.sum()
            reach[shape] = np.stack(
                [(each.sum(0) + NUM_ASSUMED * average) / (len(each) + NUM_ASSUMED) for each in mine]
            )
        return AcceptanceTable(EDGES, shares, reach)

    @staticmethod
    def _accepted(ranks: torch.Tensor, shape: SpecShape) -> torch.Tensor:
        """Depth that a cycle at each position accepts, int64 ``[P]``."""
        return (ranks < shape.tokens - 1).long().cumprod(1).sum(1)

    def _walk(self, accepted: torch.Tensor, steps: int) -> tuple["Acceptance", list[int]]:
        """Decode the replies -> acceptance, and the positions at which cycles begin."""
        depths, stats, at, visited = accepted.tolist(), SpecStats(), 0, []
        for length in self.lengths:
            end = at + length
            while at < end:
                visited.append(at)
                emitted = min(depths[at] + 1, end - at)
                stats.observe(emitted, min(depths[at], end - at))
                at += emitted
        reach = stats.acceptance_per_position
        return Acceptance(stats.accept_length, (*reach, *[0.0] * (steps - len(reach)))), visited


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


@dataclass(frozen=True)
class AcceptanceTable:
    """Acceptance of shapes by the confidence of the draft.

    Attributes:
        edges: probabilities of the first drafted token that separate the C classes.
        shares: share of the cycles of each shape that begin in each class, ``[C]``.
        reach: share of a class's cycles that accept each depth, ``[C, S]``.
    """

    edges: tuple[float, ...]
    shares: Mapping[SpecShape, np.ndarray]
    reach: Mapping[SpecShape, np.ndarray]

    @classmethod
    def of(cls, acceptances: Mapping[SpecShape, Acceptance]) -> "AcceptanceTable":
        """Make a table that knows no confidence."""
        shapes = {shape: each for shape, each in acceptances.items() if shape.steps}
        return cls(
            (), dict.fromkeys(shapes, np.ones(1)), {s: np.array([each.reach]) for s, each in shapes.items()}
        )

    @classmethod
    def even(cls, shapes: Iterable[SpecShape], chance: float = 0.5) -> "AcceptanceTable":
        """Make a table in which every drafted depth is accepted with the same chance."""
        return cls.of({s: Acceptance(1.0, tuple(chance**d for d in range(1, s.steps + 1))) for s in shapes})

    @property
    def shapes(self) -> tuple[SpecShape, ...]:
        """Shapes in the table, all of them speculate."""
        return tuple(self.reach)

    def length(self, shape: SpecShape) -> float:
        """Expected tokens per verify of average text."""
        return 1.0 + float(self.shares[shape] @ self.reach[shape].sum(1)) if shape.steps else 1.0

    def average(self) -> "AcceptanceTable":
        """Return the table of cycles whose confidence is not known."""
        reach = {shape: (self.shares[shape] @ self.reach[shape])[None] for shape in self.reach}
        return AcceptanceTable((), dict.fromkeys(reach, np.ones(1)), reach)

    def only(self, shapes: Iterable[SpecShape]) -> "AcceptanceTable":
        """Return the part of some of the shapes."""
        kept = [shape for shape in shapes if shape in self.reach]
        return AcceptanceTable(
            self.edges, {s: self.shares[s] for s in kept}, {s: self.reach[s] for s in kept}
        )

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` takes."""
        shapes = {
            str(shape): {
                "shares": self.shares[shape].round(4).tolist(),
                "reach": self.reach[shape].round(4).tolist(),
            }
            for shape in self.reach
        }
        return {"edges": list(self.edges), "shapes": shapes}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "AcceptanceTable":
        """Make a table of :meth:`to_json`'s result. Raise ValueError, KeyError or TypeError for anything
        else."""
        edges, shares, reach = tuple(map(float, data["edges"])), {}, {}
        for text, given in data["shapes"].items():
            shape = SpecShape.parse(text)
            shares[shape] = np.array(given["shares"], dtype=float)
            reach[shape] = np.array(given["reach"], dtype=float)
            count = len(edges) + 1
            if shares[shape].shape != (count,) or reach[shape].shape != (count, shape.steps):
                raise ValueError(f"the acceptance of {shape} has another size than its table")
            both = np.append(reach[shape], shares[shape])
            if not ((both >= 0) & (both <= 1)).all():
                raise ValueError(f"the acceptance of {shape} is no share")
        return cls(edges, shares, reach)
