"""The result for people: a plain text table, the identity check, and the same table in Markdown."""

from collections.abc import Sequence
from typing import Any

from eagle_kit.eval.identity import describe
from eagle_kit.eval.summary import ALL
from eagle_kit.report.environment import machine_title

MAX_DIFFERENCES = 5
_COLUMNS = (
    "task",
    "draft",
    "shape",
    "answers",
    "accept length",
    "kept at depth 1, 2, ...",
    "tok/s",
    "speed-up",
    "same",
)
_LEFT = {"task", "draft", "shape", "kept at depth 1, 2, ..."}


def report(summary: dict[str, Any]) -> str:
    """Everything to print after a run: what was measured, the tables, the identity check, the files."""
    lines = [title(summary), "", table(summary), ""]
    if any(row["category"] != ALL and row["draft"] is not None for row in summary["rows"]):
        lines += ["accept length by category", category_table(summary), ""]
    lines += identity_lines(summary)
    for name, path in summary.get("paths", {}).items():
        lines.append(f"{name.replace('_', ' ')}: {path}")
    return "\n".join(lines)


def title(summary: dict[str, Any]) -> str:
    """Target, precision, machine and the settings that decide the figures, in one line."""
    settings = summary["settings"]
    length, batch = settings["max_tokens"], settings["batch_size"]
    return f"{setup(summary)}; greedy, up to {length} tokens a reply, batch {batch}"


def setup(summary: dict[str, Any]) -> str:
    """Target, precision and machine."""
    target = summary["target"]
    name = str(target["name"]).rstrip("/").rsplit("/", 1)[-1]
    return f"{name} ({target['dtype']}) on {machine_title(summary['machine'])}"


def table(summary: dict[str, Any]) -> str:
    """An aligned table: every setting of every task, and of all tasks together when there are several."""
    groups = _groups(summary)
    widths = _widths([_COLUMNS, *(row for group in groups for row in group)])
    out = [_line(_COLUMNS, widths, _COLUMNS), "  ".join("-" * width for width in widths)]
    for number, group in enumerate(groups):
        out += [""] * (number > 0) + [_line(row, widths, _COLUMNS) for row in group]
    return "\n".join(out)


def category_table(summary: dict[str, Any]) -> str:
    """An aligned table of accept lengths: a line for every setting of a task, a column for every category."""
    rows = [row for row in summary["rows"] if row["category"] != ALL and row["draft"] is not None]
    header = ("task", "draft", "shape", *dict.fromkeys(row["category"] for row in rows))
    cells = []
    for key in dict.fromkeys((row["task"], row["draft"], row["shape"]) for row in rows):
        of_key = {r["category"]: r for r in rows if (r["task"], r["draft"], r["shape"]) == key}
        cells.append(
            [*key, *(_number(of_key[c]["accept_length"]) if c in of_key else "" for c in header[3:])]
        )
    widths = _widths([header, *cells])
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([_line(header, widths, header), rule, *(_line(row, widths, header) for row in cells)])


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _line(row: Sequence[str], widths: Sequence[int], columns: Sequence[str]) -> str:
    """Text columns to the left, numbers to the right."""
    parts = (
        text.ljust(width) if column in _LEFT else text.rjust(width)
        for text, width, column in zip(row, widths, columns, strict=True)
    )
    return "  ".join(parts).rstrip()


def identity_lines(summary: dict[str, Any]) -> list[str]:
    """``greedy identical: yes`` or ``no``, with the first differences named."""
    count, different = summary["num_compared"], summary["differences"]
    if summary["greedy_identical"] is None:
        return ["greedy identical: nothing to compare, only plain decoding was measured"]
    if summary["greedy_identical"]:
        return [f"greedy identical: yes ({count} answers equal plain decoding token for token)"]
    lines = [f"greedy identical: no ({len(different)} of {count} answers differ from plain decoding)"]
    lines += [f"  {describe(record)}" for record in different[:MAX_DIFFERENCES]]
    if len(different) > MAX_DIFFERENCES:
        lines.append(f"  ... and {len(different) - MAX_DIFFERENCES} more in summary.json")
    return lines


def _groups(summary: dict[str, Any]) -> list[list[list[str]]]:
    """Cells of every task's rows; the sum over tasks last, and only when there are several."""
    tasks = list(dict.fromkeys(row["task"] for row in summary["rows"] if row["task"] != ALL))
    of_task = {
        task: [r for r in summary["rows"] if r["task"] == task and r["category"] == ALL]
        for task in (*tasks, ALL)
    }
    shown = [*tasks, ALL] if len(tasks) > 1 else tasks
    return [[_cells(row) for row in of_task[task]] for task in shown]


def part_label(row: dict[str, Any]) -> str:
    """``ours``, ``ours: math``, ``all tasks``."""
    if row["task"] == ALL:
        return "all tasks"
    return str(row["task"]) if row["category"] == ALL else f"{row['task']}: {row['category']}"


def _cells(row: dict[str, Any]) -> list[str]:
    plain = row["draft"] is None
    same = "" if plain else "yes" if not row["num_different"] else f"{row['num_different']} differ"
    return [
        part_label(row),
        "plain" if plain else row["draft"],
        "" if plain else row["shape"],
        str(row["num_answers"]),
        "" if plain else _number(row["accept_length"]),
        " ".join(f"{share:.0%}" for share in row["acceptance_per_position"]),
        _number(row["decode_tokens_per_s"], 1),
        "" if plain else _number(row["speedup"]),
        same,
    ]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
