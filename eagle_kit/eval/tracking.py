"""Results of an evaluation as a run of wandb."""

from pathlib import Path
from typing import Any

from eagle_kit.config.tracking import TrackingConfig
from eagle_kit.report.wandb_run import log_figures

SETTING = ("task", "category", "draft", "shape")
"""Fields of a row that name what was measured."""


def log_evaluation(summary: dict[str, Any], tracking: TrackingConfig, out: str | Path) -> None:
    """Write the figures of an evaluation as a run of wandb, where ``tracking`` asks for one.

    Args:
        summary: of :func:`eagle_kit.eval.runner.run_eval`.
        out: its folder, which keeps the run's id.

    Raises:
        UserError: wandb does not start.
    """
    if tracking.wandb == "off":
        return
    figures: dict[str, float] = {}
    for row in summary["rows"]:
        place = "/".join(str(row[name] or "plain") for name in SETTING)
        if row.get("temperature"):
            place = f"T{row['temperature']:g}/{place}"
        for name, value in row.items():
            if name not in (*SETTING, "temperature") and isinstance(value, int | float):
                figures[f"{place}/{name}"] = value
    log_figures(tracking.project, tracking.wandb_options(out), summary["settings"], figures)
