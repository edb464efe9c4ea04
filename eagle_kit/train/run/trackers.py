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
    """Options of each tracker that is asked for, by accelerate's name.

    Args:
        step: finished steps; tensorboard no longer shows later ones, from before a kill.
    """
    options: dict[str, dict[str, Any]] = {}
    if config.tracking.wandb != "off":
        options["wandb"] = config.tracking.wandb_options(config.output_dir)
    if config.tracking.tensorboard:
        options["tensorboard"] = {"purge_step": step + 1} if step else {}
    return options


def check_trackers(config: TrainConfig) -> None:
    """Raise UserError when a tracker, or the report, is asked for and its package is not installed."""
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
    """Return True when ``report.html`` is drawn: as the config says, else where matplotlib is installed."""
    wanted = config.tracking.report
    return has_matplotlib() if wanted is None else wanted


def start_trackers(
    accelerator: "Accelerator", config: TrainConfig, settings: dict[str, Any], step: int = 0
) -> None:
    """Open the trackers that are asked for; the run folder must be there.

    Args:
        settings: the config, flat; tensorboard takes numbers and text only.
        step: finished steps of a resumed run.

    Raises:
        UserError: one does not start.
    """
    options = tracker_options(config, step)
    if not options:
        return
    if "tensorboard" in options:
        plain = (bool, int, float, str)
        settings = {key: v if isinstance(v, plain) else str(v) for key, v in settings.items()}
    try:
        # A resumed session goes on with the run of the first one.
        if "wandb" in options and accelerator.is_main_process:
            options["wandb"]["id"] = run_id(Path(config.output_dir))
            options["wandb"]["resume"] = "allow"
        accelerator.init_trackers(config.tracking.project, config=settings, init_kwargs=options)
    except Exception as error:  # no login, no network, and whatever its service raises
        accelerator.trackers = []  # or it would be asked to finish
        reason = first_line(error).rstrip(".")
        names = " or ".join(options)
        remedy = "Run wandb login, or set tracking.wandb to offline or off."
        if "wandb" not in options:
            remedy = "Make the run folder writable, or set tracking.tensorboard=false."
        raise UserError(f"{names} did not start: {reason}.", remedy) from error
