"""Pictures of runs: how they learn, what decoding gives, where the time goes; and several runs in one.

Colours are of the colour-blind-safe set of Okabe and Ito. Steps of training-time test, which have an order,
are shades of one hue. Every curve that ends in a figure worth knowing has it written beside it.
"""

import io
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.train.monitor.clock import LAPS
from eagle_kit.train.monitor.curves import AXES, RunCurves, smooth

HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#555555"


def has_matplotlib() -> bool:
    """Whether pictures can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def require_matplotlib() -> None:
    """Raises UserError when matplotlib is missing."""
    if not has_matplotlib():
        raise UserError("matplotlib is not installed.", "Install it with pip install 'eagle_kit[train]'.")


def draw_run(run: RunCurves) -> dict[str, bytes]:
    """PNG pictures of one run by name: ``accept_length`` when it was judged, ``learning`` and ``speed``."""
    judged = {"accept_length": _accept_length(run)} if run.shapes else {}
    return {**judged, "learning": _learning(run), "speed": _speed(run)}


def _accept_length(run: RunCurves) -> bytes:
    """Decoded accept length by shape over steps, tokens and time; how far the best judgement's drafts got."""
    figure, areas = _figure(f"Accept length, decoded: {run.name}", 4)
    for area, (axis, label) in zip(areas, AXES.items(), strict=False):
        for shape, hue in zip(run.shapes, HUES, strict=False):
            rows, lengths = run.accept_lengths(shape)
            area.plot(run.x(axis, rows), lengths, "o-", color=hue, markersize=4, label=_kind(shape))
            rows, walked = run.accept_lengths(shape, "simulated_")
            if walked:
                area.plot(run.x(axis, rows), walked, ":", color=hue, linewidth=1)
            found = run.best(shape)
            if found is not None:
                at, best = run.x(axis, [found[0]])[0], found[1]
                area.plot([at], [best], "*", color=hue, markersize=12)
                _write(area, at, best, f"{best:.3f}", hue)
        _frame(area, label, "tokens per verify, bonus included")
    areas[0].legend(fontsize=8, frameon=False, title="dotted: simulated", title_fontsize=8)
    for shape, hue in zip(run.shapes, HUES, strict=False):
        found = run.best(shape)
        shares = found[0].get("acceptance_per_position", {}).get(shape, []) if found else []
        if shares:
            areas[3].plot(range(1, len(shares) + 1), [100 * s for s in shares], "o-", color=hue, markersize=4)
    if not areas[3].lines:
        areas[3].text(0.5, 0.5, "not recorded by this run", ha="center", transform=areas[3].transAxes)
    areas[3].xaxis.get_major_locator().set_params(integer=True)
    areas[3].set_ylim(0, 100)
    _frame(areas[3], "at least so many drafts accepted", "% of verifies, at the best judgement")
    return _png(figure)


def _learning(run: RunCurves) -> bytes:
    """Loss, match per step of training-time test, learning rate, gradient norm; over steps."""
    figure, areas = _figure(f"Learning: {run.name}", 4)
    steps = run.x("step", run.metrics)
    losses = [row["loss"] for row in run.metrics]
    areas[0].plot(steps, losses, color=HUES[0], linewidth=0.6, alpha=0.35)
    smoothed = smooth(losses)
    areas[0].plot(steps, smoothed, color=HUES[0], linewidth=1.8)
    _write(areas[0], steps[-1], smoothed[-1], f"{smoothed[-1]:.3f}", HUES[0])
    depth = len(run.metrics[-1]["match_per_step"])
    for k in range(depth):
        rows = [row for row in run.metrics if k < len(row["match_per_step"])]
        shares = smooth([100 * row["match_per_step"][k] for row in rows])
        shade = _lighten(HUES[0], 0.7 * k / max(1, depth - 1))
        areas[1].plot(run.x("step", rows), shares, color=shade, label=f"step {k}")
    areas[1].legend(fontsize=7, frameon=False, ncols=2)
    areas[1].set_ylim(bottom=0)
    areas[2].plot(steps, [row["lr"] for row in run.metrics], color=HUES[1])
    areas[2].ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    norms = [row["grad_norm"] for row in run.metrics]
    areas[3].plot(steps, norms, color=GREY, linewidth=0.6, alpha=0.35)
    areas[3].plot(steps, smooth(norms), color=GREY, linewidth=1.8)
    labels = ("loss", "% of rows that match the target", "learning rate", "gradient norm, before clipping")
    for area, label in zip(areas, labels, strict=True):
        _frame(area, AXES["step"], label)
    return _png(figure)


def _speed(run: RunCurves) -> bytes:
    """Seconds of a step by part, and tokens/s; over steps."""
    figure, areas = _figure(f"Speed: {run.name}", 2)
    rows = [row for row in run.metrics if isinstance(row.get("seconds"), dict)]
    if rows:
        parts = {name: smooth([row["seconds"].get(name, 0.0) for row in rows]) for name in LAPS}
        whole = sum(values[-1] for values in parts.values()) or 1.0
        labels = [f"{name} {values[-1] / whole:.0%}" for name, values in parts.items()]
        areas[0].stackplot(run.x("step", rows), *parts.values(), colors=HUES, labels=labels, alpha=0.85)
        handles, names = areas[0].get_legend_handles_labels()
        areas[0].legend(handles[::-1], names[::-1], fontsize=8, frameon=False, bbox_to_anchor=(1, 1))
    else:
        areas[0].text(0.5, 0.5, "not recorded by this run", ha="center", transform=areas[0].transAxes)
    _frame(areas[0], AXES["step"], "seconds of a step")
    rates = smooth([row.get("tokens_per_s", 0.0) for row in run.metrics])
    areas[1].plot(run.x("step", run.metrics), rates, color=HUES[2])
    areas[1].set_ylim(bottom=0)
    _frame(areas[1], AXES["step"], "tokens/s, prompts included")
    return _png(figure)


def draw_comparison(groups: Mapping[str, Sequence[RunCurves]], shape: str) -> bytes:
    """Accept lengths of several runs over steps, tokens and time, and their losses; a run of many seeds is
    its mean with the band from its worst to its best.

    Args:
        groups: runs by label, those of one label being repetitions.
        shape: whose accept length is drawn.
    """
    figure, areas = _figure(f"Accept length, decoded, {_kind(shape)}", 4)
    for (label, runs), hue in zip(groups.items(), _hues(len(groups)), strict=True):
        for area, axis in zip(areas, AXES, strict=False):
            curves = [(run, *run.accept_lengths(shape)) for run in runs]
            _band(area, [(run.x(axis, rows), values) for run, rows, values in curves], hue, label)
        losses = [(run.x("step", run.metrics), smooth([row["loss"] for row in run.metrics])) for run in runs]
        _band(areas[3], losses, hue, label)
    for area, axis_label in zip(areas, AXES.values(), strict=False):
        _frame(area, axis_label, "tokens per verify, bonus included")
    _frame(areas[3], AXES["step"], "loss (of the same kind only)")
    handles, labels = areas[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, fontsize=9, frameon=False)
    return _png(figure)


def _band(area: Any, curves: Sequence[tuple[list[float], list[float]]], hue: str, label: str) -> None:
    """One line, or the mean of several over their common points with a band; where they have no common
    points, each."""
    if len(curves) == 1 or len({len(values) for _, values in curves}) != 1:
        for i, (x, y) in enumerate(curves):
            area.plot(x, y, color=hue, linewidth=1.6, label=label if i == 0 else None)
        return
    x, columns = (
        [statistics.fmean(at) for at in zip(*(c[0] for c in curves), strict=True)],
        [list(at) for at in zip(*(c[1] for c in curves), strict=True)],
    )
    area.plot(x, [statistics.fmean(column) for column in columns], color=hue, linewidth=1.6, label=label)
    area.fill_between(x, [min(c) for c in columns], [max(c) for c in columns], color=hue, alpha=0.18)


def _figure(title: str, columns: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.9 * columns, 3.7), layout="constrained", dpi=130)
    areas = list(figure.subplots(1, columns, squeeze=False)[0])
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure, areas


def _frame(area: Any, x: str, y: str) -> None:
    area.set_xlabel(x, fontsize=9)
    area.set_ylabel(y, fontsize=9)
    area.tick_params(labelsize=8)
    area.set_axisbelow(True)
    area.grid(True, color="#e2e2e2", linewidth=0.7)
    for side in ("top", "right"):
        area.spines[side].set_visible(False)


def _write(area: Any, x: float, y: float, text: str, hue: str) -> None:
    """A figure beside its point, on the side away from the edge."""
    area.margins(x=0.08, y=0.14)
    area.annotate(text, (x, y), xytext=(-4, 9), textcoords="offset points", ha="right", fontsize=8, color=hue)


def _kind(shape: str) -> str:
    return f"{shape} ({'chain' if shape.split(',')[1] == '1' else 'tree'})"


def _hues(count: int) -> list[Any]:
    """Colours for that many curves: the safe set, and a map where it is too small."""
    if count <= len(HUES):
        return list(HUES[:count])
    from matplotlib import colormaps

    return [colormaps["turbo"](0.05 + 0.9 * i / (count - 1)) for i in range(count)]


def _lighten(colour: str, amount: float) -> tuple[float, ...]:
    """Mix ``#rrggbb`` with white; 0 leaves it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return tuple(part + (1 - part) * amount for part in parts)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
