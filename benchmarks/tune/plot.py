"""Plot of a comparison."""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.tune.prompts import MIXED
from benchmarks.tune.sizes import AUTO
from benchmarks.verdict import Rows
from eagle_kit.core.files import write_bytes_atomically
from eagle_kit.report.plots import GREY, Bars, BarSeries, Curve, Curves, HeatMap, Panel, draw, hue


def plot(record: dict[str, Any], path: Path) -> None:
    """Draw, for every draft, plain decoding, the best fixed shape and the choice by batch size, every shape
    by batch size, and the choice over the rounds of mixed text."""
    cells = [row for row in record["cases"].values() if "ratios" in row]
    names = list(dict.fromkeys(row["draft"] for row in cells))
    panels = [panel for name in names for panel in _panels(name, [r for r in cells if r["draft"] == name])]
    if panels:
        title = "Shapes chosen by measurements: speed over plain decoding"
        write_bytes_atomically(path, draw(title, panels, columns=len(panels) // len(names), legend=True))
    else:
        print("There is nothing to draw.", file=sys.stderr)


def _panels(name: str, cells: Rows) -> list[Panel]:
    """Panels of a draft."""
    batches = list(dict.fromkeys(row["batch"] for row in cells))
    settings = list(cells[0]["ratios"])
    means = {
        (setting, batch): geometric_mean(r["ratios"][setting] for r in cells if r["batch"] == batch)
        for setting in settings
        for batch in batches
    }
    fixed = [setting for setting in settings if setting != AUTO]
    best = [max((means[setting, batch], setting) for setting in fixed)[1] for batch in batches]
    groups = [f"batch {batch}\nbest {shape}" for batch, shape in zip(batches, best, strict=True)]
    series = [
        BarSeries("plain decoding", [1.0] * len(batches), GREY),
        _bars("best fixed shape", best, batches, cells, means, 1),
        _bars(AUTO, [AUTO] * len(batches), batches, cells, means, 0),
    ]
    panels: list[Panel] = [
        Bars("times plain decoding; a dot is a task", groups, series, name, line=1.0),
        HeatMap(
            "batch size",
            list(map(str, batches)),
            settings,
            [[means[setting, batch] for batch in batches] for setting in settings],
            "mean over tasks",
        ),
    ]
    curves = [
        Curve(range(1, len(row["course"]) + 1), row["course"], f"batch {row['batch']}", hue(i), "o-")
        for i, row in enumerate(row for row in cells if row["task"] == MIXED)
    ]
    if curves:
        up = f"{AUTO} over plain decoding"
        panels.append(Curves("round", up, curves, "code, prose and noise in turns", legend="", whole=True))
    return panels


def _bars(
    label: str,
    chosen: Sequence[str],
    batches: Sequence[int],
    cells: Rows,
    means: dict[tuple[str, int], float],
    colour: int,
) -> BarSeries:
    pairs = list(zip(chosen, batches, strict=True))
    dots = [[row["ratios"][setting] for row in cells if row["batch"] == batch] for setting, batch in pairs]
    return BarSeries(label, [means[pair] for pair in pairs], hue(colour), dots)
