"""Ways of training compared: accept lengths of every arm's heads over seeds, beside the first arm's."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_kit.eval.answers import write_json, write_text
from eagle_kit.eval.plots import require_matplotlib
from eagle_kit.eval.report import part_label
from eagle_kit.eval.summary import ALL, find_row

RESULT, TABLE, PLOT = "study.json", "study.md", "study.png"
BLUE, GREY = "#0072B2", "#555555"


def compare(
    summary: Mapping[str, Any],
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
        trained: head -> the metadata it was exported with.
    """
    require_matplotlib()
    shapes = list(summary["settings"]["shapes"])
    parts = _parts(summary)
    arms: list[dict[str, Any]] = []
    for arm, heads in members.items():
        figures = [
            _figures(summary, heads, shape, task, category) for shape in shapes for task, category in parts
        ]
        tokens = [trained[head].get("tokens_seen") for head in heads]
        seconds = [trained[head].get("seconds") for head in heads]
        arms.append(
            {"arm": arm, "about": about[arm], "tokens_seen": tokens, "seconds": seconds, "figures": figures}
        )
    for arm_result in arms:
        for mine, first in zip(arm_result["figures"], arms[0]["figures"], strict=True):
            mine["ratio"] = mine["mean"] / first["mean"] if mine["mean"] and first["mean"] else None
    result = {
        "format": 1,
        **{key: summary[key] for key in ("date", "command", "machine", "versions", "greedy_identical")},
        "settings": {key: summary["settings"][key] for key in ("tasks", "limit", "max_tokens", "seed")},
        "arms": arms,
    }
    text = _table(result, shapes, parts)
    write_json(out / RESULT, result)
    write_text(out / TABLE, text)
    _plot(result, shapes, parts, out / PLOT)
    return text


def _parts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Tasks, then the categories of those that have several, then all together."""
    found = list(dict.fromkeys((row["task"], row["category"]) for row in summary["rows"]))
    tasks = [part for part in found if part[0] != ALL and part[1] == ALL]
    return [*tasks, *(part for part in found if part[1] != ALL), (ALL, ALL)]


def _figures(
    summary: Mapping[str, Any], heads: Sequence[str], shape: str, task: str, category: str
) -> dict[str, Any]:
    values = [find_row(dict(summary), head, shape, task, category)["accept_length"] for head in heads]
    known = [value for value in values if value is not None]
    return {
        "shape": shape,
        "task": task,
        "category": category,
        "accept_lengths": values,
        "mean": statistics.mean(known) if known else None,
    }


def _select(arm: Mapping[str, Any], shape: str, part: tuple[str, str]) -> dict[str, Any]:
    return next(
        row for row in arm["figures"] if (row["shape"], row["task"], row["category"]) == (shape, *part)
    )


def _table(result: Mapping[str, Any], shapes: Sequence[str], parts: Sequence[tuple[str, str]]) -> str:
    """One row an arm: mean accept length by task, the range over seeds and the ratio for all of them."""
    tasks = [part for part in parts if part[1] == ALL]
    lines = []
    for shape in shapes:
        names = [part_label({"task": task, "category": category}) for task, category in tasks]
        lines += [
            f"Accept length, shape {shape}, {len(result['arms'][0]['tokens_seen'])} seeds:",
            "",
            f"| arm | {' | '.join(names)} | seeds | against the first | tokens seen | minutes |",
            f"|---|{'--:|' * (len(names) + 4)}",
        ]
        for arm in result["arms"]:
            rows = [_select(arm, shape, part) for part in tasks]
            spread = [value for value in rows[-1]["accept_lengths"] if value is not None]
            cells = [
                f"{arm['arm']}: {arm['about']}" if arm["about"] else arm["arm"],
                *(_number(row["mean"]) for row in rows),
                f"{min(spread):.3f} to {max(spread):.3f}" if spread else "",
                f"{rows[-1]['ratio']:.3f}" if rows[-1]["ratio"] else "",
                _mean(arm["tokens_seen"], 1, ",.0f"),
                _mean(arm["seconds"], 60, ".1f"),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _mean(values: Sequence[float | None], unit: float, form: str) -> str:
    known = [value for value in values if value is not None]
    return format(statistics.mean(known) / unit, form) if known else ""


def _plot(
    result: Mapping[str, Any], shapes: Sequence[str], parts: Sequence[tuple[str, str]], path: Path
) -> None:
    """A panel for every task and shape: a bar an arm, its mean; a dot a seed; a line at the first arm."""
    from matplotlib.figure import Figure

    tasks = [part for part in parts if part[1] == ALL]
    arms = result["arms"]
    figure = Figure(
        figsize=(1.5 + 4.0 * len(tasks), 1.0 + len(shapes) * (0.9 + 0.34 * len(arms))),
        layout="constrained",
        dpi=150,
    )
    areas = figure.subplots(len(shapes), len(tasks), squeeze=False, sharey=True)
    for line, shape in enumerate(shapes):
        for column, part in enumerate(tasks):
            area = areas[line][column]
            rows = [_select(arm, shape, part) for arm in arms]
            for place, row in enumerate(rows):
                if row["mean"] is None:
                    continue
                area.barh(place, row["mean"], height=0.7, color=BLUE, alpha=0.45 if place else 0.25)
                dots = [value for value in row["accept_lengths"] if value is not None]
                area.plot(dots, [place] * len(dots), "o", color=BLUE, markersize=3.5)
                area.annotate(
                    f"{row['mean']:.2f}",
                    (max(dots), place),
                    xytext=(5, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
            if rows[0]["mean"]:
                area.axvline(rows[0]["mean"], color=GREY, linewidth=0.8, linestyle=":")
            area.set_yticks(range(len(arms)), [arm["arm"] for arm in arms], fontsize=9)
            area.set_xlim(1.0, 1.12 * max([row["mean"] or 1.0 for row in rows]))
            label = part_label({"task": part[0], "category": part[1]})
            area.set_title(f"{label}, {shape}", fontsize=10, loc="left")
            area.spines[["top", "right"]].set_visible(False)
    areas[0][0].invert_yaxis()  # shared: the first arm on top
    figure.suptitle(
        "Accept length by arm; a dot is a seed, the line is the first arm", fontsize=11, x=0.01, ha="left"
    )
    figure.savefig(path)
