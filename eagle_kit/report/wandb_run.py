"""Runs of wandb: the id that later sessions of a folder go on with, and a run of final figures alone."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_kit.core.errors import UserError, first_line
from eagle_kit.core.files import write_text_atomically

RUN_ID = "wandb-run-id.txt"


def run_id(folder: Path) -> str:
    """The id of the run of wandb of ``folder``. The first call makes one and writes it there.

    Raises:
        OSError: the file can neither be read nor written.
    """
    path = folder / RUN_ID
    known = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    if known:
        return known
    made = secrets.token_hex(8)
    write_text_atomically(path, made + "\n")
    return made


def require_wandb(remedy: str) -> None:
    """Raise UserError where wandb is not installed.

    Args:
        remedy: how to go without it, such as "leave --tracking out".
    """
    try:
        __import__("wandb")
    except ImportError:
        raise UserError(
            "wandb is not installed.", f"Install it with pip install 'eagle_kit[train]', or {remedy}."
        ) from None


def log_figures(
    project: str, options: Mapping[str, Any], config: Mapping[str, Any], figures: Mapping[str, float]
) -> None:
    """Write figures as the summary of the run of a folder.

    Args:
        options: of :meth:`~eagle_kit.config.train.TrackingConfig.wandb_options`, which name the folder.
        config: settings that wandb shows beside the figures.

    Raises:
        UserError: wandb does not start.
    """
    import wandb

    try:
        identity = run_id(Path(options["dir"]))
        run = wandb.init(
            project=project,
            id=identity,
            resume="allow",
            config=dict(config),
            allow_val_change=True,
            **options,
        )
    except Exception as error:  # no login, no network, or any error of the service
        reason = first_line(error).rstrip(".")
        raise UserError(
            f"wandb did not start: {reason}. The results themselves are in {options['dir']}.",
            "Run wandb login, or set wandb to offline, and give the command again.",
        ) from error
    run.summary.update(dict(figures))
    run.finish()
