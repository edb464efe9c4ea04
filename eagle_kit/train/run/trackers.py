"""wandb and tensorboard through accelerate's trackers, and the choice of drawing the local report."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError, first_line
from eagle_kit.report.plots import has_matplotlib
from eagle_kit.report.wandb_run import run_id

if TYPE_CHECKING:
    from accelerate import Accelerator


def tracker_options(config: TrainConfig, step: int = 0) -> dict[str, dict[str, Any]]:
    """Options of the trackers in the config, by accelerate's name of each.

    Args:
        step: finished steps; tensorboard hides later ones, which an interrupted session wrote.
    """
    options: dict[str, dict[str, Any]] = {}
    if config.tracking.wandb != "off":
        options["wandb"] = config.tracking.wandb_options(config.output_dir)
    if config.tracking.tensorboard:
        options["tensorboard"] = {}
        if step:
            options["tensorboard"]["purge_step"] = step + 1
    return options


def check_trackers(config: TrainConfig) -> None:
    """Raise UserError if the package of a tracker, or of the report, is needed and not installed."""
    for name, off, needed in (
        ("wandb", "tracking.wandb=off", config.tracking.wandb != "off"),
        ("tensorboard", "tracking.tensorboard=false", config.tracking.tensorboard),
        ("matplotlib", "tracking.report=false", config.tracking.report is True),
    ):
        if not needed:
            continue
        try:
            __import__(name)
        except ImportError:
            raise UserError(
                f"{name} is not installed.", f"Install it with pip install 'eagle_kit[train]', or set {off}."
            ) from None


def draws_report(config: TrainConfig) -> bool:
    """True if ``report.html`` is drawn: by ``tracking.report``, or by default if matplotlib is installed."""
    if config.tracking.report is None:
        return has_matplotlib()
    return config.tracking.report


def start_trackers(
    accelerator: "Accelerator", config: TrainConfig, settings: dict[str, Any], step: int = 0
) -> None:
    """Start the trackers of the config; the run folder must exist.

    Args:
        settings: the flattened config.
        step: finished steps of a resumed run.

    Raises:
        UserError: a tracker does not start.
    """
    options = tracker_options(config, step)
    if not options:
        return

    # tensorboard takes numbers and text only.
    if "tensorboard" in options:
        settings = dict(settings)
        for key, value in settings.items():
            if not isinstance(value, bool | int | float | str):
                settings[key] = str(value)
    try:
        # A resumed session goes on with the run of the first one.
        if "wandb" in options and accelerator.is_main_process:
            options["wandb"]["id"] = run_id(Path(config.output_dir))
            options["wandb"]["resume"] = "allow"
        accelerator.init_trackers(config.tracking.project, config=settings, init_kwargs=options)
    except Exception as error:  # no login, no network, or any error of the service
        accelerator.trackers = []  # accelerate would finish those that did not start
        reason = first_line(error).rstrip(".")
        names = " or ".join(options)
        remedy = "Run wandb login, or set tracking.wandb to offline or off."
        if "wandb" not in options:
            remedy = "Make the run folder writable, or set tracking.tensorboard=false."
        raise UserError(f"{names} did not start: {reason}.", remedy) from error
