"""Time of a cycle in any shape of speculation, from the times of a few shapes.

A cycle is one forward of the target over the window, one of the draft over the emitted tokens, and one of the
draft for each further step. The time of a forward is linear in the tokens before its rows, and piecewise
linear in the rows, with bends at numbers of rows that were measured. Its coefficients are fitted to measured
cycles and never negative, so that more rows never cost less. Residuals of the fit are added to it,
interpolated between batch sizes and contexts: those that all shapes of a point share, and those of single
shapes.

Legend: B requests, S steps, K top-k, N nodes with the root.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from eagle_kit.core.shape import SpecShape

FORWARDS = ("target", "extend", "step")
"""Forwards of a cycle: target over the window, draft over the emitted tokens, a further draft step."""
SPACING = 1.4
"""Least ratio of two numbers of rows between which the time of a forward bends."""
NUM_SWEEPS = 2000
"""Passes over all coefficients in a fit."""
RIDGE = 1e-5
"""Penalty on coefficients, so that those which the measured cycles do not determine stay small."""
NEAR = 0.01
"""Added to squared distances, so that no measured point has an infinite weight."""
SAME_POINT = 1.0
"""Powers of two by which contexts of cycles at one point may differ."""


class Timing(NamedTuple):
    """Measured ``seconds`` of a cycle of ``batch_size`` requests of ``context`` tokens."""

    batch_size: int
    shape: SpecShape
    context: int
    seconds: float


def join(before: Sequence[Timing], timings: Sequence[Timing]) -> list[Timing]:
    """Append ``timings`` to earlier ones. The machine may have another speed by now, so cycles at points that
    were timed before are scaled by the time of plain decoding before over that of now."""
    joined = list(before)
    for timing in timings:
        plain_before = _plain_seconds(before, timing)
        plain_now = _plain_seconds(timings, timing)
        if plain_before is None or plain_now is None:
            joined.append(timing)
        elif timing.shape.steps:
            joined.append(timing._replace(seconds=timing.seconds * plain_before / plain_now))
    return joined


def _plain_seconds(timings: Sequence[Timing], like: Timing) -> float | None:
    """Seconds of plain decoding at the point of the cycle ``like``; None where it was not timed."""
    nearest = None
    least = math.inf
    for timing in timings:
        if timing.shape.steps or timing.batch_size != like.batch_size:
            continue
        distance = abs(math.log((timing.context + 1) / (like.context + 1)))
        if distance < least:
            nearest = timing
            least = distance
    if nearest is None or not _are_near(nearest.context, like.context):
        return None
    return nearest.seconds


def _are_near(context: int, other: int) -> bool:
    """True for contexts of cycles at one point."""
    return abs(math.log2((context + 1) / (other + 1))) <= SAME_POINT


class Residual(NamedTuple):
    """Logarithm of a measured time over the fitted one, at a batch size and a context."""

    batch_size: int
    context: int
    log_ratio: float


@dataclass(frozen=True)
class CostTable:
    """Fitted times of cycles.

    Attributes:
        knots: of every forward, the numbers of rows at which its time bends. Beyond the last one the time
            grows as before it.
        coefficients: seconds of every feature of a cycle.
        error: mean relative error of the fit at the measured cycles.
        residuals: of the fit. Under None, the mean of all shapes at each point: a machine that is slow for a
            minute is so in all shapes. Under a shape, its residuals less that mean.
    """

    knots: Mapping[str, tuple[int, ...]]
    coefficients: tuple[float, ...]
    error: float = 0.0
    residuals: Mapping[SpecShape | None, tuple[Residual, ...]] = field(default_factory=dict)

    @classmethod
    def fit(cls, timings: Sequence[Timing]) -> "CostTable":
        """Fit a table that makes relative errors small.

        Raises:
            ValueError: there are no timings.
        """
        if not timings:
            raise ValueError("nothing was timed")

        # Times bend at numbers of rows that were measured.
        rows = [_rows(timing.batch_size, timing.shape) for timing in timings]
        knots = {name: _spaced(each[name] for each in rows if name in each) for name in FORWARDS}
        features = np.array(
            [_features(knots, timing.batch_size, timing.shape, timing.context) for timing in timings]
        )

        # Fit once, and remove what the cycles of a point have in common: it is the speed of the machine at
        # that time, not a difference between shapes.
        seconds = np.array([timing.seconds for timing in timings])
        found = _non_negative_least_squares(features / seconds[:, None], np.ones(len(seconds)))
        points = np.array(_points(timings))
        for point in np.unique(points):
            here = points == point
            seconds[here] /= np.exp(np.log(seconds[here] / (features[here] @ found)).mean())

        # Fit again.
        found = _non_negative_least_squares(features / seconds[:, None], np.ones(len(seconds)))
        error = np.abs(features @ found / seconds - 1).mean()
        return cls(knots, tuple(map(float, found)), float(error)).with_residuals(timings)

    def with_residuals(self, timings: Sequence[Timing]) -> "CostTable":
        """Return the table with the residuals of its fit at ``timings``."""
        # Residuals of each point.
        points: dict[int, list[tuple[SpecShape, Residual]]] = {}
        for point, timing in zip(_points(timings), timings, strict=True):
            size, shape, context, seconds = timing
            residual = Residual(size, context, math.log(seconds / self._fitted(size, shape, context)))
            points.setdefault(point, []).append((shape, residual))

        # Split them into the mean of the point and the differences from it.
        residuals: defaultdict[SpecShape | None, list[Residual]] = defaultdict(list)
        for at_point in points.values():
            mean = sum(residual.log_ratio for _, residual in at_point) / len(at_point)
            _, first = at_point[0]
            residuals[None].append(first._replace(log_ratio=mean))
            for shape, residual in at_point:
                residuals[shape].append(residual._replace(log_ratio=residual.log_ratio - mean))
        return replace(self, residuals={shape: tuple(found) for shape, found in residuals.items()})

    def seconds(self, batch_size: int, shape: SpecShape, context: int) -> float:
        """Predict the time of a cycle."""
        common = _interpolated(self.residuals.get(None, ()), batch_size, context)
        own = _interpolated(self.residuals.get(shape, ()), batch_size, context)
        return self._fitted(batch_size, shape, context) * math.exp(common + own)

    def row_share(self, batch_size: int, shape: SpecShape, context: int, num_rows: int) -> float:
        """Predict the time of a cycle whose target reads ``num_rows`` in place of whole windows, over the
        time with whole windows. No engine needs it yet (``row_budgets.py``)."""
        # Context is left out: attention still runs over whole windows.
        whole = self._target_features(batch_size, batch_size * shape.tokens)
        packed = self._target_features(batch_size, num_rows)
        saved = float(np.dot(whole - packed, self.coefficients[-len(whole) :]))
        return 1.0 - saved / self._fitted(batch_size, shape, context)

    def _target_features(self, batch_size: int, num_rows: int) -> np.ndarray:
        """Features of a forward of the target without context."""
        return np.array(_of_forwards(self.knots, batch_size, {"target": num_rows}, {"target": 1}, 0))

    def backfill_seconds(self, batch_size: int, num_tokens: int, context: int) -> float:
        """Predict the time of a draft backfill of ``num_tokens`` of each request."""
        rows = {"extend": batch_size * num_tokens}
        features = _of_forwards(self.knots, batch_size, rows, {"extend": 1}, context)
        return float(np.dot(features, self.coefficients[-len(features) :]))

    def _fitted(self, batch_size: int, shape: SpecShape, context: int) -> float:
        """Seconds of a cycle by the fit alone."""
        return float(np.dot(_features(self.knots, batch_size, shape, context), self.coefficients))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that :meth:`from_json` reads. Residuals are left out: :meth:`with_residuals`
        computes them again."""
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
    points: list[int] = []
    for timing in timings:
        point = max(points, default=-1) + 1
        for known, other in zip(points, timings, strict=False):
            if other.batch_size == timing.batch_size and _are_near(other.context, timing.context):
                point = known
                break
        points.append(point)
    return points


def _interpolated(residuals: Sequence[Residual], batch_size: int, context: int) -> float:
    """Interpolate between measured points, by inverse squared distance. Distances are those of the logarithms
    to base 2 of batch sizes and of square roots of contexts."""
    if not residuals:
        return 0.0
    at = np.array([[math.log2(each.batch_size), math.log2(each.context + 1) / 2] for each in residuals])
    here = np.array([math.log2(batch_size), math.log2(context + 1) / 2])
    weights = 1 / (((at - here) ** 2).sum(1) + NEAR)
    return float(weights @ [each.log_ratio for each in residuals] / weights.sum())


def _rows(batch_size: int, shape: SpecShape) -> dict[str, int]:
    """Rows of each forward of a cycle."""
    rows = {"target": batch_size * shape.tokens}
    if shape.steps:
        rows["extend"] = batch_size * (shape.steps + 1)
    if shape.steps > 1:
        rows["step"] = batch_size * shape.topk
    return rows


def _spaced(rows: Iterable[int]) -> tuple[int, ...]:
    """Numbers of rows without those that are too near to a larger one, ascending. The largest stays: it
    decides how times are extrapolated."""
    spaced: list[int] = []
    for num_rows in sorted(set(rows), reverse=True):
        if not spaced or spaced[-1] >= SPACING * num_rows:
            spaced.append(num_rows)
    return tuple(reversed(spaced))


def _features(
    knots: Mapping[str, tuple[int, ...]], batch_size: int, shape: SpecShape, context: int
) -> list[float]:
    """Features of which a cycle's time is a linear function: a constant, whether it drafts, the steps of a
    tree, and those of its forwards."""
    counts = {"target": 1, "extend": min(shape.steps, 1), "step": max(shape.steps - 1, 0)}
    is_drafting = float(shape.steps > 0)
    tree_steps = float(shape.steps * (shape.topk > 1))
    of_forwards = _of_forwards(knots, batch_size, _rows(batch_size, shape), counts, context)
    return [1.0, is_drafting, tree_steps, *of_forwards]


def _of_forwards(
    knots: Mapping[str, tuple[int, ...]],
    batch_size: int,
    rows: Mapping[str, int],
    counts: Mapping[str, int],
    context: int,
) -> list[float]:
    """Features of ``counts`` forwards of each kind over some rows: a constant and the pieces of the rows,
    whether there are several requests (whose attention on a CPU is in groups by length), the number of
    requests, and the keys that requests and rows read."""
    features = []
    for name in FORWARDS:
        num_rows = rows.get(name, 1)
        count = counts.get(name, 0)
        features += [count * piece for piece in _pieces(knots[name], num_rows)]
        features.append(count * float(batch_size > 1))
        features.append(count * batch_size / 8)
        features.append(count * batch_size * context / 1e3)
        features.append(count * num_rows * context / 1e5)
    return features


def _pieces(knots: Sequence[int], num_rows: int) -> list[float]:
    """1, then the part of every interval between knots that lies below ``num_rows``; the last interval has no
    end."""
    pieces = [1.0]
    for i, (low, high) in enumerate(pairwise(knots)):
        part = max((num_rows - low) / (high - low), 0.0)
        is_last = i == len(knots) - 2
        if not is_last:
            part = min(part, 1.0)
        pieces.append(part)
    return pieces


def _non_negative_least_squares(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Minimise ``|rows x - wanted|^2`` with a small penalty on x over x >= 0, by coordinate descent."""
    # Columns of unit size; columns of zeros get the coefficient 0.
    scale = np.sqrt((rows**2).mean(0))
    is_used = scale > 0
    columns = rows[:, is_used] / scale[is_used]
    gram = columns.T @ columns + RIDGE * len(rows) * np.eye(columns.shape[1])

    # Move each coordinate to its minimum, the others fixed.
    x = np.zeros(columns.shape[1])
    slope = -(columns.T @ wanted)
    for _ in range(NUM_SWEEPS):
        for i in range(len(x)):
            moved = max(x[i] - slope[i] / gram[i, i], 0.0)
            slope += gram[:, i] * (moved - x[i])
            x[i] = moved

    coefficients = np.zeros(rows.shape[1])
    coefficients[is_used] = x / scale[is_used]
    return coefficients
