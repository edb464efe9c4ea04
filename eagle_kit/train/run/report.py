"""`report.html` of a run, with its curves as PNG; and several runs in one picture and one table."""

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

LAST_JUDGEMENTS = 10


class Comparison(NamedTuple):
    """Several runs beside each other.

    Attributes:
        rows: one dictionary a label: ``label``, ``runs``, ``steps``, ``tokens``, ``seconds``; ``best`` and
            ``last``, decoded accept lengths, means over the runs; ``spread``, the standard deviation of
            ``best`` over the runs, None for one; ``gain``, ``best`` against the first label's, less one;
            ``best_of``, ``best`` of every run.
        table: the rows.
        png: path of the picture.
        page: path of the page with both.
    """

    rows: list[dict[str, Any]]
    table: Table
    png: Path
    page: Path


def write_report(run: str | Path, folder: str | Path | None = None) -> Path:
    """Write ``report.html`` and ``curves/*.png`` of one run into its own folder, or into ``folder``.

    Raises:
        UserError: there is no run, no matplotlib, or the folder cannot be written to.
    """
    require_matplotlib()
    curves = RunCurves.read(run)
    target = curves.path if folder is None else Path(folder)
    pictures = [Picture(f"curves/{name}.png", png) for name, png in draw_run(curves).items()]
    return write_page(
        target, curves.name, [_facts(curves), *_by_group(curves), _judgements(curves), *pictures]
    )


def compare_runs(
    groups: Mapping[str, Sequence[str | Path]], folder: str | Path, shape: str | None = None
) -> Comparison:
    """Draw runs into one picture and put their figures into one table.

    Args:
        groups: run folders by label; several folders of one label are repetitions with other seeds. The first
            label is what the others are measured against.
        folder: of ``report.html`` and ``compare.png``; made when missing.
        shape: whose accept length is compared; None is the one that chose ``best/`` in the first run.

    Raises:
        UserError: a folder is no run, was not judged in that shape, or cannot be written to; no matplotlib.
    """
    require_matplotlib()
    read = {label: [RunCurves.read(path) for path in paths] for label, paths in groups.items()}
    first = next(iter(read.values()))[0]
    if shape is None:
        if not first.shapes:
            raise UserError(f"The run {first.path} was not judged.", "Train it with judge.every above 0.")
        shape = first.shapes[0]
    for run in (run for runs in read.values() for run in runs):
        if shape not in run.shapes:
            raise UserError(
                f"The run {run.path} was not judged in the shape {shape}.",
                f"Choose one that all have; it has {', '.join(run.shapes) or 'none'}.",
            )
    rows = [_compared(label, runs, shape) for label, runs in read.items()]
    for row in rows:
        row["gain"] = row["best"] / rows[0]["best"] - 1
    table, picture = _table(rows, shape), Picture("compare.png", draw_comparison(read, shape))
    page = write_page(Path(folder), "Runs compared", [table, picture])
    return Comparison(rows, table, page.with_name(picture.path), page)


def _compared(label: str, runs: Sequence[RunCurves], shape: str) -> dict[str, Any]:
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
    head = ["run", f"best accept length, {shape}", "against the first", "last", "steps", "M tokens", "time"]
    lines = []
    for row in rows:
        spread = "" if row["spread"] is None else f" ± {row['spread']:.3f} of {row['runs']}"
        best, gain, last = f"{row['best']:.3f}{spread}", f"{row['gain']:+.1%}", f"{row['last']:.3f}"
        steps, tokens = f"{row['steps']:.0f}", f"{row['tokens'] / 1e6:.2f}"
        lines.append([row["label"], best, gain, last, steps, tokens, format_seconds(row["seconds"])])
    return Table(head, lines)


def _facts(run: RunCurves) -> Table:
    last = run.metrics[-1]
    losses = [row["loss"] for row in run.metrics if row["loss"] is not None]
    facts = {
        "steps": str(last["step"]),
        "tokens": f"{run.tokens:,}",
        "rows with loss at step 0": f"{sum(row['supervised_tokens'] for row in run.metrics):,}",
        "time in steps": format_seconds(sum(run.seconds.values())),
        "time in judgements": format_seconds(sum(row["seconds"] for row in run.judged)),
        "loss": f"{losses[-1]:.4f}" if losses else "never finite",
    }
    for shape in run.shapes:
        row, length = run.best(shape)
        facts[f"best accept length, {shape}"] = f"{length:.3f} at step {row['step']}"
    if run.judged and run.judged[-1]["vocab_coverage"] is not None:
        facts["target's own tokens the draft can say"] = f"{run.judged[-1]['vocab_coverage']:.2%}"
    return Table(["", ""], [list(fact) for fact in facts.items()])


def _by_group(run: RunCurves) -> list[Table]:
    """Accept length by source and category, where there are several: in training, and decoded."""
    trained: dict[str, list[float]] = {}
    for row in run.metrics:
        for name, length in row.get("simulated_accept_length_of", {}).items():
            trained.setdefault(name, []).append(length)
    decoded: dict[str, list[str]] = {}
    rows = [row for row in run.judged if "accept_length_of" in row]
    if rows:
        best = next((row for row in reversed(rows) if row["best"]), rows[-1])
        for name in best["accept_length_of"]:
            decoded[name] = [f"{row['accept_length_of'][name]:.3f}" for row in (best, rows[-1])]
    if not trained and not decoded:
        return []
    lines = []
    for name in dict.fromkeys((*trained, *decoded)):
        seen = trained.get(name, [])
        first, last = (f"{statistics.fmean(part):.3f}" if part else "" for part in _tenths(seen))
        lines.append([name, str(len(seen)), first, last, *decoded.get(name, ["", ""])])
    head = ["documents", "steps with them", "in training, first tenth", "last tenth"]
    return [Table([*head, "decoded, best judgement", "last judgement"], lines)]


def _tenths(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    size = -(-len(values) // 10)
    return values[:size], values[len(values) - size :]


def _judgements(run: RunCurves) -> Table | str:
    """The last judgements, and the best one before them."""
    if not run.judged:
        return "Nothing was judged."
    shapes, lines = run.shapes, []
    earlier = [row for row in run.judged[:-LAST_JUDGEMENTS] if row.get("best")][-1:]
    for row in earlier + run.judged[-LAST_JUDGEMENTS:]:
        lengths = [f"{row['accept_length'][s]:.3f}" if s in row["accept_length"] else "" for s in shapes]
        reached = row["acceptance_per_position"].get(shapes[0], [])
        shares = " ".join(f"{100 * share:.0f}" for share in reached)
        lines.append([f"{row['step']}{' *' if row.get('best') else ''}", *lengths, shares])
    reached_title = f"% of verifies with at least 1, 2, ... accepted, {shapes[0]}"
    return Table(["step (* the best so far)", *shapes, reached_title], lines)
