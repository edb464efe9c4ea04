"""Verdicts of a comparison: never slower than plain decoding, and as fast as is wanted."""

from collections.abc import Iterator, Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.tune.prompts import OWN_TASKS
from benchmarks.tune.sizes import AUTO
from benchmarks.verdict import Rows, Verdict, at_least, at_most

NOT_SLOWER, NEARLY_BEST, BEST_IN_THE_MEAN, CHOOSING = 0.98, 0.97, 1.0, 0.002
WORTH = {1: 1.25, 8: 1.2}
"""Times plain decoding, by batch size, that the first draft is to reach on all tasks but those made here."""
TIMES_VLLM, TIMES_TRANSFORMERS = {1: 1.35, 8: 1.35}, {1: 3.0, 8: 2.7}


def verdicts(shapes: Sequence[str], rows: Rows, counts: bool) -> list[Verdict]:
    """Judge: never slower than plain decoding, nearly the best fixed shape of every cell, better than each
    of them in the mean."""
    cells = [row for row in rows if "ratios" in row]

    def where(row: dict[str, Any]) -> str:
        return f"{row['draft']}, batch {row['batch']}, {row['task']}"

    plain = [(row["figures"]["auto over plain"], where(row)) for row in cells]
    cold = [
        (row["figures"]["auto over plain"], row["draft"])
        for row in rows
        if "course" in row and "ratios" not in row
    ]
    best = [(row["figures"]["auto over best in a round"], where(row)) for row in cells]
    choosing = [
        (row["figures"]["share of a cycle"], f"{row['draft']}, batch {row['batch']}")
        for row in rows
        if "share of a cycle" in row.get("figures", {})
    ]

    def mean(setting: str) -> float:
        return geometric_mean(row["ratios"][setting] for row in cells)

    means = [(mean(AUTO) / mean(shape), shape) for shape in shapes if cells]
    return [
        at_least(f"auto at least {NOT_SLOWER} x plain decoding", NOT_SLOWER, plain),
        at_least(f"auto at least {NOT_SLOWER} x plain decoding in the first responses", NOT_SLOWER, cold),
        at_least(f"auto at least {NEARLY_BEST} x the best fixed shape", NEARLY_BEST, best),
        at_least("auto above every fixed shape in the mean", BEST_IN_THE_MEAN, means),
        at_most(f"choosing at most {CHOOSING:.1%} of a cycle", CHOOSING, choosing),
        *_reached(rows),
    ]


def _reached(rows: Rows) -> Iterator[Verdict]:
    """Judge what the first draft is worth, beside plain decoding and beside other engines."""
    first = next((row["draft"] for row in rows if "draft" in row), None)
    mine = [row for row in rows if row.get("draft") == first]
    peers = [row for row in mine if row.get("peers")]

    def found(rows: Rows, figure: str, batch: int) -> list[tuple[float, str]]:
        chosen = [row for row in rows if row["batch"] == batch and figure in row.get("figures", {})]
        return [(row["figures"][figure], f"{first}, batch {batch}, {row['task']}") for row in chosen]

    cells = [row for row in mine if "ratios" in row and row["task"] not in OWN_TASKS]
    for where, figure, name, wanted in (
        (cells, "auto over plain", "plain decoding", WORTH),
        (peers, "times vLLM at its best", "vLLM at its best", TIMES_VLLM),
        (peers, "times transformers", "transformers", TIMES_TRANSFORMERS),
    ):
        for batch, least in wanted.items():
            text = f"{first or 'auto'} at batch {batch} at least {least} x {name}"
            yield at_least(text, least, found(where, figure, batch))
