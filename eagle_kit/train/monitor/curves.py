"""A run folder as curves: what `metrics.jsonl` and `judge.jsonl` say, over steps, tokens and time."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError
from eagle_kit.train.run.folder import RunFolder

AXES = {"step": "optimiser steps", "tokens": "million tokens", "time": "minutes of optimiser steps"}


@dataclass(frozen=True)
class RunCurves:
    """What a run left.

    Attributes:
        path: its folder.
        metrics: rows of ``metrics.jsonl``.
        judged: rows of ``judge.jsonl``.
    """

    path: Path
    metrics: list[dict[str, Any]]
    judged: list[dict[str, Any]]

    @classmethod
    def read(cls, path: str | Path) -> "RunCurves":
        """The run in ``path``. Raises UserError when there is none."""
        folder = RunFolder(path)
        metrics = folder.metrics.rows()
        if not metrics:
            raise UserError(
                f"There are no curves in {path}: metrics.jsonl is missing or empty.", "Name a run folder."
            )
        return cls(Path(path), metrics, folder.judgements.rows())

    @property
    def name(self) -> str:
        """The folder's."""
        return self.path.resolve().name

    @property
    def shapes(self) -> list[str]:
        """Shapes that were decoded, the one that chooses ``best/`` first."""
        return list(dict.fromkeys(shape for row in self.judged for shape in row["accept_length"]))

    def x(self, axis: str, rows: Sequence[dict[str, Any]]) -> list[float]:
        """Where ``rows`` lie on one of :data:`AXES`."""
        if axis == "step":
            return [row["step"] for row in rows]
        if axis == "tokens":
            added = accumulate(row["tokens"] / 1e6 for row in self.metrics)
        else:
            added = accumulate(step_seconds(row) / 60 for row in self.metrics)
        at = dict(zip((row["step"] for row in self.metrics), added, strict=True))
        return [at.get(row["step"], 0.0) for row in rows]

    def accept_lengths(self, shape: str, prefix: str = "") -> tuple[list[dict[str, Any]], list[float]]:
        """The judgements that have ``shape``, and its accept lengths; ``prefix`` may be ``simulated_``."""
        rows = [row for row in self.judged if shape in row.get(f"{prefix}accept_length", {})]
        return rows, [row[f"{prefix}accept_length"][shape] for row in rows]

    def best(self, shape: str) -> tuple[dict[str, Any], float] | None:
        """The first judgement with the longest accept length of ``shape``."""
        rows, lengths = self.accept_lengths(shape)
        if not rows:
            return None
        at = max(range(len(rows)), key=lambda i: lengths[i])
        return rows[at], lengths[at]


def step_seconds(row: dict[str, Any]) -> float:
    """Seconds of a step, of a run from before they were split as well."""
    laps = row.get("seconds")
    if isinstance(laps, dict):
        return float(sum(laps.values()))
    return row["tokens"] / row["tokens_per_s"] if row.get("tokens_per_s") else 0.0


def smooth(values: Sequence[float]) -> list[float]:
    """Running mean over about a fortieth of the curve, without the pull of its beginning."""
    keep, total, weight, out = 1 - 1 / max(1.0, len(values) / 40), 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        out.append(total / weight)
    return out
