"""A run folder as curves: `metrics.jsonl` and `judge.jsonl` over steps, tokens and time, and their panels."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape
from eagle_kit.report.plots import GREY, HUES, Curve, Curves, draw, hue, shade
from eagle_kit.train.run.clock import LAPS
from eagle_kit.train.run.folder import RunFolder

AXES = {"step": "optimiser steps", "tokens": "million tokens", "time": "minutes of optimiser steps"}
EMITTED = "tokens per verify, bonus included"
Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class RunCurves:
    """Figures in the files of a run.

    Attributes:
        path: run folder.
        metrics: rows of ``metrics.jsonl``.
        judged: rows of ``judge.jsonl``.
    """

    path: Path
    metrics: list[dict[str, Any]]
    judged: list[dict[str, Any]]

    @classmethod
    def read(cls, path: str | Path) -> "RunCurves":
        """Read the run in the folder ``path``. Raises UserError if it has no metrics."""
        folder = RunFolder(path)
        metrics = folder.metrics.rows()
        if not metrics:
            raise UserError(
                f"There are no curves in {path}: metrics.jsonl is missing or empty.", "Name a run folder."
            )
        return cls(Path(path), metrics, folder.judgements.rows())

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.resolve().name

    @property
    def shapes(self) -> list[str]:
        """Decoded shapes; the first one chooses ``best/``."""
        shapes: dict[str, None] = {}
        for row in self.judged:
            shapes |= dict.fromkeys(row["accept_length"])
        return list(shapes)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of all steps by part of the step, see :data:`LAPS`."""
        return {name: sum(row["seconds"][name] for row in self.metrics) for name in LAPS}

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        return sum(row["tokens"] for row in self.metrics)

    def x(self, axis: str, rows: Rows) -> list[float]:
        """Coordinates of ``rows`` on an axis.

        Args:
            axis: key of :data:`AXES`.
            rows: rows of ``metrics.jsonl`` or ``judge.jsonl``.
        """
        if axis == "step":
            return [row["step"] for row in rows]

        # Tokens and minutes add up over the steps.
        coordinates = {}
        total = 0.0
        for row in self.metrics:
            if axis == "tokens":
                total += row["tokens"] / 1e6
            else:
                total += sum(row["seconds"].values()) / 60
            coordinates[row["step"]] = total
        return [coordinates.get(row["step"], 0.0) for row in rows]

    def accept_lengths(self, shape: str, prefix: str = "") -> tuple[list[dict[str, Any]], list[float]]:
        """Accept lengths of a shape.

        Args:
            prefix: "simulated_" for the simulated ones.

        Returns:
            Rows of ``judge.jsonl`` that have the shape, and the accept length in each.
        """
        key = f"{prefix}accept_length"
        rows = [row for row in self.judged if shape in row[key]]
        return rows, [row[key][shape] for row in rows]

    def best(self, shape: str) -> tuple[dict[str, Any], float]:
        """The first row of ``judge.jsonl`` with the longest accept length of a shape, and that length.

        Args:
            shape: one of :attr:`shapes`.
        """
        rows, lengths = self.accept_lengths(shape)
        index = lengths.index(max(lengths))
        return rows[index], lengths[index]


def draw_run(run: RunCurves) -> dict[str, bytes]:
    """PNG figures of one run by name: ``accept_length`` if it was validated, ``learning`` and ``speed``."""
    figures = {}
    if run.shapes:
        figures["accept_length"] = draw(f"Accept length, decoded: {run.name}", _accept_length(run))
    figures["learning"] = draw(f"Learning: {run.name}", _learning(run))
    figures["speed"] = draw(f"Speed: {run.name}", _speed(run))
    return figures


def draw_comparison(groups: Mapping[str, Sequence[RunCurves]], shape: str) -> bytes:
    """PNG figure of several runs: accept lengths over steps, tokens and time, and losses.

    Args:
        groups: runs by label. Several runs of one label are repetitions: their mean is drawn, with a band
            from the worst to the best.
        shape: shape whose accept length is drawn.
    """
    # Accept lengths.
    panels = []
    for axis, axis_label in AXES.items():
        curves = []
        for i, (label, runs) in enumerate(groups.items()):
            xs = []
            ys = []
            for run in runs:
                rows, lengths = run.accept_lengths(shape)
                xs.append(run.x(axis, rows))
                ys.append(lengths)
            curves.append(_mean(xs, ys, label, i))
        panels.append(Curves(axis_label, EMITTED, curves))

    # Losses.
    curves = []
    for i, (label, runs) in enumerate(groups.items()):
        xs = [run.x("step", run.metrics) for run in runs]
        ys = [_running_mean(run.metrics, "loss") for run in runs]
        curves.append(_mean(xs, ys, label, i))
    panels.append(Curves(AXES["step"], "loss (of the same kind only)", curves))
    return draw(f"Accept length, decoded, {SpecShape.parse(shape).label}", panels, legend=True)


def smooth(values: Sequence[float | None]) -> list[float]:
    """Exponential moving average over about a fortieth of the curve, without bias towards zero.

    Args:
        values: values of the steps; None, of a skipped step, adds nothing.
    """
    decay = 1 - 1 / max(1.0, len(values) / 40)
    total = 0.0
    weight = 0.0
    smoothed = []
    for value in values:
        if value is not None:
            total = decay * total + value
            weight = decay * weight + 1
        smoothed.append(total / weight if weight else math.nan)
    return smoothed


def _with_gaps(values: Sequence[float | None]) -> list[float]:
    """Replace None, of skipped steps, by NaN, which is not drawn."""
    return [math.nan if value is None else value for value in values]


def _running_mean(rows: Rows, key: str) -> list[float]:
    """:func:`smooth` of one figure of ``rows``."""
    return smooth([row[key] for row in rows])


def _accept_length(run: RunCurves) -> list[Curves]:
    """Panels of the decoded accept length over steps, tokens and time, and of acceptance by position."""
    # Accept lengths by shape, decoded and simulated.
    panels = []
    for axis, axis_label in AXES.items():
        curves = []
        for i, shape in enumerate(run.shapes):
            rows, lengths = run.accept_lengths(shape)
            best_row, best_length = run.best(shape)
            mark = (run.x(axis, [best_row])[0], best_length)
            label = SpecShape.parse(shape).label
            curves.append(Curve(run.x(axis, rows), lengths, label, hue(i), "o-", mark=mark))

            rows, simulated = run.accept_lengths(shape, "simulated_")
            curves.append(Curve(run.x(axis, rows), simulated, "", hue(i), ":"))
        legend = "dotted: simulated" if axis == "step" else None
        panels.append(Curves(axis_label, EMITTED, curves, legend=legend))

    # Acceptance by position of the best head.
    curves = []
    for i, shape in enumerate(run.shapes):
        best_row, _ = run.best(shape)
        shares = [100 * share for share in best_row["acceptance_per_position"][shape]]
        positions = range(1, len(shares) + 1)
        curves.append(Curve(positions, shares, "", hue(i), "o-"))
    across = "at least so many drafts accepted"
    up = "% of verifies, at the best judgement"
    panels.append(Curves(across, up, curves, limits=(0, 100), whole=True))
    return panels


def _learning(run: RunCurves) -> list[Curves]:
    """Panels over optimiser steps: loss, matches, learning rate, gradient norm, and accept lengths by source
    if there are several."""
    rows = run.metrics
    steps = run.x("step", rows)
    across = AXES["step"]

    # Loss, and its running mean.
    losses = [row["loss"] for row in rows]
    loss = smooth(losses)
    loss_curves = [
        Curve(steps, _with_gaps(losses), faint=True),
        Curve(steps, loss, mark=(steps[-1], loss[-1])),
    ]

    # Matches by step of training-time test. A curriculum trains later steps later.
    matches = []
    ttt_length = len(rows[-1]["match_per_step"])
    for k in range(ttt_length):
        trained = [row for row in rows if k < len(row["match_per_step"])]
        shares = smooth([100 * row["match_per_step"][k] for row in trained])
        colour = shade(HUES[0], 0.7 * k / max(1, ttt_length - 1))
        matches.append(Curve(run.x("step", trained), shares, f"step {k}", colour))

    # Learning rate, gradient norm, and its running mean.
    rates = [row["lr"] for row in rows]
    norms = [row["grad_norm"] for row in rows]
    norm_curves = [
        Curve(steps, _with_gaps(norms), colour=GREY, faint=True),
        Curve(steps, smooth(norms), colour=GREY),
    ]

    panels = [
        Curves(across, "loss", loss_curves),
        Curves(across, "% of rows that match the target", matches, limits=(0, None), legend=""),
        Curves(across, "learning rate", [Curve(steps, rates, colour=HUES[1])]),
        Curves(across, "gradient norm, before clipping", norm_curves),
    ]
    by_source = _accept_lengths_by_source(run)
    if by_source:
        panels.append(Curves(across, "accept length in training, by source", by_source))
    return panels


def _accept_lengths_by_source(run: RunCurves) -> list[Curve]:
    """Curves of the simulated accept length by group of documents; none if the data has one group."""
    key = "simulated_accept_length_of"
    rows_of: dict[str, list[dict[str, Any]]] = {}
    for row in run.metrics:
        for name in row.get(key, ()):
            rows_of.setdefault(name, []).append(row)

    curves = []
    for i, (name, rows) in enumerate(rows_of.items()):
        lengths = smooth([row[key][name] for row in rows])
        curves.append(Curve(run.x("step", rows), lengths, name, hue(i)))
    return curves


def _speed(run: RunCurves) -> list[Curves]:
    """Panels over optimiser steps: seconds by part of the step, and tokens per second."""
    steps = run.x("step", run.metrics)
    parts = {name: smooth([row["seconds"][name] for row in run.metrics]) for name in LAPS}
    whole = sum(values[-1] for values in parts.values()) or 1.0
    curves = []
    for i, (name, values) in enumerate(parts.items()):
        curves.append(Curve(steps, values, f"{name} {values[-1] / whole:.0%}", hue(i)))
    rates = Curve(steps, _running_mean(run.metrics, "tokens_per_s"), colour=HUES[2])
    return [
        Curves(AXES["step"], "seconds of a step", curves, legend="", stacked=True),
        Curves(AXES["step"], "tokens/s, prompts included", [rates], limits=(0, None)),
    ]


def _mean(xs: Sequence[Sequence[float]], ys: Sequence[Sequence[float]], label: str, i: int) -> Curve:
    """The mean of repetitions, up to the end of the shortest, with a band from the worst to the best.

    Args:
        xs, ys: coordinates of the points of each repetition.
        i: number of the curve, which chooses its colour and style.
    """
    x = [fmean(values) for values in zip(*xs, strict=False)]
    at_points = list(zip(*ys, strict=False))
    y = [fmean(values) for values in at_points]
    low = [min(values) for values in at_points]
    high = [max(values) for values in at_points]
    style = "-" if i < len(HUES) else "--"
    return Curve(x, y, label, hue(i), style, low=low, high=high)
