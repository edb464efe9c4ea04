"""Choice of the fastest of several backends of an operation, from their measured times."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

import torch

from eagle_kit.core.errors import first_line

MARGIN = 0.97
"""A backend replaces the default if it takes less than this share of its time. A smaller gain is noise, and a
choice by noise would differ from one start to the next."""

S = TypeVar("S")
F = TypeVar("F", bound=str)
logger = logging.getLogger(__name__)


class BackendChoice(NamedTuple, Generic[F]):
    """Result of a measurement.

    Attributes:
        backend: the chosen backend.
        seconds: time of a call for each backend that could be measured.
    """

    backend: F
    seconds: Mapping[F, float]

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
    for backend, timer in timers.items():
        try:
            seconds[backend] = timer()
        except torch.AcceleratorError:
            raise  # the device is lost to this process
        except Exception as error:  # any error of a compiler, or too little memory
            is_memory = isinstance(error, torch.OutOfMemoryError)
            reason = "no memory" if is_memory else first_line(error)
            logger.warning(
                "%s: %s cannot be measured, so %s runs in its place (%s).", what, backend, default, reason
            )

    # Choose.
    fastest = min(seconds, key=lambda backend: seconds[backend], default=default)
    if default not in seconds or seconds[fastest] >= MARGIN * seconds[default]:
        fastest = default
    choice = BackendChoice(fastest, seconds)
    logger.info("%s: %s", what, choice)
    return choice


class MeasuredChoices(Generic[S, F]):
    """Table from sizes to backends, filled by measurements. A size is measured once.

    Attributes:
        seconds: total time of the measurements.
    """

    def __init__(self) -> None:
        self._choices: dict[S, BackendChoice[F]] = {}
        self.seconds = 0.0
        self._measures = False

    @property
    def table(self) -> Mapping[S, BackendChoice[F]]:
        """Choices so far."""
        return dict(self._choices)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside the context a new size is measured at its first call."""
        before = self._measures
        self._measures = True
        try:
            yield
        finally:
            self._measures = before

    def _measure(self, size: S, what: str, timers: Mapping[F, Callable[[], float]]) -> None:
        """Choose the backend of ``size``; see :func:`choose_fastest` for the other arguments."""
        begun = time.perf_counter()
        self._choices[size] = choose_fastest(what, timers)
        self.seconds += time.perf_counter() - begun
