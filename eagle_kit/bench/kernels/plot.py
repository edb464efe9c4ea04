"""The roofline of a machine with every case on it, and the share of the ceiling that each kernel reaches."""

from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.kernels.ceilings import Ceilings

HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Of the colour-blind-safe set of Okabe and Ito; beyond them kernels differ by their markers."""
MARKERS = "osD^vP"


def require_matplotlib() -> None:
    """Raises UserError when matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "matplotlib is not installed.",
            "Install it with pip install 'eagle_kit[eval]', or give --no-plot.",
        ) from None


def plot_roofline(parts: dict[str, Any], ceilings: Ceilings, title: str, path: Path) -> None:
    """Draw the picture into ``path``, a PNG file."""
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = {name: [row for row in part.get("cases", ()) if "times_us" in row] for name, part in parts.items()}
    rows = {name: found for name, found in rows.items() if found}
    figure = Figure(figsize=(14, 6.4), layout="constrained", dpi=150)
    roof, shares = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_roof(roof, rows, ceilings)
    _draw_shares(shares, rows)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    handles, labels = shares.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def style(i: int) -> dict[str, Any]:
    """Colour and marker of the i-th kernel."""
    return {"color": HUES[i % len(HUES)], "marker": MARKERS[(i // len(HUES) + i) % len(MARKERS)]}


def frame(area: Any, title: str, across: str, up: str) -> None:
    """Title, labels, a light grid, no box."""
    area.set_title(title, loc="left", fontsize=11)
    area.set_xlabel(across, fontsize=9)
    area.set_ylabel(up, fontsize=9)
    area.tick_params(labelsize=9)
    area.grid(True, color="#dddddd", linewidth=0.7)
    area.set_axisbelow(True)
    for side in ("top", "right"):
        area.spines[side].set_visible(False)


def _draw_roof(area: Any, rows: dict[str, list[dict[str, Any]]], ceilings: Ceilings) -> None:
    """FLOP/s over FLOPs a byte; what computes nothing has no place here."""
    points = []
    for i, found in enumerate(rows.values()):
        mine = [
            (row["flops"] / row["bytes"], row["tflop_per_s"], row["share"]) for row in found if row["flops"]
        ]
        points += mine
        if mine:
            across, up, _ = zip(*mine, strict=True)
            area.scatter(across, up, s=26, alpha=0.85, linewidths=0, zorder=3, **style(i))
    peak, slope = ceilings.flops_per_s / 1e12, ceilings.copy_bytes_per_s / 1e12
    knee = peak / slope
    low = min([0.1 * knee, *(x for x, _, _ in points)]) / 2
    high = max([10 * knee, *(x for x, _, _ in points)]) * 2
    area.plot((low, knee, high), (low * slope, peak, peak), color="#333333", linewidth=1.4, zorder=2)
    area.set_xscale("log")
    area.set_yscale("log")
    area.annotate(f"copy {1e3 * slope:,.0f} GB/s", (low * 2, low * 2 * slope), xytext=(10, -6),
                  textcoords="offset points", fontsize=9, ha="left")  # fmt: skip
    area.annotate(f"matmul {peak:,.3g} TFLOP/s", (high, peak), xytext=(0, 5), textcoords="offset points",
                  fontsize=9, ha="right")  # fmt: skip
    frame(area, "Roofline (measured ceilings)", "floating-point operations a byte", "TFLOP/s")


def _draw_shares(area: Any, rows: dict[str, list[dict[str, Any]]]) -> None:
    """A dot for every case, a row for every kernel."""
    for i, (name, found) in enumerate(rows.items()):
        shares = [100 * row["share"] for row in found]
        area.scatter(
            shares, [i] * len(shares), s=26, alpha=0.7, linewidths=0, zorder=3, label=name, **style(i)
        )
    if "window_attention" in rows:
        at = list(rows).index("window_attention")
        area.plot([85, 85], [at - 0.4, at + 0.4], color="#333333", linewidth=1.4, zorder=2)
        area.annotate("85 %: target of large decodes", (85, at - 0.45), fontsize=8, ha="right", va="bottom")
    area.set_yticks(range(len(rows)), list(rows))
    area.set_ylim(len(rows) - 0.4, -0.9)
    area.set_xlim(left=0)
    frame(area, "Share of the ceiling", "% (floor of bytes or operations over time, a dot a case)", "")
