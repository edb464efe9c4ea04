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
    """Raise UserError when matplotlib is missing. ``remedy`` says what to do in place of installing
    it."""
    if not has_matplotlib():
        other = f", or {remedy}" if remedy else ""
        raise UserError(
            "matplotlib is not installed.", f"Install it with pip install 'eagle_kit[eval]'{other}."
        )


def hue(i: int) -> str:
    """Colour of the i-th series."""
    return HUES[i % len(HUES)]


def shade(colour: str, amount: float) -> Colour:
    """Mix ``#rrggbb`` with white: amount 0 leaves the colour as it is, and 1 is white."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red + (1 - red) * amount, green + (1 - green) * amount, blue + (1 - blue) * amount


@dataclass(frozen=True)
class Curve:
    """A curve of a :class:`Curves` panel.

    Attributes:
        x: of the points.
        y: of the points.
        label: in the legend; empty leaves it out.
        style: matplotlib's line and marker, such as ``-``, ``o-`` or ``:``.
        faint: thin and pale, for raw values behind their running mean.
        low: lower bounds of a band around ``y``; empty draws none.
        high: upper bounds of that band.
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
        across: label of the horizontal axis.
        up: label of the vertical axis.
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
        has_marks = any(curve.mark for curve in self.curves)
        area.margins(x=0.08 if has_marks else 0.05, y=0.1)

        # Curves.
        if self.stacked and self.curves:
            layers = [curve.y for curve in self.curves]
            labels = [curve.label for curve in self.curves]
            colours = [curve.colour for curve in self.curves]
            area.stackplot(self.curves[0].x, *layers, labels=labels, colors=colours, alpha=0.85)
        else:
            for curve in self.curves:
                _draw_curve(area, curve)
        if self.whole:
            area.xaxis.get_major_locator().set_params(integer=True)

        # Legend.
        if self.legend is not None:
            handles, labels = area.get_legend_handles_labels()
            style = {"fontsize": 8, "title_fontsize": 8, "frameon": False, "title": self.legend}
            if self.stacked:  # beside the layers, in their order
                area.legend(handles[::-1], labels[::-1], bbox_to_anchor=(1, 1), loc="upper left", **style)
            else:
                area.legend(handles, labels, **style)

        # Limits. A top that is left open has some room above the curves.
        bottom, top = self.limits
        if bottom is not None and top is None:
            top = 1.05 * area.get_ylim()[1]
        area.set_ylim(bottom=bottom, top=top)
        frame(area, self.title, self.across, self.up)


@dataclass(frozen=True)
class BarSeries:
    """One bar in each group.

    Attributes:
        label: in the legend.
        values: one number for each group; None is written as "no data".
        colour: of the bars.
        dots: single measurements of each group, from which its value comes.
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
        # Bars of a group lie one below the other around its tick.
        thickness = 0.8 / max(len(self.series), 1)
        right = self.start + 0.1
        for i, series in enumerate(self.series):
            offset = (i - (len(self.series) - 1) / 2) * thickness
            for group, value in enumerate(series.values):
                y = group + offset
                dots = series.dots[group] if series.dots else ()
                end = max([value or self.start, *dots])
                right = max(right, end)
                text = "no data"
                if value is not None:
                    width = value - self.start
                    area.barh(y, width, thickness * 0.9, left=self.start, color=series.colour)
                    text = f"{value:.2f}"
                area.plot(dots, [y] * len(dots), "o", color=GREY, markersize=3.5)
                _write(area, end, y, text, (4, 0), va="center")

        # Axes, with room for the texts behind the bars.
        area.set_yticks(range(len(self.groups)), self.groups)
        area.set_ylim(len(self.groups) - 0.5, -0.5)
        area.set_xlim(self.start, self.start + 1.15 * (right - self.start))
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
        columns: their names.
        rows: their names.
        values: numbers of every row, one a column.
        title: above the panel.
        middle: number of a white cell.
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

        largest = max(abs(value - self.middle) for row in self.values for value in row) or 1.0
        norm = TwoSlopeNorm(self.middle, self.middle - largest, self.middle + largest)
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

    # Rows of panels, each as high as its highest one.
    columns = columns or len(panels)
    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    heights = [max(panel.height for panel in row) for row in rows]
    size = (max(4.2 * columns, 7.0), sum(heights) + 0.7)
    figure = Figure(figsize=size, layout="constrained", dpi=130)
    areas = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights).flat
    for panel, area in zip(panels, areas, strict=True):
        panel.draw(area)

    # Title and legend.
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
    area.plot(
        curve.x,
        curve.y,
        curve.style,
        label=curve.label or None,
        color=curve.colour,
        linewidth=0.6 if curve.faint else 1.6,
        alpha=0.35 if curve.faint else 1.0,
        markersize=4,
    )
    if curve.low:
        area.fill_between(curve.x, curve.low, curve.high, color=curve.colour, alpha=0.18)
    if curve.mark is not None:
        x, y = curve.mark
        area.plot([x], [y], "*", color=curve.colour, markersize=11)
        _write(area, x, y, f"{y:.3f}", (-5, 8), ha="right", color=curve.colour)


def _write(area: Any, x: float, y: float, text: str, offset: tuple[int, int], **style: Any) -> None:
    """Write beside a point, ``offset`` typographic points from it."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8}
    area.annotate(text, (x, y), xytext=offset, textcoords="offset points", fontsize=8, bbox=box, **style)


def _legend_of(panels: Sequence[Panel]) -> list[Any]:
    """One patch for every label of all panels without a legend of their own."""
    from matplotlib.patches import Patch

    series: list[BarSeries | Curve] = []
    for panel in panels:
        if isinstance(panel, Bars):
            series += panel.series
        elif isinstance(panel, Curves) and panel.legend is None:
            series += panel.curves
    colours = {each.label: each.colour for each in series if each.label}
    return [Patch(color=colour, label=label) for label, colour in colours.items()]
