"""`report.html` of a run with its curves, and comparison of several runs in one picture and one table."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle_kit.core.errors import UserError
from eagle_kit.report.pages import Picture, write_page
from eagle_kit.report.plots import require_matplotlib
from eagle_kit.report.tables import Table
from eagle_kit.train.run.curves import RunCurves, draw_comparison, draw_run
from eagle_kit.train.run.progress import format_seconds

LAST_VALIDATIONS = 10
"""Validations in the table of the report."""


class RunComparison(NamedTuple):
    """Comparison of several runs.

    Attributes:
        rows: a dictionary for each label, with means over its runs: ``label``, ``runs``, ``steps``,
            ``tokens``, ``seconds``; ``best`` and ``last``, the decoded accept lengths; ``spread``, the
            standard deviation of ``best`` over the runs, None for one run; ``gain``, ``best`` divided by that
            of the first label, minus 1; ``best_of``, the list of ``best`` of every run.
        table: the rows as text.
        png: path of the picture.
        page: path of the page with both.
    """

    rows: list[dict[str, Any]]
    table: Table
    png: Path
    page: Path


def write_report(run: str | Path, folder: str | Path | None = None) -> Path:
    """Write ``report.html`` and ``curves/*.png`` of one run.

    Args:
        run: run folder.
        folder: folder of the report; None is the run folder.

    Returns:
        Path of the page.

    Raises:
        UserError: there is no run, no matplotlib, or the folder cannot be written.
    """
    require_matplotlib()
    curves = RunCurves.read(run)
    pictures = [Picture(f"curves/{name}.png", png) for name, png in draw_run(curves).items()]
    parts: list[Table | Picture | str] = [_facts(curves), *_by_group(curves), _validations(curves), *pictures]
    target = curves.path if folder is None else Path(folder)
    return write_page(target, curves.name, parts)


def compare_runs(
    groups: Mapping[str, Sequence[str | Path]], folder: str | Path, shape: str | None = None
) -> RunComparison:
    """Draw runs into one picture and list their figures in one table.

    Args:
        groups: run folders by label. Several folders of one label are repetitions with other seeds. The
            others are compared with the first label.
        folder: folder of ``report.html`` and ``compare.png``; created if it does not exist.
        shape: shape whose accept length is compared; None is the one that chose ``best/`` in the first run.

    Raises:
        UserError: a folder has no run, a run was not validated in the shape, ``folder`` cannot be written, or
            there is no matplotlib.
    """
    require_matplotlib()
    runs_of = {label: [RunCurves.read(path) for path in paths] for label, paths in groups.items()}

    # The shape. All runs must have it.
    if shape is None:
        first = next(iter(runs_of.values()))[0]
        if not first.shapes:
            raise UserError(
                f"The run {first.path} was not validated.", "Train it with validation.every above 0."
            )
        shape = first.shapes[0]
    for runs in runs_of.values():
        for run in runs:
            if shape not in run.shapes:
                raise UserError(
                    f"The run {run.path} was not validated in the shape {shape}.",
                    f"Choose one that all have; it has {', '.join(run.shapes) or 'none'}.",
                )

    # Table and picture.
    rows = [_compared(label, runs, shape) for label, runs in runs_of.items()]
    for row in rows:
        row["gain"] = row["best"] / rows[0]["best"] - 1
    table = _table(rows, shape)
    picture = Picture("compare.png", draw_comparison(runs_of, shape))
    page = write_page(Path(folder), "Runs compared", [table, picture])
    return RunComparison(rows, table, page.with_name(picture.path), page)


def _compared(label: str, runs: Sequence[RunCurves], shape: str) -> dict[str, Any]:
    """Row of a label in :attr:`RunComparison.rows`, without ``gain``."""
    best = [run.best(shape)[1] for run in runs]
    return {
        "label": label,
        "runs": len(runs),
        "steps": statistics.fmean(run.metrics[-1]["step"] for run in runs),
        "tokens": statistics.fmean(run.tokens for run in runs),
        "seconds": statistics.fmean(sum(run.seconds.values()) for run in runs),
        "best": statistics.fmean(best),
        "best_of": best,
        "spread": statistics.stdev(best) if len(best) > 1 else None,
        "last": statistics.fmean(run.accept_lengths(shape)[1][-1] for run in runs),
    }


def _table(rows: Sequence[dict[str, Any]], shape: str) -> Table:
    """Table of :attr:`RunComparison.rows`."""
    head = ["run", f"best accept length, {shape}", "against the first", "last", "steps", "M tokens", "time"]
    lines = []
    for row in rows:
        best = f"{row['best']:.3f}"
        if row["spread"] is not None:
            best += f" ± {row['spread']:.3f} of {row['runs']}"
        line = [
            row["label"],
            best,
            f"{row['gain']:+.1%}",
            f"{row['last']:.3f}",
            f"{row['steps']:.0f}",
            f"{row['tokens'] / 1e6:.2f}",
            format_seconds(row["seconds"]),
        ]
        lines.append(line)
    return Table(head, lines)


def _facts(run: RunCurves) -> Table:
    """Table of the figures of a run."""
    last = run.metrics[-1]
    losses = [row["loss"] for row in run.metrics if row["loss"] is not None]
    facts = {
        "steps": str(last["step"]),
        "tokens": f"{run.tokens:,}",
        "supervised rows at step 0": f"{sum(row['supervised_tokens'] for row in run.metrics):,}",
        "time in steps": format_seconds(sum(run.seconds.values())),
        "time in validations": format_seconds(sum(row["seconds"] for row in run.validations)),
        "loss": f"{losses[-1]:.4f}" if losses else "never finite",
    }
    for shape in run.shapes:
        row, length = run.best(shape)
        facts[f"best accept length, {shape}"] = f"{length:.3f} at step {row['step']}"
    if run.validations and run.validations[-1]["vocab_coverage"] is not None:
        facts["target's own tokens the draft can say"] = f"{run.validations[-1]['vocab_coverage']:.2%}"
    return Table(["", ""], [list(fact) for fact in facts.items()])


def _by_group(run: RunCurves) -> list[Table]:
    """Table of accept lengths by group of documents, in training and decoded; empty if there is one group."""
    # In training: simulated accept lengths.
    simulated: dict[str, list[float]] = {}
    for row in run.metrics:
        for name, length in row.get("simulated_accept_length_of", {}).items():
            simulated.setdefault(name, []).append(length)

    # Decoded: of the best validation, and of the last one.
    decoded: dict[str, list[str]] = {}
    rows = [row for row in run.validations if "accept_length_of" in row]
    if rows:
        last = rows[-1]
        best = next((row for row in reversed(rows) if row["best"]), last)
        for name in best["accept_length_of"]:
            decoded[name] = [f"{row['accept_length_of'][name]:.3f}" for row in (best, last)]

    # A line for each group.
    groups = dict.fromkeys((*simulated, *decoded))
    if not groups:
        return []
    lines = []
    for name in groups:
        lengths = simulated.get(name, [])
        size = math.ceil(len(lengths) / 10)
        first_tenth = lengths[:size]
        last_tenth = lengths[len(lengths) - size :]
        line = [name, str(len(lengths)), _mean(first_tenth), _mean(last_tenth)]
        lines.append(line + decoded.get(name, ["", ""]))
    head = (
        "documents",
        "steps with them",
        "in training, first tenth",
        "last tenth",
        "decoded, best validation",
        "last validation",
    )
    return [Table(head, lines)]


def _mean(lengths: Sequence[float]) -> str:
    """Mean of accept lengths as text, empty without any."""
    return f"{statistics.fmean(lengths):.3f}" if lengths else ""


def _validations(run: RunCurves) -> Table | str:
    """Table of the last validations, and of the best one before them."""
    if not run.validations:
        return "Nothing was validated."
    shapes = run.shapes
    best_before = [row for row in run.validations[:-LAST_VALIDATIONS] if row.get("best")][-1:]
    lines = []
    for row in best_before + run.validations[-LAST_VALIDATIONS:]:
        # Step, accept length of every shape, and acceptance of the first shape by position.
        step = f"{row['step']} *" if row.get("best") else str(row["step"])
        lengths = []
        for shape in shapes:
            length = row["accept_length"].get(shape)
            lengths.append("" if length is None else f"{length:.3f}")
        shares = row["acceptance_per_position"].get(shapes[0], [])
        percentages = " ".join(f"{100 * share:.0f}" for share in shares)
        lines.append([step, *lengths, percentages])
    shares_title = f"% of verifies with at least 1, 2, ... accepted, {shapes[0]}"
    return Table(["step (* the best so far)", *shapes, shares_title], lines)
