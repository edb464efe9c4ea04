"""Pictures of benchmarks: the roofline of the kernels, and the engine's cycles over their floor."""

from pathlib import Path
from typing import Any

from eagle_kit.report.plots import HUES, MARKERS, frame

COLOURS = HUES[:6]
"""Without black, which is for the lines of reference; beyond them series differ by their markers."""
GOALS = ((1.0, "-"), (1.25, "--"), (1.4, ":"))


def plot_roofline(record: dict[str, Any], path: Path) -> None:
    """Draw the roofline of a machine with every case on it, and the share of the ceiling that each kernel
    reaches, into ``path``, a PNG file."""
    groups = _by(record, "group")
    figure, (roof, shares) = _figure(record)
    peak = record["ceilings"]["flops_per_s"] / 1e12
    slope = record["ceilings"]["copy_bytes_per_s"] / 1e12
    knee = peak / slope
    low, high = 0.05 * knee, 20 * knee
    for i, (name, rows) in enumerate(groups.items()):
        points = [(row["flops"] / row["bytes"], row["tflop_per_s"]) for row in rows if row["flops"]]
        low, high = min([low, *(x / 2 for x, _ in points)]), max([high, *(2 * x for x, _ in points)])
        _scatter(roof, points, _style(i))
        _scatter(shares, [(100 * row["share"], i) for row in rows], {**_style(i), "label": name})
    roof.plot((low, knee, high), (low * slope, peak, peak), color="#333333", linewidth=1.4, zorder=2)
    roof.set(xscale="log", yscale="log")
    frame(roof, f"Roofline: copy {1e3 * slope:,.0f} GB/s, matmul {peak:,.3g} TFLOP/s, measured",
           "floating-point operations a byte", "TFLOP/s")  # fmt: skip
    shares.set_yticks(range(len(groups)), list(groups))
    shares.set_ylim(len(groups) - 0.4, -0.9)
    shares.set_xlim(left=0)
    frame(shares, "Share of the ceiling", "% (floor of bytes or operations over time, a dot a case)", "")
    _save(figure, path)


def plot_cycles(record: dict[str, Any], path: Path) -> None:
    """Draw the engine's cycles over their floor, with lines at 1, 1.25 and 1.4 times, and tokens/s over the
    batch, into ``path``, a PNG file. Hollow: over the floor at the data sheet's bandwidth, if known."""
    figure, (times, rates) = _figure(record)
    ends: list[float] = []
    for i, (name, rows) in enumerate(_by(record, "shape", "mode").items()):
        points = [(row["floor_us"] / 1e3, row["times_us"]["cycle"]["median"] / 1e3) for row in rows]
        ends += [floor for floor, _ in points]
        _scatter(times, points, {**_style(i), "label": name})
        stated = [
            (row["sheet_floor_us"] / 1e3, row["times_us"]["cycle"]["median"] / 1e3)
            for row in rows
            if "sheet_floor_us" in row
        ]
        ends += [floor for floor, _ in stated]
        hollow = {"facecolors": "none", "edgecolors": _style(i)["color"], "marker": _style(i)["marker"]}
        _scatter(times, stated, {**hollow, "linewidths": 1.0})
        if rows[0]["mode"] == "cycle":
            best: dict[int, float] = {}
            for row in sorted(rows, key=lambda row: -row["context"]):
                best[row["batch"]] = row["figures"]["tokens/s"]
            across = sorted(best)
            rates.plot(across, [best[batch] for batch in across], linewidth=1.6, **_style(i))
    for factor, line in GOALS if ends else ():
        span = [min(ends) / 1.3, max(ends) * 1.3]
        times.plot(span, [factor * end for end in span], line, color="#333333", linewidth=1.2, zorder=2)
    times.set(xscale="log", yscale="log")
    is_stated = record["ceilings"].get("sheet_bytes_per_s") is not None
    legend = ", hollow: data sheet's bandwidth" if is_stated else ""
    title = f"A cycle over its floor (lines: 1, 1.25 and 1.4 times{legend})"
    frame(times, title, "floor, ms", "measured, ms")
    rates.set_ylim(bottom=0)
    frame(rates, "Tokens/s if a cycle makes 3 tokens (none: 1), shortest context", "batch", "tokens/s")
    _save(figure, path)


def _by(record: dict[str, Any], *names: str) -> dict[str, list[dict[str, Any]]]:
    """Rows that were timed against a floor, by values."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in record["cases"].values():
        if "floor_us" in row:
            found.setdefault(", ".join(str(row[name]) for name in names), []).append(row)
    return found


def _figure(record: dict[str, Any]) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6), layout="constrained", dpi=150)
    title = ", ".join(str(value) for value in (*record["settings"].values(), record.get("date", "")))
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure, figure.subplots(1, 2, width_ratios=(3, 2))


def _scatter(area: Any, points: list[tuple[float, float]], style: dict[str, Any]) -> None:
    if points:
        across, up = zip(*points, strict=True)
        area.scatter(across, up, **{"s": 26, "alpha": 0.8, "linewidths": 0, "zorder": 3, **style})


def _style(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[(i // len(COLOURS) + i) % len(MARKERS)]}


def _save(figure: Any, path: Path) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if not handles:
        handles, labels = figure.axes[1].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
