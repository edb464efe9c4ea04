"""Pictures of a summary: accept length by task, acceptance per draft position, speed-up over plain decoding.

A draft has a hue and its shapes are shades of it, from the colour-blind-safe set of Okabe and Ito; the value
stands at the end of every bar, so that nothing has to be read off an axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape
from eagle_kit.eval.report import part_label, setup
from eagle_kit.eval.summary import ALL, find_row

_HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "osD^vP"
_GREY = "#555555"
_BAR = 0.8
"""Share of a group's height that its bars fill."""


@dataclass(frozen=True)
class _Series:
    """One draft with one shape, as it is drawn."""

    draft: str
    shape: str
    label: str
    hue: str
    colour: tuple[float, float, float]
    marker: str


def require_matplotlib() -> None:
    """Raises UserError when matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "matplotlib is not installed.",
            "Install it with pip install 'eagle_kit[eval]', or give --no-plots.",
        ) from None


def plot_summary(summary: dict[str, Any], folder: Path) -> dict[str, str]:
    """Draw all plots into ``folder`` as PNG.

    Returns:
        Paths by name: ``summary`` (the three panels in one picture), ``accept_length``,
        ``acceptance_per_position`` and ``speedup``. Empty when only plain decoding was measured.
    """
    require_matplotlib()
    series = _series(summary)
    if not series:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    tasks, parts = _parts(summary, categories=False), _parts(summary, categories=True)
    paths = {}
    for name, title, height in (
        ("accept_length", "Accept length by task", _bars_height(parts, series)),
        ("acceptance_per_position", "Acceptance per draft position", 4.0),
        ("speedup", "Speed-up over plain decoding", _bars_height(parts, series)),
    ):
        figure, area = _figure(summary, series, title, 8.0, height, columns=1)
        if name == "accept_length":
            _draw_accept_length(area[0], summary, series, parts)
        elif name == "speedup":
            _draw_speedup(area[0], summary, series, parts)
        else:
            _draw_positions(area[0], summary, series)
        paths[name] = _save(figure, folder / f"{name}.png")
    figure, areas = _figure(
        summary, series, "Speculative decoding", 15.0, max(4.2, _bars_height(tasks, series)), 3
    )
    _draw_accept_length(areas[0], summary, series, tasks)
    _draw_positions(areas[1], summary, series)
    _draw_speedup(areas[2], summary, series, tasks)
    for area, text in zip(areas, ("Accept length", "Acceptance per draft position", "Speed-up"), strict=True):
        area.set_title(text, fontsize=11, loc="left")
    return {"summary": _save(figure, folder / "summary.png"), **paths}


def _series(summary: dict[str, Any]) -> list[_Series]:
    pairs = list(
        dict.fromkeys((row["draft"], row["shape"]) for row in summary["rows"] if row["draft"] is not None)
    )
    drafts = list(dict.fromkeys(draft for draft, _ in pairs))
    shapes = list(dict.fromkeys(shape for _, shape in pairs))
    out = []
    for draft, shape in pairs:
        hue, shade = _HUES[drafts.index(draft) % len(_HUES)], shapes.index(shape)
        kind = "chain" if SpecShape.parse(shape).topk == 1 else "tree"
        lighter = 0.55 * shade / max(len(shapes) - 1, 1)
        out.append(
            _Series(
                draft,
                shape,
                f"{draft}  {shape} ({kind})" if len(drafts) > 1 else f"{shape} ({kind})",
                hue,
                _lighten(hue, lighter),
                _MARKERS[shade % len(_MARKERS)],
            )
        )
    return out


def _lighten(colour: str, amount: float) -> tuple[float, float, float]:
    """Mix a ``#rrggbb`` colour with white; amount 0 leaves it, 1 is white."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red + (1 - red) * amount, green + (1 - green) * amount, blue + (1 - blue) * amount


def _parts(summary: dict[str, Any], *, categories: bool) -> list[tuple[str, str]]:
    """(task, category) pairs in the order to draw; the sum over tasks only when there are several."""
    found = list(dict.fromkeys((row["task"], row["category"]) for row in summary["rows"]))
    parts = [part for part in found if part[0] != ALL and (categories or part[1] == ALL)]
    return parts + [(ALL, ALL)] * (len({task for task, _ in parts}) > 1)


def _bars_height(parts: Sequence[Any], series: Sequence[Any]) -> float:
    return 2.2 + len(parts) * (0.25 + 0.21 * len(series))


def _figure(
    summary: dict[str, Any], series: Sequence[_Series], title: str, width: float, height: float, columns: int
) -> tuple[Any, list[Any]]:
    """A figure with title, setup line and one legend above its axes."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch

    # All in one row where they fit, else one column a draft: a legend fills its columns from the top.
    entry = 0.55 + 0.075 * max(len(item.label) for item in series)
    per_row = len(series) if entry * len(series) <= width else len({item.draft for item in series})
    head = 0.65 + 0.22 * -(-len(series) // per_row)
    height += head - 0.65
    layout = ConstrainedLayoutEngine(rect=(0.01, 0.01, 0.98, 0.97 - head / height), wspace=0.06)
    figure = Figure(figsize=(width, height), layout=layout, dpi=150)
    areas = list(figure.subplots(1, columns, squeeze=False)[0])
    if columns == 1 and len({item.draft for item in series}) == 1:
        title = f"{title}: {series[0].draft}"
    elif columns > 1:
        title = f"{title}: {', '.join(dict.fromkeys(item.draft for item in series))}"
    inch = 1 / height
    figure.text(0.1 / width, 1 - 0.10 * inch, title, fontsize=13, fontweight="bold", va="top")
    figure.text(0.1 / width, 1 - 0.38 * inch, _subtitle(summary), fontsize=9, va="top", color=_GREY)
    figure.legend(
        handles=[Patch(color=item.colour, label=item.label) for item in series],
        loc="upper left",
        bbox_to_anchor=(0.02 / width, 1 - 0.52 * inch),
        ncols=per_row,
        frameon=False,
        fontsize=9,
        columnspacing=1.4,
        handlelength=1.1,
        handleheight=0.9,
    )
    return figure, areas


def _subtitle(summary: dict[str, Any]) -> str:
    settings = summary["settings"]
    return f"{setup(summary)}, greedy, batch {settings['batch_size']}, {summary['num_prompts']} prompts"


def _draw_bars(
    area: Any,
    summary: dict[str, Any],
    series: Sequence[_Series],
    parts: list[tuple[str, str]],
    field: str,
    digits: str,
) -> None:
    """Grouped horizontal bars, first part on top, the value at every bar's end."""
    thickness = _BAR / len(series)
    largest = 1.0
    for i, item in enumerate(series):
        for group, (task, category) in enumerate(parts):
            value = find_row(summary, item.draft, item.shape, task, category)[field]
            place = group + (i - (len(series) - 1) / 2) * thickness
            if value is not None:
                area.barh(place, value, height=thickness * 0.9, color=item.colour)
                largest = max(largest, value)
            text = "no data" if value is None else format(value, digits)
            area.annotate(
                text,
                (value or 0, place),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                zorder=4,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            )
    labels = [part_label({"task": task, "category": category}) for task, category in parts]
    area.set_yticks(range(len(parts)), labels, fontsize=9)
    for tick, (_, category) in zip(area.get_yticklabels(), parts, strict=True):
        tick.set_color("black" if category == ALL else _GREY)
    area.set_ylim(len(parts) - 0.5, -0.5)
    area.set_xlim(0, largest * 1.13)
    _plain_frame(area)
    area.tick_params(axis="y", length=0)
    area.xaxis.grid(True, color="#dddddd", linewidth=0.7)


def _draw_accept_length(
    area: Any, summary: dict[str, Any], series: Sequence[_Series], parts: list[tuple[str, str]]
) -> None:
    _draw_bars(area, summary, series, parts, "accept_length", ".2f")
    area.axvline(1, color=_GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=0.9)
    area.set_xlabel("tokens per verify, bonus token included (1 = nothing accepted)", fontsize=9)


def _draw_speedup(
    area: Any, summary: dict[str, Any], series: Sequence[_Series], parts: list[tuple[str, str]]
) -> None:
    _draw_bars(area, summary, series, parts, "speedup", ".2f")
    area.axvline(1, color="black", linewidth=1.2, zorder=3)
    area.set_xlabel("median over replies of tokens/s relative to plain (line at 1)", fontsize=9)


def _draw_positions(area: Any, summary: dict[str, Any], series: Sequence[_Series]) -> None:
    """Share of verifies that kept the draft token at each depth, over all tasks."""
    deepest, last = 1, []
    for item in series:
        shares = find_row(summary, item.draft, item.shape)["acceptance_per_position"]
        depth = SpecShape.parse(item.shape).steps
        shares = [100 * share for share in shares] + [0.0] * (depth - len(shares))
        area.plot(
            range(1, depth + 1), shares, color=item.colour, marker=item.marker, linewidth=1.8, markersize=5
        )
        deepest = max(deepest, depth)
        last.append((shares[0], item))
    gap = 17.0 / (area.figure.get_figheight() * 0.65)  # a line of text, in % of the axis
    for height, (share, item) in zip(_spread([share for share, _ in last], gap), last, strict=True):
        area.text(0.9, height, f"{share:.0f} %", color=item.hue, ha="right", va="center", fontsize=8)
    area.set_xticks(range(1, deepest + 1))
    area.set_xlim(0.45, deepest + 0.25)
    area.set_ylim(0, 102)
    area.set_xlabel("depth of the draft token", fontsize=9)
    area.set_ylabel("% of verifies that kept it (all tasks)", fontsize=9)
    _plain_frame(area)
    area.yaxis.grid(True, color="#dddddd", linewidth=0.7)


def _spread(values: list[float], gap: float) -> list[float]:
    """Move values so that neighbours are ``gap`` apart: a crowd is centred on its own mean."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    crowds: list[list[int]] = []
    for i in order:
        crowds.append([i])
        while len(crowds) > 1:
            below, above = (sum(values[j] for j in crowd) / len(crowd) for crowd in crowds[-2:])
            if above - below >= gap * (len(crowds[-2]) + len(crowds[-1])) / 2:
                break
            crowds[-2:] = [crowds[-2] + crowds[-1]]
    out = [0.0] * len(values)
    for crowd in crowds:
        middle = sum(values[j] for j in crowd) / len(crowd)
        for rank, j in enumerate(crowd):
            out[j] = middle + gap * (rank - (len(crowd) - 1) / 2)
    return out


def _plain_frame(area: Any) -> None:
    area.set_axisbelow(True)
    area.tick_params(labelsize=9)
    for side in ("top", "right"):
        area.spines[side].set_visible(False)


def _save(figure: Any, path: Path) -> str:
    figure.savefig(path)
    return str(path)
