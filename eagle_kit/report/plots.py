"""Figures: panels of curves or bars from plain data, in one style, as PNG.

Colours are the colour-blind-safe set of Okabe and Ito; series that have an order are shades of one hue.
matplotlib is imported when a figure is drawn, and its absence is one sentence.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle_kit.core.errors import UserError

HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP"
GREY = "#555555"
Colour = str | tuple[float, float, float]


def has_matplotlib() -> bool:
    """Return True when figures can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def require_matplotlib(remedy: str = "") -> None:
    """Raise UserError when matplotlib is missing; ``remedy`` names another way out than installing it."""
    if not has_matplotlib():
        other = f", or {remedy}" if remedy else ""
        raise UserError(
            "matplotlib is not installed.", f"Install it with pip install 'eagle_kit[eval]'{other}."
        )


def hue(i: int) -> str:
    """Colour of the i-th series."""
    return HUES[i % len(HUES)]


def shade(colour: str, amount: float) -> Colour:
    """Mix ``#rrggbb`` with white; amount 0 leaves it, 1 is white."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red + (1 - red) * amount, green + (1 - green) * amount, blue + (1 - blue) * amount


@dataclass(frozen=True)
class Curve:
    """A curve of a :class:`Curves` panel.

    Attributes:
        x, y: points.
        label: in the legend; empty leaves it out.
        style: matplotlib's line and marker, such as ``-``, ``o-`` or ``:``.
        faint: thin and pale, for raw values behind their running mean.
        low, high: bounds of a band around ``y``.
        mark: (x, y) of a point that gets a star and its value as text.
    """

    x: Sequence[float]
    y: Sequence[float]
    label: str = ""
    colour: Colour = HUES[0]
    style: str = "-"
    faint: bool = False
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    mark: tuple[float, float] | None = None


@dataclass(frozen=True)
class Curves:
    """A panel of curves.

    Attributes:
        across, up: labels of the axes.
        curves: drawn in their order.
        title: above the panel.
        limits: of the vertical axis; None leaves one open.
        legend: title of a legend inside the panel; None draws none.
        stacked: fill the areas between the curves, which share their ``x`` and are added up.
        whole: mark whole numbers only on the horizontal axis.
    """

    across: str
    up: str
    curves: Sequence[Curve]
    title: str = ""
    limits: tuple[float | None, float | None] = (None, None)
    legend: str | None = None
    stacked: bool = False
    whole: bool = False

    @property
    def height(self) -> float:
        """Inches."""
        return 3.6

    def draw(self, area: Any) -> None:
        """Draw into matplotlib axes."""
        area.margins(x=0.08 if any(c.mark for c in self.curves) else 0.05, y=0.1)
        if self.stacked and self.curves:
            layers = [curve.y for curve in self.curves]
            labels, colours = [c.label for c in self.curves], [c.colour for c in self.curves]
            area.stackplot(self.curves[0].x, *layers, labels=labels, colors=colours, alpha=0.85)
        else:
            for curve in self.curves:
                _draw_curve(area, curve)
        if self.whole:
            area.xaxis.get_major_locator().set_params(integer=True)
        if self.legend is not None:
            handles, labels = area.get_legend_handles_labels()
            look = {"fontsize": 8, "title_fontsize": 8, "frameon": False, "title": self.legend}
            if self.stacked:  # beside the layers, in their order
                area.legend(handles[::-1], labels[::-1], bbox_to_anchor=(1, 1), loc="upper left", **look)
            else:
                area.legend(handles, labels, **look)
        bottom, top = self.limits
        if bottom is not None and top is None:
            top = 1.05 * area.get_ylim()[1]
        area.set_ylim(bottom=bottom, top=top)
        frame(area, self.title, self.across, self.up)


@dataclass(frozen=True)
class BarSeries:
    """One bar a group.

    Attributes:
        values: a number a group; None is written as "no data".
        dots: of every group, single measurements behind its value.
    """

    label: str
    values: Sequence[float | None]
    colour: Colour = HUES[0]
    dots: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class Bars:
    """A panel of grouped horizontal bars, the first group on top, the value at the end of every bar.

    Attributes:
        across: label of the horizontal axis.
        groups: their names.
        line: value of a vertical line to compare with; None draws none.
        start: value at which the bars begin.
    """

    across: str
    groups: Sequence[str]
    series: Sequence[BarSeries]
    title: str = ""
    line: float | None = None
    start: float = 0.0

    @property
    def height(self) -> float:
        """Inches."""
        return 1.1 + len(self.groups) * (0.15 + 0.21 * len(self.series))

    def draw(self, area: Any) -> None:
        """Draw into matplotlib axes."""
        thick = 0.8 / max(len(self.series), 1)
        ends = [self.start + 0.1]
        for i, series in enumerate(self.series):
            for group, value in enumerate(series.values):
                place = group + (i - (len(self.series) - 1) / 2) * thick
                dots = series.dots[group] if series.dots else ()
                end = max([value or self.start, *dots])
                ends.append(end)
                if value is not None:
                    area.barh(place, value - self.start, thick * 0.9, left=self.start, color=series.colour)
                area.plot(dots, [place] * len(dots), "o", color=GREY, markersize=3.5)
                _write(area, end, place, "no data" if value is None else f"{value:.2f}", (4, 0), va="center")
        area.set_yticks(range(len(self.groups)), self.groups)
        area.set_ylim(len(self.groups) - 0.5, -0.5)
        area.set_xlim(self.start, self.start + 1.15 * (max(ends) - self.start))
        frame(area, self.title, self.across, "")
        area.grid(False, axis="y")
        area.tick_params(axis="y", length=0)
        if self.line is not None:
            area.axvline(self.line, color=GREY, linewidth=1.2, linestyle=(0, (4, 3)))


@dataclass(frozen=True)
class HeatMap:
    """A panel of numbers in coloured cells, the first row on top; blue above the ``middle``, red below.

    Attributes:
        across: label of the horizontal axis.
        columns, rows: their names.
        values: of every row.
    """

    across: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float]]
    title: str = ""
    middle: float = 1.0

    @property
    def height(self) -> float:
        """Inches."""
        return 1.1 + 0.36 * len(self.rows)

    def draw(self, area: Any) -> None:
        """Draw into matplotlib axes."""
        from matplotlib.colors import TwoSlopeNorm

        numbers = [value for row in self.values for value in row]
        away = max(abs(value - self.middle) for value in numbers) or 1.0
        norm = TwoSlopeNorm(self.middle, self.middle - away, self.middle + away)
        area.imshow(self.values, norm=norm, cmap="RdBu", aspect="auto", alpha=0.75)
        for i, row in enumerate(self.values):
            for j, value in enumerate(row):
                area.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=8)
        area.set_xticks(range(len(self.columns)), self.columns)
        area.set_yticks(range(len(self.rows)), self.rows)
        frame(area, self.title, self.across, "")
        area.grid(False)
        area.tick_params(length=0)


Panel = Curves | Bars | HeatMap


def draw(title: str, panels: Sequence[Panel], *, columns: int = 0, legend: bool = False) -> bytes:
    """Draw panels side by side into one PNG.

    Args:
        title: of the figure; its second line is for the setup.
        columns: panels of a row; 0 puts all into one.
        legend: put one legend of all labels under the panels.

    Raises:
        UserError: matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    columns = columns or len(panels)
    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    heights = [max(panel.height for panel in row) for row in rows]
    size = (max(4.2 * columns, 7.0), sum(heights) + 0.7)
    figure = Figure(figsize=size, layout="constrained", dpi=130)
    areas = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights).flat
    for panel, area in zip(panels, areas, strict=True):
        panel.draw(area)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    if legend:
        handles = _legend_of(panels)
        figure.legend(handles=handles, loc="outside lower left", ncols=4, fontsize=9, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def frame(area: Any, title: str, across: str, up: str) -> None:
    """Give matplotlib axes a title, labels and a light grid, and take their box away."""
    area.set_title(title, loc="left", fontsize=10)
    area.set_xlabel(across, fontsize=9)
    area.set_ylabel(up, fontsize=9)
    area.tick_params(labelsize=8)
    area.set_axisbelow(True)
    area.grid(True, color="#e2e2e2", linewidth=0.7)
    for side in ("top", "right"):
        area.spines[side].set_visible(False)


def _draw_curve(area: Any, curve: Curve) -> None:
    width, alpha = (0.6, 0.35) if curve.faint else (1.6, 1.0)
    look = {"color": curve.colour, "linewidth": width, "alpha": alpha, "markersize": 4}
    area.plot(curve.x, curve.y, curve.style, label=curve.label or None, **look)
    if curve.low:
        area.fill_between(curve.x, curve.low, curve.high, color=curve.colour, alpha=0.18)
    if curve.mark is not None:
        x, y = curve.mark
        area.plot([x], [y], "*", color=curve.colour, markersize=11)
        _write(area, x, y, f"{y:.3f}", (-5, 8), ha="right", color=curve.colour)


def _write(area: Any, x: float, y: float, text: str, away: tuple[int, int], **look: Any) -> None:
    """Write beside a point, ``away`` points from it."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8}
    area.annotate(text, (x, y), xytext=away, textcoords="offset points", fontsize=8, bbox=box, **look)


def _legend_of(panels: Sequence[Panel]) -> list[Any]:
    """One patch for every label of all panels without a legend of their own."""
    from matplotlib.patches import Patch

    series: list[BarSeries | Curve] = []
    for panel in panels:
        series += panel.series if isinstance(panel, Bars) else ()
        series += panel.curves if isinstance(panel, Curves) and panel.legend is None else ()
    colours = {one.label: one.colour for one in series if one.label}
    return [Patch(color=colour, label=label) for label, colour in colours.items()]
