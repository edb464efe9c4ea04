"""A picture of the engine's cycles: time over floor, and tokens/s over the batch."""

from pathlib import Path
from typing import Any

from eagle_kit.bench.kernels.plot import HUES, MARKERS, frame, require_matplotlib

ACCEPT_LENGTH = 3
GOALS = ((1.0, "-"), (1.25, "--"), (1.4, ":"))


def plot_cycles(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw ``rows`` (of ``Bench.cycles``) into ``path``, a PNG file."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.2), layout="constrained", dpi=150)
    times, rates = figure.subplots(1, 2)
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    _draw_times(times, rows, shapes, modes)
    _draw_rates(rates, [row for row in rows if row["mode"] == "cycle"], shapes)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    handles, labels = times.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _draw_times(area: Any, rows: list[dict[str, Any]], shapes: list[str], modes: list[str]) -> None:
    """A dot for every cycle; lines at 1, 1.25 and 1.4 times the floor."""
    from matplotlib.ticker import NullFormatter

    for shape, hue in zip(shapes, HUES, strict=False):
        for mode, marker in zip(modes, MARKERS, strict=False):
            mine = [row for row in rows if row["shape"] == shape and row["mode"] == mode]
            floors = [row["floor_us"] / 1e3 for row in mine]
            area.scatter(
                floors,
                [row["cycle_us"]["median"] / 1e3 for row in mine],
                color=hue,
                marker=marker,
                s=28,
                alpha=0.85,
                linewidths=0,
                zorder=3,
                label=f"{shape}, {mode}" if mine else None,
            )
    if rows:
        floors = [row["floor_us"] / 1e3 for row in rows]
        ends = min(floors) / 1.3, max(floors) * 1.3
        for factor, line in GOALS:
            area.plot(ends, [factor * end for end in ends], line, color="#333333", linewidth=1.2, zorder=2)
        area.set_xscale("log")
        area.set_yscale("log")
        for axis in (area.xaxis, area.yaxis):
            axis.set_minor_formatter(NullFormatter())
            axis.set_major_formatter("{x:g}")
    frame(area, "A cycle over its floor (lines: 1, 1.25 and 1.4 times)", "floor, ms", "measured, ms")


def _draw_rates(area: Any, rows: list[dict[str, Any]], shapes: list[str]) -> None:
    """Tokens/s of every shape at the shortest context over the batch."""
    batches: list[int] = []
    shortest = min((row["context"] for row in rows), default=0)
    for shape, hue in zip(shapes, HUES, strict=False):
        points = []
        for row in rows:
            if row["shape"] == shape and row["context"] == min(
                other["context"] for other in rows if other["batch"] == row["batch"]
            ):
                found = {int(length): rate for length, rate in row["tokens_per_s"].items()}
                points.append((row["batch"], found.get(ACCEPT_LENGTH, found[min(found)])))
        points.sort()
        batches += [batch for batch, _ in points]
        if points:
            across, up = zip(*points, strict=True)
            area.plot(across, up, color=hue, marker="o", markersize=4, linewidth=1.6, label=shape)
    if batches:
        area.set_xscale("log", base=2)
        ticks = sorted(set(batches))
        area.set_xticks(ticks, [str(tick) for tick in ticks])
        area.set_xlim(min(ticks) / 1.15, max(ticks) * 1.15)
        area.set_ylim(bottom=0)
        area.legend(frameon=False, fontsize=9, loc="upper left")
    frame(
        area,
        f"Tokens/s if a cycle makes {ACCEPT_LENGTH} tokens (none: 1), context from {shortest:,}",
        "batch",
        "tokens/s",
    )
