"""Rows of a record as lines of text."""

from typing import Any

from eagle_kit.report.tables import in_few_digits


def heading(group: str, row: dict[str, Any]) -> str:
    """Title of a group, with the columns of its timed rows."""
    if "times_us" not in row:
        return group
    floor = f"{'floor us':>12}{'share':>7}{'GB/s':>9}{'TFLOP/s':>9}" if "floor_us" in row else ""
    return f"{group:46}{'us':>12}{'spread':>22}{floor}  times longer"


def format_row(row: dict[str, Any]) -> str:
    """One case: time with its spread, floor, share of the ceiling and rates, how many times longer the other
    forms take, and figures."""
    name = f"  {row.get('case', ''):44}"
    if row["status"] != "ok":
        reason = row.get("reason", row.get("error"))
        return f"{name}  {'FAILED' if row['status'] == 'failed' else 'left out'}: {reason}"
    line = name + (_times(row) if "times_us" in row else "")
    figures = ", ".join(f"{key} {in_few_digits(value)}" for key, value in row.get("figures", {}).items())
    return (f"{line}\n      {figures}" if "times_us" in row and figures else f"{line}  {figures}").rstrip()


def _times(row: dict[str, Any]) -> str:
    (name, ours), *others = row["times_us"].items()
    spread = f"{in_few_digits(ours['low'])}..{in_few_digits(ours['high'])}"
    floor = ""
    if "floor_us" in row:
        rates = f"{row['share']:7.2f}{row['gb_per_s']:9,.1f}{row['tflop_per_s']:9.3f}"
        floor = f"{in_few_digits(row['floor_us']):>12}{rates}"
    longer = [
        f"{other} {time['median'] / ours['median']:.2f}" if "median" in time else f"{other} failed"
        for other, time in others
    ]
    forms = f"{name}: {', '.join(longer)}" if longer else name
    return f"{in_few_digits(ours['median']):>12}{spread:>22}{floor}  {forms}"
