"""A run folder as curves: `metrics.jsonl` and `judge.jsonl` over steps, tokens and time, and their panels."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
    """Figures that a run left.

    Attributes:
        path: its folder.
        metrics: rows of ``metrics.jsonl``.
        judged: rows of ``judge.jsonl``.
    """

    path: Path
    metrics: list[dict[str, Any]]
    judged: list[dict[str, Any]]

    @classmethod
    def read(cls, path: str | Path) -> "RunCurves":
        """Read the run in ``path``. Raises UserError when there is none."""
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
        """Shapes that were decoded, the one that chooses ``best/`` first."""
        return list(dict.fromkeys(shape for row in self.judged for shape in row["accept_length"]))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of all steps by lap, see :data:`LAPS`."""
        return {name: sum(row["seconds"][name] for row in self.metrics) for name in LAPS}

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        return sum(row["tokens"] for row in self.metrics)

    def x(self, axis: str, rows: Rows) -> list[float]:
        """Places of ``rows`` on one of :data:`AXES`."""
        if axis == "step":
            return [row["step"] for row in rows]
        if axis == "tokens":
            added = accumulate(row["tokens"] / 1e6 for row in self.metrics)
        else:
            added = accumulate(sum(row["seconds"].values()) / 60 for row in self.metrics)
        at = dict(zip((row["step"] for row in self.metrics), added, strict=True))
        return [at.get(row["step"], 0.0) for row in rows]

    def accept_lengths(self, shape: str, prefix: str = "") -> tuple[list[dict[str, Any]], list[float]]:
        """Judgements that have ``shape``, and its accept lengths; ``prefix`` may be ``simulated_``."""
        rows = [row for row in self.judged if shape in row[f"{prefix}accept_length"]]
        return rows, [row[f"{prefix}accept_length"][shape] for row in rows]

    def best(self, shape: str) -> tuple[dict[str, Any], float]:
        """The first judgement with the longest accept length of ``shape``, which is one of :attr:`shapes`."""
        rows, lengths = self.accept_lengths(shape)
        at = lengths.index(max(lengths))
        return rows[at], lengths[at]


def draw_run(run: RunCurves) -> dict[str, bytes]:
    """PNG figures of one run by name: ``accept_length`` when it was judged, ``learning`` and ``speed``."""
    figures = {"accept_length": ("Accept length, decoded", _accept_length(run))} if run.shapes else {}
    figures |= {"learning": ("Learning", _learning(run)), "speed": ("Speed", _speed(run))}
    return {name: draw(f"{title}: {run.name}", panels) for name, (title, panels) in figures.items()}


def draw_comparison(groups: Mapping[str, Sequence[RunCurves]], shape: str) -> bytes:
    """Accept lengths of several runs over steps, tokens and time, and their losses, as PNG; runs of one label
    are drawn as their mean with a band from the worst to the best.

    Args:
        groups: runs by label, those of one label being repetitions.
        shape: the shape whose accept length is drawn.
    """
    panels = []
    for axis, across in AXES.items():
        curves = []
        for i, (label, runs) in enumerate(groups.items()):
            judged = [run.accept_lengths(shape) for run in runs]
            places = [run.x(axis, rows) for run, (rows, _) in zip(runs, judged, strict=True)]
            curves.append(_mean(places, [lengths for _, lengths in judged], label, i))
        panels.append(Curves(across, EMITTED, curves))
    losses = []
    for i, (label, runs) in enumerate(groups.items()):
        places = [run.x("step", run.metrics) for run in runs]
        losses.append(_mean(places, [_running_mean(run.metrics, "loss") for run in runs], label, i))
    panels.append(Curves(AXES["step"], "loss (of the same kind only)", losses))
    return draw(f"Accept length, decoded, {SpecShape.parse(shape).label}", panels, legend=True)


def smooth(values: Sequence[float | None]) -> list[float]:
    """Running mean over about a fortieth of the curve, without the pull of its beginning; steps that were
    skipped, None, add nothing."""
    keep, total, weight, out = 1 - 1 / max(1.0, len(values) / 40), 0.0, 0.0, []
    for value in values:
        if value is not None:
            total, weight = keep * total + value, keep * weight + 1
        out.append(total / weight if weight else math.nan)
    return out


def _drawn(values: Sequence[float | None]) -> list[float]:
    """Leave gaps for steps that were skipped."""
    return [math.nan if value is None else value for value in values]


def _running_mean(rows: Rows, key: str) -> list[float]:
    return smooth([row[key] for row in rows])


def _accept_length(run: RunCurves) -> list[Curves]:
    """Decoded accept length by shape over steps, tokens and time; depth reached at the best judgement."""
    panels = []
    for axis, label in AXES.items():
        curves = []
        for i, shape in enumerate(run.shapes):
            rows, lengths = run.accept_lengths(shape)
            best, length = run.best(shape)
            top, name = (run.x(axis, [best])[0], length), SpecShape.parse(shape).label
            curves.append(Curve(run.x(axis, rows), lengths, name, hue(i), "o-", mark=top))
            rows, walked = run.accept_lengths(shape, "simulated_")
            curves.append(Curve(run.x(axis, rows), walked, "", hue(i), ":"))
        legend = "dotted: simulated" if axis == "step" else None
        panels.append(Curves(label, EMITTED, curves, legend=legend))
    reached = []
    for i, shape in enumerate(run.shapes):
        shares = [100 * share for share in run.best(shape)[0]["acceptance_per_position"][shape]]
        reached.append(Curve(range(1, len(shares) + 1), shares, "", hue(i), "o-"))
    up = "% of verifies, at the best judgement"
    return [*panels, Curves("at least so many drafts accepted", up, reached, limits=(0, 100), whole=True)]


def _learning(run: RunCurves) -> list[Curves]:
    """Loss, match per step of training-time test, learning rate, gradient norm, accept length by source where
    there are several; over optimiser steps."""
    steps, rows, across = run.x("step", run.metrics), run.metrics, AXES["step"]
    loss = _running_mean(rows, "loss")
    depth, matches = len(rows[-1]["match_per_step"]), []
    for k in range(depth):
        trained = [row for row in rows if k < len(row["match_per_step"])]
        shares = smooth([100 * row["match_per_step"][k] for row in trained])
        colour = shade(HUES[0], 0.7 * k / max(1, depth - 1))
        matches.append(Curve(run.x("step", trained), shares, f"step {k}", colour))
    losses, norms = ([row[key] for row in rows] for key in ("loss", "grad_norm"))
    names = dict.fromkeys(name for row in rows for name in row.get("simulated_accept_length_of", ()))
    lengths = []
    for i, name in enumerate(names):
        seen = [row for row in rows if name in row.get("simulated_accept_length_of", ())]
        smoothed = smooth([row["simulated_accept_length_of"][name] for row in seen])
        lengths.append(Curve(run.x("step", seen), smoothed, name, hue(i)))
    panels = [
        Curves(
            across,
            "loss",
            [
                Curve(steps, _drawn(losses), faint=True),
                Curve(steps, loss, mark=(steps[-1], loss[-1])),
            ],
        ),
        Curves(across, "% of rows that match the target", matches, limits=(0, None), legend=""),
        Curves(across, "learning rate", [Curve(steps, [row["lr"] for row in rows], colour=HUES[1])]),
        Curves(
            across,
            "gradient norm, before clipping",
            [Curve(steps, _drawn(norms), colour=GREY, faint=True), Curve(steps, smooth(norms), colour=GREY)],
        ),
    ]
    return [*panels, Curves(across, "accept length in training, by source", lengths)] if lengths else panels


def _speed(run: RunCurves) -> list[Curves]:
    """Seconds of a step by lap, and tokens/s; over optimiser steps."""
    steps = run.x("step", run.metrics)
    parts = {name: smooth([row["seconds"][name] for row in run.metrics]) for name in LAPS}
    whole = sum(values[-1] for values in parts.values()) or 1.0
    laps = [
        Curve(steps, values, f"{name} {values[-1] / whole:.0%}", hue(i))
        for i, (name, values) in enumerate(parts.items())
    ]
    rates = Curve(steps, _running_mean(run.metrics, "tokens_per_s"), colour=HUES[2])
    return [
        Curves(AXES["step"], "seconds of a step", laps, legend="", stacked=True),
        Curves(AXES["step"], "tokens/s, prompts included", [rates], limits=(0, None)),
    ]


def _mean(xs: Sequence[Sequence[float]], ys: Sequence[Sequence[float]], label: str, i: int) -> Curve:
    """The mean of repetitions up to the end of the shortest, with a band from the worst to the best."""
    x, y = ([fmean(at) for at in zip(*lines, strict=False)] for lines in (xs, ys))
    low, high = ([choose(at) for at in zip(*ys, strict=False)] for choose in (min, max))
    return Curve(x, y, label, hue(i), "-" if i < len(HUES) else "--", low=low, high=high)
