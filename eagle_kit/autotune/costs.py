"""Time of a cycle in any shape of speculation, from the times of a few.

A cycle is one forward of the target over the window, one of the draft over the emitted tokens, and one of the
draft for each further step. The time of a forward grows with its rows, piece by piece linearly, and with the
tokens before them; the pieces are fitted to measured cycles with coefficients that are never negative, so
that more rows never cost less, and bend where something was measured. What the fit leaves over is added to it
again, interpolated between batch sizes and contexts: of all shapes at a point, and of a measured shape beside
them.

Legend: B requests, S steps, K top-k, N nodes with the root.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from eagle_kit.core.shape import SpecShape

FORWARDS = ("target", "extend", "step")
SPACING = 1.4
"""Least ratio of two numbers of rows between which the time of a forward bends."""
NUM_SWEEPS = 2000
RIDGE = 1e-5
"""Penalty on coefficients, so that those which the measured cycles cannot tell apart stay small."""
NEAR = 0.01
"""Squared distance within which a measured point counts as there."""


class Timing(NamedTuple):
    """Measured ``seconds`` of a cycle of ``batch_size`` requests of ``context`` tokens."""

    batch_size: int
    shape: SpecShape
    context: int
    seconds: float


SAME_POINT = 1.0
"""Powers of two by which contexts of cycles at one point may differ."""


def join(before: Sequence[Timing], timings: Sequence[Timing]) -> list[Timing]:
    """Put ``timings`` behind those from ``before``. At points that both have, what counts are times beside
    plain decoding: the machine may be slower by now."""

    def plain(part: Sequence[Timing], like: Timing) -> float | None:
        """Seconds of plain decoding at the point of a cycle; None where it was not timed."""
        places = [each for each in part if not each.shape.steps and each.batch_size == like.batch_size]
        nearest = min(
            places, key=lambda each: abs(math.log((each.context + 1) / (like.context + 1))), default=None
        )
        if nearest is None or abs(math.log2((nearest.context + 1) / (like.context + 1))) > SAME_POINT:
            return None
        return nearest.seconds

    joined = list(before)
    for each in timings:
        then, now = plain(before, each), plain(timings, each)
        if then is None or now is None:
            joined.append(each)
        elif each.shape.steps:
            joined.append(each._replace(seconds=each.seconds * then / now))
    return joined


class Rest(NamedTuple):
    """Logarithm of a measured time over the fitted one, at a batch size and a context."""

    batch_size: int
    context: int
    log_ratio: float


@dataclass(frozen=True)
class CostTable:
    """Fitted times of cycles.

    Attributes:
        knots: of every forward, rows at which its time bends; beyond the last it goes on as before it.
        coefficients: seconds of every feature of a cycle.
        error: mean relative error of the fit at the measured cycles.
        rest: what the fit leaves over: under None of all shapes at a point together, as a machine that is
            slower for a minute is so in all of them, and of every measured shape beside that.
    """

    knots: Mapping[str, tuple[int, ...]]
    coefficients: tuple[float, ...]
    error: float = 0.0
    rest: Mapping[SpecShape | None, tuple[Rest, ...]] = field(default_factory=dict)

    @classmethod
    def fit(cls, timings: Sequence[Timing]) -> "CostTable":
        """Fit a table that makes relative errors small.

        Raises:
            ValueError: there are no timings.
        """
        if not timings:
            raise ValueError("nothing was timed")
        rows = [_rows(timing.batch_size, timing.shape) for timing in timings]
        knots = {name: _spaced(each[name] for each in rows if name in each) for name in FORWARDS}
        features = np.array([_features(knots, *timing[:3]) for timing in timings])
        seconds = np.array([timing.seconds for timing in timings])
        found = _non_negative_least_squares(features / seconds[:, None], np.ones(len(seconds)))
        points = np.array(_points(timings))
        for point in np.unique(points):  # what its cycles have in common says nothing about shapes
            here = points == point
            seconds[here] /= np.exp(np.log(seconds[here] / (features[here] @ found)).mean())
        found = _non_negative_least_squares(features / seconds[:, None], np.ones(len(seconds)))
        error = np.abs(features @ found / seconds - 1).mean()
        return cls(knots, tuple(map(float, found)), float(error)).with_rest(timings)

    def with_rest(self, timings: Sequence[Timing]) -> "CostTable":
        """Return the table with what the fit leaves over at ``timings``."""
        points: dict[int, list[tuple[SpecShape, Rest]]] = {}
        for point, (size, shape, context, seconds) in zip(_points(timings), timings, strict=True):
            mine = Rest(size, context, math.log(seconds / self._fitted(size, shape, context)))
            points.setdefault(point, []).append((shape, mine))
        rest: dict[SpecShape | None, tuple[Rest, ...]] = {}
        for here in points.values():
            common = sum(each.log_ratio for _, each in here) / len(here)
            rest[None] = (*rest.get(None, ()), here[0][1]._replace(log_ratio=common))
            for shape, each in here:
                own = each._replace(log_ratio=each.log_ratio - common)
                rest[shape] = (*rest.get(shape, ()), own)
        return replace(self, rest=rest)

    def seconds(self, batch_size: int, shape: SpecShape, context: int) -> float:
        """Predict the time of a cycle."""
        rest = sum(_interpolated(self.rest.get(each, ()), batch_size, context) for each in (None, shape))
        return self._fitted(batch_size, shape, context) * math.exp(rest)

    def row_share(self, batch_size: int, shape: SpecShape, context: int, num_rows: int) -> float:
        """Predict the time of a cycle whose target reads ``num_rows`` in place of whole windows, as a part of
        that with all."""
        whole, packed = (  # without context: attention stays that of whole windows
            np.array(_of_forwards(self.knots, batch_size, {"target": rows}, {"target": 1}, 0))
            for rows in (batch_size * shape.tokens, num_rows)
        )
        saved = float(np.dot(whole - packed, self.coefficients[-len(whole) :]))
        return 1.0 - saved / self._fitted(batch_size, shape, context)

    def backfill_seconds(self, batch_size: int, num_tokens: int, context: int) -> float:
        """Predict the time of a draft backfill of ``num_tokens`` of each request."""
        features = _of_forwards(
            self.knots, batch_size, {"extend": batch_size * num_tokens}, {"extend": 1}, context
        )
        return float(np.dot(features, self.coefficients[-len(features) :]))

    def _fitted(self, batch_size: int, shape: SpecShape, context: int) -> float:
        return float(np.dot(_features(self.knots, batch_size, shape, context), self.coefficients))

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` takes; ``rest`` is left out, see :meth:`with_rest`."""
        knots = {name: list(rows) for name, rows in self.knots.items()}
        return {"knots": knots, "coefficients": list(self.coefficients), "error": self.error}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "CostTable":
        """Make a table of :meth:`to_json`'s result. Raise ValueError, KeyError or TypeError for anything
        else."""
        knots = {name: tuple(map(int, data["knots"][name])) for name in FORWARDS}
        coefficients = tuple(map(float, data["coefficients"]))
        if len(coefficients) != len(_features(knots, 1, SpecShape(1, 1, 2), 1)):
            raise ValueError("the table has another number of coefficients")
        if not all(0 <= each < float("inf") for each in coefficients) or not any(coefficients):
            raise ValueError("the table has coefficients that are no times")
        return cls(knots, coefficients, float(data["error"]))


def _points(timings: Sequence[Timing]) -> list[int]:
    """Number of the point at which each cycle was timed; contexts of different shapes differ a little."""
    found: list[int] = []
    for size, _, context, _ in timings:
        near = (
            number
            for number, other in zip(found, timings, strict=False)
            if other.batch_size == size and abs(math.log2((other.context + 1) / (context + 1))) <= SAME_POINT
        )
        found.append(next(near, max(found, default=-1) + 1))
    return found


def _interpolated(rest: Sequence[Rest], batch_size: int, context: int) -> float:
    """Interpolate between what was measured, by inverse squared distance; of sizes, powers of two count."""
    if not rest:
        return 0.0
    at = np.array([[math.log2(each.batch_size), math.log2(each.context + 1) / 2] for each in rest])
    here = np.array([math.log2(batch_size), math.log2(context + 1) / 2])
    weights = 1 / (((at - here) ** 2).sum(1) + NEAR)
    return float(weights @ [each.log_ratio for each in rest] / weights.sum())


def _rows(batch_size: int, shape: SpecShape) -> dict[str, int]:
    """Rows of each forward of a cycle."""
    rows = {"target": batch_size * shape.tokens}
    if shape.steps:
        rows |= {"extend": batch_size * (shape.steps + 1)}
    if shape.steps > 1:
        rows |= {"step": batch_size * shape.topk}
    return rows


def _spaced(rows: Iterable[int]) -> tuple[int, ...]:
    """Thin out numbers of rows; the largest stays, which says how time goes on."""
    kept: list[int] = []
    for each in sorted(set(rows), reverse=True):
        if not kept or kept[-1] >= SPACING * each:
            kept.append(each)
    return tuple(reversed(kept))


def _features(
    knots: Mapping[str, tuple[int, ...]], batch_size: int, shape: SpecShape, context: int
) -> list[float]:
    """What a cycle's time is linear in: a constant, whether it speculates, pieces of the rows of each
    forward, its requests, whether there are several (whose attention on a CPU is in groups by length), and
    the keys that each reads."""
    counts = {"target": 1, "extend": min(shape.steps, 1), "step": max(shape.steps - 1, 0)}
    found = [1.0, float(shape.steps > 0), float(shape.steps * (shape.topk > 1))]
    return found + _of_forwards(knots, batch_size, _rows(batch_size, shape), counts, context)


def _of_forwards(
    knots: Mapping[str, tuple[int, ...]],
    batch_size: int,
    rows: Mapping[str, int],
    counts: Mapping[str, int],
    context: int,
) -> list[float]:
    """Features of forwards, ``counts`` of each."""
    found = []
    for name in FORWARDS:
        mine, count = rows.get(name, 1), counts.get(name, 0)
        found += [count * piece for piece in _pieces(knots[name], mine)]
        found += [count * float(batch_size > 1), count * batch_size / 8]
        found += [count * batch_size * context / 1e3, count * mine * context / 1e5]
    return found


def _pieces(knots: Sequence[int], rows: int) -> list[float]:
    """1, then the part of every interval between knots that lies below ``rows``; the last has no end."""
    pieces = [1.0]
    for i, (low, high) in enumerate(pairwise(knots)):
        part = max((rows - low) / (high - low), 0.0)
        pieces.append(part if i == len(knots) - 2 else min(part, 1.0))
    return pieces


def _non_negative_least_squares(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Minimise ``|rows x - wanted|`` and, a little, the part of each column, over x >= 0, one coordinate
    after another."""
    scale = np.sqrt((rows**2).mean(0))
    used = scale > 0
    columns = rows[:, used] / scale[used]
    gram = columns.T @ columns + RIDGE * len(rows) * np.eye(columns.shape[1])
    target = columns.T @ wanted
    x = np.zeros(columns.shape[1])
    slope = -target
    for _ in range(NUM_SWEEPS):
        for i in range(len(x)):
            moved = max(x[i] - slope[i] / gram[i, i], 0.0)
            slope += gram[:, i] * (moved - x[i])
            x[i] = moved
    found = np.zeros(rows.shape[1])
    found[used] = x / scale[used]
    return found
