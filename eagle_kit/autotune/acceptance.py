"""Acceptance of any shape of speculation, from drafts that were recorded at every position of responses.

A deep and wide draft holds the candidates of every smaller shape, so one recording predicts all shapes. For
each shape, its candidates are selected from the recorded ones and compared with the response, and decoding is
simulated: a cycle begins where the one before it ended. Drafts that have the candidates of all depths at once
build their trees best-first, and the nodes of such a tree are the first ones of a larger tree.

Legend: P positions, S steps, K top-k, N nodes with the root, n = K + (S - 1) K^2 candidates, G 1 or K, C
classes of confidence.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from eagle_kit.core.shape import MAX_WINDOW, SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.ops.best_first import best_first
from eagle_kit.ops.tree_build import Candidates, top_scores

NOT_DRAFTED = 10**6
"""Rank of a token that was not drafted."""
EDGES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95)
"""Probabilities of the first drafted token that separate the classes of confidence."""
NUM_ASSUMED = 8
"""Cycles of average text that are added to each class, so that the estimate of a rare one is not extreme."""


class ReadyCandidates(NamedTuple):
    """Candidates of a draft that computes all depths at once.

    Attributes:
        tokens: int64 ``[P, S, K]``, target ids.
        scores: fp32 ``[P, S, G, K]``, their log-probabilities given each candidate of the depth before. G is
            1 if depths are drafted independently.
    """

    tokens: torch.Tensor
    scores: torch.Tensor


Drafts = Candidates | ReadyCandidates


@dataclass(frozen=True)
class DraftRecording:
    """Drafts at every position of responses, one after another.

    Attributes:
        steps: depth of the drafts, S.
        topk: candidates per depth, K.
        candidates: of all positions, ``[P, n]``, or by depth.
        confidence: fp32 ``[P]``, the draft's probability of its first token, or its confidence head's
            probability that the token is accepted.
        truth: int64 ``[P, S]``, the tokens of the response after the root, -1 after its end.
        lengths: positions of each response, in order.
    """

    steps: int
    topk: int
    candidates: Drafts
    confidence: torch.Tensor
    truth: torch.Tensor
    lengths: Sequence[int]

    @classmethod
    def join(cls, recordings: Sequence["DraftRecording"]) -> "DraftRecording":
        """Concatenate recordings of drafts of one size."""
        first = recordings[0]
        fields = zip(*(recording.candidates for recording in recordings), strict=True)
        lengths: list[int] = []
        for recording in recordings:
            lengths += recording.lengths
        return cls(
            steps=first.steps,
            topk=first.topk,
            candidates=type(first.candidates)(*(torch.cat(field) for field in fields)),
            confidence=torch.cat([recording.confidence for recording in recordings]),
            truth=torch.cat([recording.truth for recording in recordings]),
            lengths=lengths,
        )

    def ranks(self, steps: int, topk: int) -> torch.Tensor:
        """Rank of the response's token at every depth among the candidates of a smaller draft.

        Args:
            steps: depth of that draft.
            topk: its candidates per depth.

        Returns:
            int64 ``[P, steps]``, :data:`NOT_DRAFTED` for a token that was not drafted. A window of N nodes
            holds the candidates of ranks below N - 1.

        Raises:
            ValueError: the recording is not that deep or wide.
        """
        if steps > self.steps or topk > self.topk:
            raise ValueError(f"a recording of {self.steps},{self.topk} has no {steps},{topk}")
        if isinstance(self.candidates, ReadyCandidates):
            return self._ready_ranks(self.candidates, steps, topk)

        # Select the candidates that the smaller draft would have, depth by depth.
        levels = [self._first_level(self.candidates, topk)]
        for depth in range(2, steps + 1):
            levels.append(self._next_level(self.candidates, levels[-1], depth, topk))

        # Rank the candidates of all depths together by their scores.
        scores = torch.cat([level.scores for level in levels], 1)
        order = top_scores(scores, scores.shape[1])
        rank = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1]).expand_as(order))
        rank = torch.where(scores == float("-inf"), NOT_DRAFTED, rank)

        # At each depth at most one candidate continues the response.
        ranks = []
        start = 0
        for level in levels:
            end = start + level.indices.shape[1]
            level_rank = rank[:, start:end]
            ranks.append(torch.where(level.is_true, level_rank, NOT_DRAFTED).amin(1))
            start = end
        return torch.stack(ranks, 1)

    def _ready_ranks(self, ready: ReadyCandidates, steps: int, topk: int) -> torch.Tensor:
        """:meth:`ranks` of candidates of all depths: follows the response through their largest tree. Its
        first nodes are those of smaller trees."""
        # Build the largest tree.
        num_paths = sum(topk**depth for depth in range(1, steps + 1))
        shape = SpecShape(steps, topk, min(MAX_WINDOW, 1 + num_paths))
        tokens = ready.tokens[:, :steps, :topk]
        scores = ready.scores[:, :steps, :topk, :topk]
        tree = best_first(self.truth[:, 0], tokens, scores, shape)

        # Go down from the root to the child that continues the response. The root has no rank.
        node = torch.zeros_like(self.truth[:, :1])
        ranks = []
        for depth in range(1, steps + 1):
            is_next = (tree.parents == node) & (tree.depths == depth)
            is_next &= tree.tokens == self.truth[:, depth - 1, None]
            child = is_next.int().argmax(1, keepdim=True)
            node = torch.where(is_next.any(1, keepdim=True), child, NOT_DRAFTED)
            ranks.append(torch.where(node == NOT_DRAFTED, NOT_DRAFTED, node - 1))
        return torch.cat(ranks, 1)

    def _first_level(self, drafted: Candidates, topk: int) -> "_Level":
        """The ``topk`` most likely candidates of depth 1."""
        indices = torch.arange(topk).expand(len(drafted.tokens), topk)
        is_true = drafted.tokens[:, :topk] == self.truth[:, :1]
        return _Level(indices, drafted.scores[:, :topk], is_true)

    def _next_level(self, drafted: Candidates, above: "_Level", depth: int, topk: int) -> "_Level":
        """Children of the best ``topk`` candidates of a level. Those that the recorded draft did not extend
        have none: the scores of their children are -inf."""
        # The parents, and where the recording has their children.
        best = top_scores(above.scores, topk)
        parents = above.indices.gather(1, best)
        parent_scores = above.scores.gather(1, best)
        parent_is_true = above.is_true.gather(1, best)
        first = self.topk + (depth - 2) * self.topk**2
        extended = drafted.parents[:, first : first + self.topk**2 : self.topk]
        is_same = parents[:, :, None] == extended[:, None]
        place = is_same.int().argmax(2)
        indices = (first + place * self.topk)[:, :, None] + torch.arange(topk)

        # No path scores above its parent's, as in ops/tree_build.
        scores = drafted.scores.gather(1, indices.flatten(1)).view_as(indices)
        scores = torch.minimum(scores, parent_scores[:, :, None])
        scores = scores.masked_fill(~is_same.any(2, keepdim=True), float("-inf"))
        tokens = drafted.tokens.gather(1, indices.flatten(1)).view_as(indices)
        is_true = parent_is_true[:, :, None] & (tokens == self.truth[:, depth - 1, None, None])
        return _Level(indices.flatten(1), scores.flatten(1), is_true.flatten(1))

    def acceptance(self, shape: SpecShape) -> "Acceptance":
        """Predict the acceptance of decoding these responses in ``shape``."""
        if not shape.steps:
            return Acceptance(1.0, ())
        depths = self._accepted_depths(self.ranks(shape.steps, shape.topk), shape).tolist()

        # Count the cycles. A draft may reach beyond the end of a response.
        stats = SpecStats()
        for start, end in self._cycles(depths):
            num_left = end - start
            stats.observe(min(depths[start] + 1, num_left), min(depths[start], num_left))
        reach = stats.acceptance_per_position
        missing = [0.0] * (shape.steps - len(reach))
        return Acceptance(stats.accept_length, (*reach, *missing))

    def table(self, shapes: Iterable[SpecShape]) -> "AcceptanceTable":
        """Predict the acceptance of every one of ``shapes``, by the confidence of the draft."""
        num_classes = len(EDGES) + 1
        edges = torch.tensor(EDGES, dtype=torch.float64)
        classes = torch.bucketize(self.confidence.double(), edges, right=True).numpy()
        shares = {}
        reach = {}
        ranks: dict[tuple[int, int], torch.Tensor] = {}
        for shape in shapes:
            key = (shape.steps, shape.topk)
            if key not in ranks:
                ranks[key] = self.ranks(*key)
            accepted = self._accepted_depths(ranks[key], shape)

            # Classes are counted where cycles begin, which is more often in text that is hard to predict.
            begins = np.array([start for start, _ in self._cycles(accepted.tolist())])
            counts = np.bincount(classes[begins], minlength=num_classes)
            shares[shape] = counts / counts.sum()

            # Depths are counted in cycles whose draft ends within the response, if there are any.
            is_whole = (self.truth[begins, shape.steps - 1] >= 0).numpy()
            counted = begins[is_whole] if is_whole.any() else begins
            is_reached = accepted.numpy()[counted, None] > np.arange(shape.steps)
            average = is_reached.mean(0)
            by_class = []
            for number in range(num_classes):
                in_class = is_reached[classes[counted] == number]
                num_reached = in_class.sum(0) + NUM_ASSUMED * average
                by_class.append(num_reached / (len(in_class) + NUM_ASSUMED))
            reach[shape] = np.stack(by_class)
        return AcceptanceTable(EDGES, shares, reach)

    @staticmethod
    def _accepted_depths(ranks: torch.Tensor, shape: SpecShape) -> torch.Tensor:
        """Depth that a cycle at each position accepts, int64 ``[P]``."""
        return (ranks < shape.tokens - 1).long().cumprod(1).sum(1)

    def _cycles(self, depths: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Simulate decoding the responses.

        Args:
            depths: depth that a cycle at each position accepts.

        Yields:
            For each cycle, the position at which it begins and the end of its response.
        """
        position = 0
        for length in self.lengths:
            end = position + length
            while position < end:
                yield position, end
                position += min(depths[position] + 1, end - position)


class _Level(NamedTuple):
    """Candidates of one depth.

    Attributes:
        indices: int64 ``[P, m]``, of the candidates in the recording.
        scores: ``[P, m]``, of the paths to them; -inf for candidates that were not drafted.
        is_true: bool ``[P, m]``, whether the path is how the response continues.
    """

    indices: torch.Tensor
    scores: torch.Tensor
    is_true: torch.Tensor


class Acceptance(NamedTuple):
    """Acceptance of a shape.

    Attributes:
        length: tokens per verify, the bonus token included.
        reach: share of verifies that accepted each depth.
    """

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
        """Make a table of one class, for drafts whose confidence is not known."""
        reach = {shape: np.array([each.reach]) for shape, each in acceptances.items() if shape.steps}
        return cls((), dict.fromkeys(reach, np.ones(1)), reach)

    @classmethod
    def even(cls, shapes: Iterable[SpecShape], chance: float = 0.5) -> "AcceptanceTable":
        """Make a table in which every drafted depth is accepted with the same chance."""
        acceptances = {}
        for shape in shapes:
            reach = tuple(chance**depth for depth in range(1, shape.steps + 1))
            acceptances[shape] = Acceptance(1.0, reach)
        return cls.of(acceptances)

    @property
    def shapes(self) -> tuple[SpecShape, ...]:
        """Shapes in the table. Ordinary decoding is not one of them."""
        return tuple(self.reach)

    def length(self, shape: SpecShape) -> float:
        """Expected tokens per verify of average text."""
        if not shape.steps:
            return 1.0
        return 1.0 + float(self.shares[shape] @ self.reach[shape].sum(1))

    def without_confidence(self) -> "AcceptanceTable":
        """Return the table of cycles whose confidence is not known."""
        reach = {shape: (self.shares[shape] @ self.reach[shape])[None] for shape in self.reach}
        return AcceptanceTable((), dict.fromkeys(reach, np.ones(1)), reach)

    def only(self, shapes: Iterable[SpecShape]) -> "AcceptanceTable":
        """Return the table of those of ``shapes`` that are in this one."""
        shares = {}
        reach = {}
        for shape in shapes:
            if shape in self.reach:
                shares[shape] = self.shares[shape]
                reach[shape] = self.reach[shape]
        return AcceptanceTable(self.edges, shares, reach)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that :meth:`from_json` reads."""
        shapes = {}
        for shape in self.reach:
            shapes[str(shape)] = {
                "shares": self.shares[shape].round(4).tolist(),
                "reach": self.reach[shape].round(4).tolist(),
            }
        return {"edges": list(self.edges), "shapes": shapes}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "AcceptanceTable":
        """Make a table of :meth:`to_json`'s result. Raise ValueError, KeyError or TypeError for anything
        else."""
        edges = tuple(map(float, data["edges"]))
        num_classes = len(edges) + 1
        shares = {}
        reach = {}
        for text, given in data["shapes"].items():
            shape = SpecShape.parse(text)
            shares[shape] = np.array(given["shares"], dtype=float)
            reach[shape] = np.array(given["reach"], dtype=float)
            if shares[shape].shape != (num_classes,) or reach[shape].shape != (num_classes, shape.steps):
                raise ValueError(f"the acceptance of {shape} has another size than its table")
            both = np.append(reach[shape], shares[shape])
            if not ((both >= 0) & (both <= 1)).all():
                raise ValueError(f"the acceptance of {shape} is no share")
        return cls(edges, shares, reach)
