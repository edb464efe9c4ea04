"""The figures as text, and the targets they are held to."""

from typing import Any, NamedTuple

LARGE = 64 * 1024
"""Tokens (batch x context) from which window attention is held to shares of the copy bandwidth."""


class Verdict(NamedTuple):
    """A target, and what was measured: ``wanted`` is the worst allowed, ``met`` None where nothing was
    measured that it is about."""

    target: str
    wanted: float
    measured: float | None
    at: str
    met: bool | None

    def __str__(self) -> str:
        if self.measured is None:
            return f"{self.target}: not measured"
        word = "not judged" if self.met is None else "met" if self.met else "MISSED"
        return f"{self.target}: {self.measured:.3g} at {self.at}: {word}"


def judge(
    target: str, wanted: float, found: list[tuple[float, str]], *, at_least: bool, counts: bool
) -> Verdict:
    """The worst of (figure, where it was found) against ``wanted``; ``counts`` False measures only."""
    if not found:
        return Verdict(target, wanted, None, "", None)
    measured, at = min(found) if at_least else max(found)
    return Verdict(
        target,
        wanted,
        measured,
        at,
        (measured >= wanted) == at_least or measured == wanted if counts else None,
    )


def kernel_targets(parts: dict[str, Any], *, counts: bool) -> list[Verdict]:
    """The targets of the kernels.

    Args:
        parts: of the record.
        counts: on a GPU and at full sizes; otherwise nothing is judged.
    """
    rows = [row for row in parts.get("window_attention", {}).get("cases", ()) if "times_us" in row]
    shares = {
        kind: [
            (row["share_of_copy"], row["case"])
            for row in rows
            if row["kind"] == kind and (row["batch"] * row["context"] >= LARGE or not counts)
        ]
        for kind in ("decode", "verify")
    }
    alone = {
        (row["nodes"], row["context"]): _ours(row)["median"]
        for row in rows
        if row["batch"] == 1 and not row["fp8"] and row["kind"] != "draft step"
    }
    ratios = [
        (time / alone[1, context], f"batch 1, context {context}")
        for (nodes, context), time in alone.items()
        if nodes == 8 and (1, context) in alone
    ]
    large = "batch x context >= 64 K"
    return [
        judge(
            f"window attention, decode, {large}: >= 0.85 of copy bandwidth",
            0.85,
            shares["decode"],
            at_least=True,
            counts=counts,
        ),
        judge(
            f"window attention, verify of 8 to 32 nodes, {large}: >= 0.80 of copy bandwidth",
            0.80,
            shares["verify"],
            at_least=True,
            counts=counts,
        ),
        judge(
            "window attention, verify of 8 nodes: <= 1.08 x decode, batch 1",
            1.08,
            ratios,
            at_least=False,
            counts=counts,
        ),
    ]


def _ours(row: dict[str, Any]) -> dict[str, Any]:
    """The times of the form that is ours: the first."""
    return next(iter(row["times_us"].values()))


def format_kernel(name: str, part: dict[str, Any]) -> str:
    """One kernel as a table: time with its spread, floor, share of the ceiling, rates, and how many times
    longer the other forms take."""
    heads = f"{'us':>10}{'spread':>16}{'floor us':>10}{'share':>7}{'GB/s':>9}{'TFLOP/s':>9}  times longer"
    lines = [f"{name:58}{heads}"]
    for row in part.get("cases", ()):
        lines.append(f"  {row['case']:56}" + _figures(row))
    if "error" in part:
        lines.append(f"  FAILED: {part['error']}")
    return "\n".join(line.rstrip() for line in lines)


def _figures(row: dict[str, Any]) -> str:
    if "times_us" not in row:
        return f"  {'left out: ' + row['left_out'] if 'left_out' in row else 'FAILED: ' + row['error']}"
    ours = _ours(row)
    others = [
        f"{name} {time['median'] / ours['median']:.2f}" if "median" in time else f"{name} failed"
        for name, time in list(row["times_us"].items())[1:]
    ]
    spread = f"{_short(ours['low'])}..{_short(ours['high'])}"
    return (
        f"{_short(ours['median']):>10}{spread:>16}{_short(row['floor_us']):>10}{row['share']:7.2f}"
        f"{row['gb_per_s']:9,.1f}{row['tflop_per_s']:9.3f}  {', '.join(others)}"
    )


def _short(us: float) -> str:
    return f"{us:.1f}" if us < 1000 else f"{us:,.0f}"
