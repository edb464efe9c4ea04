"""The summary for people: tables of text, the identity check, and one figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_kit.config.eval import AUTO
from eagle_kit.core.files import write_bytes_atomically
from eagle_kit.core.shape import ShapeTable, SpecShape
from eagle_kit.eval.distribution import LEVEL
from eagle_kit.eval.identity import describe
from eagle_kit.eval.servers.server_rows import server_lines
from eagle_kit.eval.summary import ALL, find_row, is_tested
from eagle_kit.report.environment import machine_title
from eagle_kit.report.plots import Bars, BarSeries, Colour, Curve, Curves, draw, hue, shade
from eagle_kit.report.tables import Table, number

MAX_DIFFERENCES = 5
"""Differences from plain decoding that are printed."""
REACHED = "kept at depth 1, 2, ..."
COLUMNS = ("task", "draft", "shape", "answers", "accept length", REACHED, "tok/s", "speed-up", "same")
LEFT = ("task", "draft", "shape", REACHED)
PLOT = "summary.png"
Colours = dict[tuple[str, str], Colour]
"""By draft and shape."""


def report(summary: dict[str, Any]) -> str:
    """Text to print after a run: its setup, the tables, the identity check, the files."""
    settings = summary["settings"]
    head = (
        f"{setup(summary)}; {sampling(summary)}, up to {settings['max_tokens']} tokens a response, "
        f"batch {settings['batch_size']}"
    )
    lines = [head, "", table(summary), ""]
    if any(row["category"] != ALL and row["draft"] is not None for row in summary["rows"]):
        lines += ["accept length by category", category_table(summary), ""]
    lines += identity_lines(summary)
    lines += distribution_lines(summary)
    lines += loss_lines(summary)
    lines += server_lines(summary.get("servers", []))
    lines += [f"{name.replace('_', ' ')}: {path}" for name, path in summary.get("paths", {}).items()]
    return "\n".join(lines)


def sampling(summary: dict[str, Any]) -> str:
    """Temperatures, top-p and seeds; ``greedy`` alone where nothing was sampled."""
    settings = summary["settings"]
    temperatures = temperatures_of(summary)
    if not any(temperatures):
        return "greedy"
    words = [f"T {' '.join(f'{temperature:g}' for temperature in temperatures)}"]
    if settings["top_p"] < 1:
        words.append(f"top-p {settings['top_p']:g}")
    words.append(f"seeds {' '.join(map(str, settings['seeds']))}")
    return ", ".join(words)


def temperatures_of(summary: dict[str, Any]) -> list[float]:
    """Temperatures that were measured, in their order."""
    return list(dict.fromkeys(row["temperature"] for row in summary["rows"]))


def setup(summary: dict[str, Any]) -> str:
    """Target, precision and machine."""
    target = summary["target"]
    name = str(target["name"]).rstrip("/").rsplit("/", 1)[-1]
    return f"{name} ({target['dtype']}) on {machine_title(summary['machine'])}"


def table(summary: dict[str, Any]) -> str:
    """An aligned table: every setting of every task, and of all tasks together when there are several; at
    every temperature."""
    temperatures = temperatures_of(summary)
    has_samples = any(temperatures)
    lines: list[list[str]] = []
    for temperature in temperatures:
        for task in shown_tasks(summary):
            if lines:
                lines.append([])  # a gap between tasks
            for row in summary["rows"]:
                if (row["temperature"], row["task"], row["category"]) == (temperature, task, ALL):
                    lines.append([*([f"{temperature:g}"] if has_samples else []), *_cells(row)])
    return Table(["T", *COLUMNS] if has_samples else COLUMNS, lines, LEFT).text()


def category_table(summary: dict[str, Any]) -> str:
    """An aligned table of accept lengths: a line for every setting of a task, a column for every category."""
    first = temperatures_of(summary)[0]
    rows = []
    for row in summary["rows"]:
        if row["category"] != ALL and row["draft"] is not None and row["temperature"] == first:
            rows.append(row)
    categories = list(dict.fromkeys(row["category"] for row in rows))

    # Accept lengths by category of every task, draft and shape.
    by_setting: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        key = (row["task"], row["draft"], row["shape"])
        lengths = by_setting.setdefault(key, {})
        lengths[row["category"]] = number(row["accept_length"])
    lines = []
    for key, lengths in by_setting.items():
        lines.append([*key, *(lengths.get(category, "") for category in categories)])
    return Table([*LEFT[:3], *categories], lines, LEFT).text()


def identity_lines(summary: dict[str, Any]) -> list[str]:
    """``greedy identical: yes`` or ``no``, with the first differences named; then the same of samples."""
    lines = []
    for kind, is_greedy in (("greedy", True), ("seeded", False)):
        identical = summary[f"{kind}_identical"]
        if identical is None:
            continue
        count = 0
        for row in summary["rows"]:
            if row["task"] == ALL and row.get("promise") == "text" and (row["temperature"] == 0) == is_greedy:
                count += row["num_answers"]
        if identical:
            lines.append(f"{kind} identical: yes ({count} answers equal plain decoding token for token)")
            continue
        different = [each for each in summary["differences"] if (each["temperature"] == 0) == is_greedy]
        lines.append(f"{kind} identical: no ({len(different)} of {count} answers differ from plain decoding)")
        lines += [f"  {describe(record)}" for record in different[:MAX_DIFFERENCES]]
        if len(different) > MAX_DIFFERENCES:
            lines.append(f"  ... and {len(different) - MAX_DIFFERENCES} more in summary.json")
    if all(row["draft"] is None for row in summary["rows"]):
        lines.append("greedy identical: nothing to compare, only plain decoding was measured")
    return lines


def distribution_lines(summary: dict[str, Any]) -> list[str]:
    """``distribution kept: yes`` or ``no`` for settings that promise no text, with the p-value of each."""
    if summary["distribution_kept"] is None:
        return []
    tested = [row for row in summary["rows"] if is_tested(row)]
    word = "yes" if summary["distribution_kept"] else "no"
    of_tests = "1 test" if len(tested) == 1 else f"{len(tested)} tests together"
    lines = [f"distribution kept: {word} (Kolmogorov-Smirnov, level {LEVEL:g} of {of_tests})"]
    for row in tested:
        test = row["distribution"]
        lines.append(f"  {_setting(row)}: p {test['p_value']:.2g}, {test['num_tokens']} tokens")
    return lines


def loss_lines(summary: dict[str, Any]) -> list[str]:
    """What settings that promise nothing lose."""
    lines = []
    for row in summary["rows"]:
        if (row["task"], row["category"], row.get("promise")) != (ALL, ALL, "nothing"):
            continue
        losses = []
        if row["temperature"] == 0:
            same = row["num_answers"] - row["num_different"]
            losses.append(
                f"{same} of {row['num_answers']} answers are the plain ones, {row['agreement']:.1%} of the "
                "tokens come before a difference"
            )
        if row["total_variation"] is not None:
            losses.append(f"total variation {row['total_variation']:.2g} from the plain target")
        test = row["distribution"]
        if test is not None:
            losses.append(
                f"samples are {test['distance']:.3f} from the target's distribution "
                f"(p {test['p_value']:.2g}, {test['num_tokens']} tokens)"
            )
        lines.append(f"lossy: {_setting(row)}: {'; '.join(losses)}")
    return lines


def _setting(row: dict[str, Any]) -> str:
    """A row's setting, shape and temperature."""
    return f"{row['draft']} {row['shape']} at T {row['temperature']:g}"


def plot(summary: dict[str, Any], folder: Path) -> Path | None:
    """Draw accept length and speed-up by task, and acceptance by depth, into one PNG in ``folder``.

    Returns:
        The path; None when only plain decoding was measured.

    Raises:
        UserError: matplotlib is missing.
    """
    settings = []
    for row in summary["rows"]:
        if row["draft"] is not None and "engine" not in row:  # servers are in the table alone
            settings.append((row["draft"], row["shape"]))
    if not settings:
        return None
    colours = _colours(settings)
    reached = "% of verifies that kept it (all tasks)"
    panels: list[Curves | Bars] = [
        _bars(
            summary,
            colours,
            "accept_length",
            title="Accept length",
            across="tokens per verify, bonus token included (line at 1)",
        ),
        Curves(
            across="depth of the draft token",
            up=reached,
            curves=_acceptance_curves(summary, colours),
            title="Acceptance",
            limits=(0, 100),
            whole=True,
        ),
        _bars(
            summary,
            colours,
            "speedup",
            title="Speed-up",
            across="median over responses of tokens/s over plain (line at 1)",
        ),
    ]
    first = temperatures_of(summary)[0]
    kind = "greedy" if first == 0 else f"T {first:g}"
    batch = f"{kind}, batch {summary['settings']['batch_size']}, {summary['num_prompts']} prompts"
    path = folder / PLOT
    folder.mkdir(parents=True, exist_ok=True)
    png = draw(f"Speculative decoding\n{setup(summary)}, {batch}", panels, legend=True)
    write_bytes_atomically(path, png)
    return path


def _bars(summary: dict[str, Any], colours: Colours, field: str, title: str, across: str) -> Bars:
    """Bars of a figure by task, draft and shape."""
    tasks = shown_tasks(summary)
    series = []
    for (draft, shape), colour in colours.items():
        values = [find_row(summary, draft, shape, task)[field] for task in tasks]
        series.append(BarSeries(f"{draft}  {_label(shape)}", values, colour))
    return Bars(across, [part_label(task) for task in tasks], series, title, line=1.0)


def _acceptance_curves(summary: dict[str, Any], colours: Colours) -> list[Curve]:
    """Curves of the acceptance in percent by depth, over all tasks."""
    curves = []
    for (draft, shape), colour in colours.items():
        shares = find_row(summary, draft, shape)["acceptance_per_position"]
        num_depths = len(shares) if shape == AUTO else ShapeTable.parse(shape).steps
        percent = [100 * share for share in shares]
        percent += [0.0] * (num_depths - len(shares))  # depths that no verify reached
        curves.append(Curve(range(1, num_depths + 1), percent, "", colour, "o-"))
    return curves


def _label(shape: str) -> str:
    is_one = shape != AUTO and " " not in shape
    return SpecShape.parse(shape).label if is_one else shape


def shown_tasks(summary: dict[str, Any]) -> list[str]:
    """Tasks in their order; the sum over them last, and only when there are several."""
    tasks = list(dict.fromkeys(row["task"] for row in summary["rows"] if row["task"] != ALL))
    return [*tasks, ALL] if len(tasks) > 1 else tasks


def part_label(task: str) -> str:
    """Name of a task, or ``all tasks``."""
    return "all tasks" if task == ALL else task


def _colours(settings: Sequence[tuple[str, str]]) -> Colours:
    """Colour of every draft and shape: a draft has a hue, and its shapes are shades of it."""
    drafts = list(dict.fromkeys(draft for draft, _ in settings))
    shapes = list(dict.fromkeys(shape for _, shape in settings))
    step = 0.55 / max(len(shapes) - 1, 1)
    colours = {}
    for draft, shape in settings:
        colours[draft, shape] = shade(hue(drafts.index(draft)), step * shapes.index(shape))
    return colours


def _cells(row: dict[str, Any]) -> list[str]:
    """Cells of a row, in the order of :data:`COLUMNS`."""
    is_plain = row["draft"] is None
    same = f"{row['num_different']} differ" if row["num_different"] else "yes"
    if row.get("num_compared") == 0 or row.get("promise") == "distribution":
        same = ""
    return [
        part_label(row["task"]),
        "plain" if is_plain else row["draft"],
        "" if is_plain else row["shape"],
        str(row["num_answers"]),
        "" if is_plain else _with_error(row, "accept_length"),
        " ".join(f"{share:.0%}" for share in row["acceptance_per_position"]),
        number(row["decode_tokens_per_s"], 1),
        "" if is_plain else _with_error(row, "speedup"),
        "" if is_plain else same,
    ]


def _with_error(row: dict[str, Any], field: str) -> str:
    """A figure, with half of its interval over seeds where there is one."""
    error = row.get(f"{field}_error")
    return number(row[field]) if error is None else f"{number(row[field])} ± {number(error)}"
