"""The summary for people: tables of text, the identity check, and one figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_kit.config.eval import AUTO
from eagle_kit.core.files import write_bytes_atomically
from eagle_kit.core.shape import SpecShape
from eagle_kit.eval.identity import describe
from eagle_kit.eval.summary import ALL, find_row
from eagle_kit.report.environment import machine_title
from eagle_kit.report.plots import Bars, BarSeries, Colour, Curve, Curves, draw, hue, shade
from eagle_kit.report.tables import Table, number

MAX_DIFFERENCES = 5
REACHED = "kept at depth 1, 2, ..."
COLUMNS = ("task", "draft", "shape", "answers", "accept length", REACHED, "tok/s", "speed-up", "same")
LEFT = ("task", "draft", "shape", REACHED)
PLOT = "summary.png"


def report(summary: dict[str, Any]) -> str:
    """Text to print after a run: its setup, the tables, the identity check, the files."""
    settings = summary["settings"]
    length, batch = settings["max_tokens"], settings["batch_size"]
    head = f"{setup(summary)}; greedy, up to {length} tokens a reply, batch {batch}"
    lines = [head, "", table(summary), ""]
    if any(row["category"] != ALL and row["draft"] is not None for row in summary["rows"]):
        lines += ["accept length by category", category_table(summary), ""]
    lines += identity_lines(summary)
    lines += [f"{name.replace('_', ' ')}: {path}" for name, path in summary.get("paths", {}).items()]
    return "\n".join(lines)


def setup(summary: dict[str, Any]) -> str:
    """Target, precision and machine."""
    target = summary["target"]
    name = str(target["name"]).rstrip("/").rsplit("/", 1)[-1]
    return f"{name} ({target['dtype']}) on {machine_title(summary['machine'])}"


def table(summary: dict[str, Any]) -> str:
    """An aligned table: every setting of every task, and of all tasks together when there are several."""
    lines: list[list[str]] = []
    for task in shown_tasks(summary):
        of_task = [row for row in summary["rows"] if row["task"] == task and row["category"] == ALL]
        lines += [[]] * bool(lines) + [_cells(row) for row in of_task]
    return Table(COLUMNS, lines, LEFT).text()


def category_table(summary: dict[str, Any]) -> str:
    """An aligned table of accept lengths: a line for every setting of a task, a column for every category."""
    rows = [row for row in summary["rows"] if row["category"] != ALL and row["draft"] is not None]
    lengths: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        of_setting = lengths.setdefault((row["task"], row["draft"], row["shape"]), {})
        of_setting[row["category"]] = number(row["accept_length"])
    categories = list(dict.fromkeys(row["category"] for row in rows))
    lines = [[*key, *(found.get(name, "") for name in categories)] for key, found in lengths.items()]
    return Table([*LEFT[:3], *categories], lines, LEFT).text()


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


def plot(summary: dict[str, Any], folder: Path) -> Path | None:
    """Draw accept length and speed-up by task, and acceptance by depth, into one PNG in ``folder``.

    A draft has a hue, and its shapes are shades of it.

    Returns:
        The path; None when only plain decoding was measured.

    Raises:
        UserError: matplotlib is missing.
    """
    colours = _colours([(row["draft"], row["shape"]) for row in summary["rows"] if row["draft"] is not None])
    if not colours:
        return None
    tasks = shown_tasks(summary)

    def bars(field: str, title: str, across: str) -> Bars:
        series = []
        for (draft, shape), colour in colours.items():
            values = [find_row(summary, draft, shape, task)[field] for task in tasks]
            series.append(BarSeries(f"{draft}  {_label(shape)}", values, colour))
        return Bars(across, [part_label(task) for task in tasks], series, title, line=1.0)

    curves = []
    for (draft, shape), colour in colours.items():
        shares = find_row(summary, draft, shape)["acceptance_per_position"]
        depths = range(1, (len(shares) if shape == AUTO else SpecShape.parse(shape).steps) + 1)
        percent = [100 * share for share in shares] + [0.0] * (len(depths) - len(shares))
        curves.append(Curve(depths, percent, "", colour, "o-"))
    reached = "% of verifies that kept it (all tasks)"
    panels: list[Curves | Bars] = [
        bars("accept_length", "Accept length", "tokens per verify, bonus token included (line at 1)"),
        Curves("depth of the draft token", reached, curves, "Acceptance", (0, 100), whole=True),
        bars("speedup", "Speed-up", "median over replies of tokens/s over plain (line at 1)"),
    ]
    batch = f"greedy, batch {summary['settings']['batch_size']}, {summary['num_prompts']} prompts"
    path = folder / PLOT
    folder.mkdir(parents=True, exist_ok=True)
    png = draw(f"Speculative decoding\n{setup(summary)}, {batch}", panels, legend=True)
    write_bytes_atomically(path, png)
    return path


def _label(shape: str) -> str:
    return shape if shape == AUTO else SpecShape.parse(shape).label


def shown_tasks(summary: dict[str, Any]) -> list[str]:
    """Tasks in their order; the sum over them last, and only when there are several."""
    tasks = list(dict.fromkeys(row["task"] for row in summary["rows"] if row["task"] != ALL))
    return [*tasks, ALL] if len(tasks) > 1 else tasks


def part_label(task: str) -> str:
    """Name of a task, or ``all tasks``."""
    return "all tasks" if task == ALL else task


def _colours(settings: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Colour]:
    """Colour of every (draft, shape)."""
    drafts, shapes = (
        (list(dict.fromkeys(names)) for names in zip(*settings, strict=True)) if settings else ([], [])
    )
    lighter = 0.55 / max(len(shapes) - 1, 1)
    return {
        (d, s): shade(hue(drafts.index(d)), lighter * shapes.index(s)) for d, s in dict.fromkeys(settings)
    }


def _cells(row: dict[str, Any]) -> list[str]:
    speed = number(row["decode_tokens_per_s"], 1)
    reached = " ".join(f"{share:.0%}" for share in row["acceptance_per_position"])
    task, count = part_label(row["task"]), str(row["num_answers"])
    if row["draft"] is None:
        return [task, "plain", "", count, "", reached, speed, "", ""]
    same = f"{row['num_different']} differ" if row["num_different"] else "yes"
    length, speedup = number(row["accept_length"]), number(row["speedup"])
    return [task, row["draft"], row["shape"], count, length, reached, speed, speedup, same]
