"""Choice of the fastest of several backends of an operation, from their measured times."""

import logging
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

import torch

from eagle_kit.core.errors import first_line

MARGIN = 0.97
"""A backend replaces the default if it takes less than this share of its time. A smaller gain is noise."""

F = TypeVar("F", bound=str)
logger = logging.getLogger(__name__)


class BackendChoice(NamedTuple, Generic[F]):
    """Result of a measurement.

    Attributes:
        backend: the chosen backend.
        seconds: time of a call for each backend that could be measured.
        lacked_memory: True if a backend could not be measured for want of memory.
    """

    backend: F
    seconds: Mapping[F, float]
    lacked_memory: bool = False

    def __str__(self) -> str:
        times = ", ".join(f"{backend} {1e6 * seconds:.1f} us" for backend, seconds in self.seconds.items())
        return f"{self.backend} ({times or 'not measured'})"


def choose_fastest(what: str, timers: Mapping[F, Callable[[], float]]) -> BackendChoice[F]:
    """Measure the backends of an operation, and choose the fastest.

    A backend that cannot be measured is not chosen, and a warning is logged.

    Args:
        what: name of the operation and its size, for the log.
        timers: measure the seconds of each backend; the first one is the default.
    """
    # Measure.
    default = next(iter(timers))
    seconds: dict[F, float] = {}
    lacked_memory = False
    for backend, timer in timers.items():
        try:
            seconds[backend] = timer()
        except torch.AcceleratorError:
            raise  # the device is lost to this process
        except Exception as error:  # any error of a compiler, or too little memory
            reason = first_line(error)
            if isinstance(error, torch.OutOfMemoryError):
                reason = "no memory"
                lacked_memory = True
            logger.warning(
                "%s: %s cannot be measured, so %s runs in its place (%s).", what, backend, default, reason
            )

    # Choose.
    fastest = min(seconds, key=lambda backend: seconds[backend], default=default)
    if default not in seconds or seconds[fastest] >= MARGIN * seconds[default]:
        fastest = default
    choice = BackendChoice(fastest, seconds, lacked_memory)
    logger.info("%s: %s", what, choice)
    return choice
