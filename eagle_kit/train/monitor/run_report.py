"""`report.html` of a run, with its curves as PNG; and several runs in one picture and one table.

The page holds its pictures itself and reads nothing from a network. It is written whole or not at all, so it
can be looked at while the run goes on.
"""

import base64
import html
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import write_text_atomically
from eagle_kit.train.monitor.curves import RunCurves, step_seconds
from eagle_kit.train.monitor.plots import draw_comparison, draw_run, require_matplotlib
from eagle_kit.train.run.progress import format_seconds

STYLE = (
    "body{font-family:system-ui,sans-serif;margin:2rem;color:#222}"
    "img{max-width:100%;display:block;margin:1rem 0}"
    "table{border-collapse:collapse;margin:1rem 0}th,td{padding:.3rem .8rem;border-bottom:1px solid #ddd;"
    "text-align:right}th:first-child,td:first-child{text-align:left}"
)


class Comparison(NamedTuple):
    """Several runs beside each other.

    Attributes:
        shape: whose accept length is compared.
        rows: one dictionary a label: ``label``, ``runs``, ``steps``, ``tokens``, ``seconds``; ``best`` and
            ``last``, decoded accept lengths, means over the runs; ``spread``, the standard deviation of
            ``best`` over the runs, None for one; ``gain``, ``best`` against the first label's, less one;
            ``best_of``, ``best`` of every run.
        png: the picture.
        page: the page with both.
    """

    shape: str
    rows: list[dict[str, Any]]
    png: Path
    page: Path

    def table(self) -> str:
        """The rows as a Markdown table."""
        head, cells = _cells(self.rows, self.shape)
        rule = ["---", *["---:"] * (len(head) - 1)]
        return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *cells))


def write_report(run: str | Path, folder: str | Path | None = None) -> Path:
    """Write ``report.html`` and ``curves/*.png`` of one run, into its own folder or into ``folder``.

    Raises:
        UserError: there is no run, no matplotlib, or the folder cannot be written to.
    """
    require_matplotlib()
    curves = RunCurves.read(run)
    target = Path(folder) if folder is not None else curves.path
    pictures = draw_run(curves)
    body = [f"<h1>{html.escape(curves.name)}</h1>", _facts(curves), _judgements(curves)]
    body += [_image(name, data) for name, data in pictures.items()]
    _write_all(target, {f"curves/{name}.png": data for name, data in pictures.items()}, body)
    return target / "report.html"


def compare_runs(
    groups: Mapping[str, Sequence[str | Path]], folder: str | Path, shape: str | None = None
) -> Comparison:
    """Draw runs into one picture and put their figures into one table.

    Args:
        groups: run folders by label; several folders of one label are repetitions with other seeds. The first
            label is what the others are measured against.
        folder: where ``report.html`` and ``compare.png`` go; made when missing.
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
    png = draw_comparison(read, shape)
    head, cells = _cells(rows, shape)
    target = Path(folder)
    _write_all(
        target,
        {"compare.png": png},
        ["<h1>Runs compared</h1>", _table(head, cells), _image("compare", png)],
    )
    return Comparison(shape, rows, target / "compare.png", target / "report.html")


def _compared(label: str, runs: Sequence[RunCurves], shape: str) -> dict[str, Any]:
    best = [found[1] for run in runs if (found := run.best(shape)) is not None]
    return {
        "label": label,
        "runs": len(runs),
        "steps": statistics.fmean(run.metrics[-1]["step"] for run in runs),
        "tokens": statistics.fmean(sum(row["tokens"] for row in run.metrics) for run in runs),
        "seconds": statistics.fmean(sum(map(step_seconds, run.metrics)) for run in runs),
        "best": statistics.fmean(best),
        "best_of": best,
        "spread": statistics.stdev(best) if len(best) > 1 else None,
        "last": statistics.fmean(run.accept_lengths(shape)[1][-1] for run in runs),
    }


def _cells(rows: Sequence[dict[str, Any]], shape: str) -> tuple[list[str], list[list[str]]]:
    head = ["run", f"best accept length, {shape}", "against the first", "last", "steps", "M tokens", "time"]
    lines = []
    for row in rows:
        spread = "" if row["spread"] is None else f" ± {row['spread']:.3f} of {row['runs']}"
        lines.append(
            [
                row["label"],
                f"{row['best']:.3f}{spread}",
                f"{row['gain']:+.1%}",
                f"{row['last']:.3f}",
                f"{row['steps']:.0f}",
                f"{row['tokens'] / 1e6:.2f}",
                format_seconds(row["seconds"]),
            ]
        )
    return head, lines


def _facts(run: RunCurves) -> str:
    last = run.metrics[-1]
    seconds = sum(map(step_seconds, run.metrics))
    judging = sum(row.get("seconds", 0.0) for row in run.judged)
    cells = [
        ["steps", str(last["step"])],
        ["tokens", f"{sum(row['tokens'] for row in run.metrics):,}"],
        ["rows with loss at step 0", f"{sum(row['supervised_tokens'] for row in run.metrics):,}"],
        ["time in steps", format_seconds(seconds)],
        ["time in judgements", format_seconds(judging)],
        ["loss", f"{last['loss']:.4f}"],
    ]
    for shape in run.shapes:
        found = run.best(shape)
        if found is not None:
            cells.append([f"best accept length, {shape}", f"{found[1]:.3f} at step {found[0]['step']}"])
    coverage = run.judged[-1].get("vocab_coverage") if run.judged else None
    if coverage is not None:
        cells.append(["target's own tokens the draft can say", f"{coverage:.2%}"])
    return _table(["", ""], cells)


def _judgements(run: RunCurves) -> str:
    """The last judgements, and the best one."""
    if not run.judged:
        return "<p>Nothing was judged.</p>"
    shapes = run.shapes
    shown = [row for row in run.judged[:-10] if row.get("best")][-1:] + run.judged[-10:]
    lines = [
        [
            f"{row['step']}{' *' if row.get('best') else ''}",
            *(
                f"{row['accept_length'][shape]:.3f}" if shape in row["accept_length"] else ""
                for shape in shapes
            ),
            " ".join(
                f"{100 * share:.0f}" for share in row.get("acceptance_per_position", {}).get(shapes[0], [])
            ),
        ]
        for row in shown
    ]
    head = [
        "step (* the best so far)",
        *shapes,
        f"% of verifies with at least 1, 2, ... accepted, {shapes[0]}",
    ]
    return _table(head, lines)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], kind: str) -> str:
        return f"<tr>{''.join(f'<{kind}>{html.escape(cell)}</{kind}>' for cell in cells)}</tr>"

    top = row(head, "th") if any(head) else ""
    return f"<table>{top}{''.join(row(line, 'td') for line in lines)}</table>"


def _image(name: str, data: bytes) -> str:
    return f'<img alt="{html.escape(name)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'


def _write_all(folder: Path, pictures: Mapping[str, bytes], body: Sequence[str]) -> None:
    """Every picture, then the page, each whole or not at all."""
    page = "\n".join(body)
    document = (
        f'<!doctype html><meta charset="utf-8"><title>eagle_kit</title><style>{STYLE}</style>\n{page}\n'
    )
    try:
        for name, data in pictures.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            partial.write_bytes(data)
            partial.replace(path)
        write_text_atomically(folder / "report.html", document)
    except OSError as error:
        raise UserError(
            f"The report could not be written to {folder}: {error.strerror or error}.",
            "Free some space, or name another folder with --out.",
        ) from error
