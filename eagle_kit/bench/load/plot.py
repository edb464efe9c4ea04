"""A picture of a run: how TTFT and ITL are distributed, and output tokens per second over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_kit.bench.load.report import output_over_time
from eagle_kit.bench.load.runner import Measurement
from eagle_kit.core.errors import UserError

COLOURS = ("#0072B2", "#D55E00")
"""Of the colour-blind-safe set of Okabe and Ito, one per endpoint."""


def require_matplotlib() -> None:
    """Raises UserError when matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "matplotlib is not installed.",
            "Install it with pip install 'eagle_kit[eval]', or leave out --plot.",
        ) from None


def plot(measurements: Sequence[Measurement], names: Sequence[str], path: Path) -> None:
    """Draw three panels into ``path``, a PNG file whose folder is made.

    The first two are cumulative: the share of replies (TTFT) or of tokens (ITL) that took no longer.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.2), layout="constrained", dpi=150)
    first, between, over_time = figure.subplots(1, 3)
    for measured, name, colour in zip(measurements, names, COLOURS, strict=False):
        good = [reply for reply in measured.replies if reply.outcome == "ok"]
        ttft = [(reply.ttft, 1.0) for reply in good if reply.ttft is not None]
        _draw_shares(first, ttft, name, colour)
        _draw_shares(between, [pair for reply in good for pair in reply.itl], name, colour)
        rates = output_over_time(measured)
        edges = [i * rates["bin_s"] for i in range(len(rates["tokens_per_s"]) + 1)]
        if len(edges) > 1:
            over_time.stairs(rates["tokens_per_s"], edges, color=colour, label=name, linewidth=1.6)
    for area, title, across, up in (
        (first, "Time to first token", "milliseconds", "% of replies"),
        (between, "Inter-token latency", "milliseconds per token", "% of tokens"),
        (over_time, "Output over time", "seconds", "tokens/s"),
    ):
        area.set_title(title, loc="left", fontsize=11)
        area.set_xlabel(across, fontsize=9)
        area.set_ylabel(up, fontsize=9)
        area.tick_params(labelsize=9)
        area.grid(True, color="#dddddd", linewidth=0.7)
        area.set_axisbelow(True)
        area.set_ylim(bottom=0)
        for side in ("top", "right"):
            area.spines[side].set_visible(False)
    handles, labels = over_time.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _draw_shares(area: Any, pairs: list[tuple[float, float]], name: str, colour: str) -> None:
    """The cumulative distribution of (seconds, weight) pairs, in milliseconds and percent."""
    if not pairs:
        return
    values, weights = zip(*sorted(pairs), strict=True)
    area.ecdf([1e3 * value for value in values], weights=weights, color=colour, label=name, linewidth=1.6)
    area.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}")
