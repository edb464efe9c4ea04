"""Ways of training compared: accept lengths of every arm's heads over seeds, against the first arm's."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_kit.core.files import write_bytes_atomically, write_json_atomically, write_text_atomically
from eagle_kit.eval.report import part_label
from eagle_kit.eval.summary import ALL, find_row
from eagle_kit.report.plots import HUES, Bars, BarSeries, draw, shade
from eagle_kit.report.tables import Table, number

FACTS = "tokens_seen", "seconds", "peak_memory_gb", "parameters"
RESULT, TABLE, PLOT = "study.json", "study.md", "study.png"


def compare(
    summary: dict[str, Any],
    members: Mapping[str, Sequence[str]],
    about: Mapping[str, str],
    trained: Mapping[str, Mapping[str, Any]],
    out: Path,
) -> str:
    """Write the comparison into ``out`` as JSON, Markdown and PNG; returns the Markdown.

    Args:
        summary: of an evaluation of all heads.
        members: arm -> its heads, by their names in ``summary``; the first arm is the one to compare with.
        about: arm -> one line.
        trained: head -> the metadata it was exported with, and its number of ``parameters``.

    Raises:
        UserError: matplotlib is missing.
    """
    shapes = summary["settings"]["shapes"]
    parts = list(dict.fromkeys((row["task"], row["category"]) for row in summary["rows"]))
    arms: list[dict[str, Any]] = []
    for arm, heads in members.items():
        figures = []
        for shape in shapes:
            for task, category in parts:
                rows = [find_row(summary, head, shape, task, category) for head in heads]
                lengths = [row["accept_length"] for row in rows]
                where = {"shape": shape, "task": task, "category": category}
                figures.append({**where, "accept_lengths": lengths, "mean": _mean(lengths)})
        for mine, first in zip(figures, arms[0]["figures"] if arms else figures, strict=True):
            mine["ratio"] = mine["mean"] / first["mean"] if mine["mean"] and first["mean"] else None
        facts = {name: [trained[head].get(name) for head in heads] for name in FACTS}
        arms.append({"arm": arm, "about": about[arm], **facts, "figures": figures})
    result = {
        "format": 1,
        **{key: summary[key] for key in ("date", "command", "machine", "versions", "greedy_identical")},
        "settings": {key: summary["settings"][key] for key in ("tasks", "limit", "max_tokens", "seed")},
        "arms": arms,
    }
    tasks = [*(task for task, category in parts if category == ALL and task != ALL), ALL]
    text = "\n".join(_table(arms, shape, tasks) for shape in shapes)
    png = _plot(arms, shapes, tasks)
    write_json_atomically(out / RESULT, result)
    write_text_atomically(out / TABLE, text)
    write_bytes_atomically(out / PLOT, png)
    return text


def _rows(arm: Mapping[str, Any], shape: str, tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Figures of an arm for a shape, one a task."""
    found = {row["task"]: row for row in arm["figures"] if row["shape"] == shape and row["category"] == ALL}
    return [found[task] for task in tasks]


def _table(arms: Sequence[Mapping[str, Any]], shape: str, tasks: Sequence[str]) -> str:
    """One row an arm: mean accept length by task; range over seeds and ratio for all tasks."""
    head = ["arm", *map(part_label, tasks), "seeds", "against the first", "parameters, M", "tokens seen"]
    head += ["minutes", "peak GB"]
    lines = []
    for arm in arms:
        rows = _rows(arm, shape, tasks)
        lengths, minutes = _known(rows[-1]["accept_lengths"]), _mean(arm["seconds"], 60)
        seeds = f"{min(lengths):.3f} to {max(lengths):.3f}" if lengths else ""
        name = f"{arm['arm']}: {arm['about']}" if arm["about"] else arm["arm"]
        means = [number(row["mean"], 3, "") for row in rows]
        tokens = _mean(arm["tokens_seen"])
        size, peak = _mean(arm["parameters"], 1e6), _mean(arm["peak_memory_gb"])
        spent = [number(size, 1, ""), "" if tokens is None else f"{tokens:,.0f}"]
        spent += [number(minutes, 1, ""), number(peak, 2, "")]
        lines.append([name, *means, seeds, number(rows[-1]["ratio"], 3, ""), *spent])
    num_seeds = len(arms[0]["seconds"])
    return f"Accept length, shape {shape}, {num_seeds} seeds:\n\n{Table(head, lines).markdown()}\n"


def _plot(arms: Sequence[Mapping[str, Any]], shapes: Sequence[str], tasks: Sequence[str]) -> bytes:
    """A row for every shape, a panel for every task: a bar an arm, its mean; a dot a seed."""
    names, panels = [arm["arm"] for arm in arms], []
    for shape in shapes:
        for i, task in enumerate(tasks):
            rows = [_rows(arm, shape, tasks)[i] for arm in arms]
            means, dots = [row["mean"] for row in rows], [_known(row["accept_lengths"]) for row in rows]
            series = BarSeries("", means, shade(HUES[0], 0.5), dots)
            title = f"{part_label(task)}, {shape}"
            panels.append(Bars("", names, [series], title, line=rows[0]["mean"], start=1.0))
    return draw(
        "Accept length by arm; a dot is a seed, the line is the first arm", panels, columns=len(tasks)
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Iterable[float | None], unit: float = 1.0) -> float | None:
    known = _known(values)
    return statistics.mean(known) / unit if known else None
