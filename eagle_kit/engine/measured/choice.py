"""Choice of the fastest of several forms of an operation, from their measured times."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

import torch

from eagle_kit.core.errors import first_line

MARGIN = 0.97
"""A form is taken in place of the default where it needs less than this part of its time: less than that is
noise, and a choice that follows noise differs from one start to the next."""

S = TypeVar("S")
F = TypeVar("F", bound=str)
logger = logging.getLogger(__name__)


class Choice(NamedTuple, Generic[F]):
    """A form, and the seconds of those that could be measured."""

    form: F
    seconds: Mapping[F, float]

    def __str__(self) -> str:
        times = ", ".join(f"{form} {1e6 * seconds:.1f} us" for form, seconds in self.seconds.items())
        return f"{self.form} ({times or 'not measured'})"


def choose_fastest(what: str, timers: Mapping[F, Callable[[], float]]) -> Choice[F]:
    """Measure forms of ``what`` and choose one; a form that cannot be measured is not chosen, with a warning.

    Args:
        timers: the seconds of each form; the first one is the default.
    """
    default, seconds = next(iter(timers)), {}
    for form, timer in timers.items():
        try:
            seconds[form] = timer()
        except torch.AcceleratorError:
            raise  # the device is lost to this process
        except Exception as error:  # whatever a compiler raises, or there is no memory
            is_memory = isinstance(error, torch.OutOfMemoryError)
            reason = "no memory" if is_memory else first_line(error)
            logger.warning(
                "%s: %s cannot be measured, so %s runs in its place (%s).", what, form, default, reason
            )
    fastest = min(seconds, key=lambda form: seconds[form], default=default)
    if default not in seconds or seconds[fastest] >= MARGIN * seconds[default]:
        fastest = default
    choice = Choice(fastest, seconds)
    logger.info("%s: %s", what, choice)
    return choice


class MeasuredChoices(Generic[S, F]):
    """Table from sizes to forms, filled by measurements; a choice is kept and never measured again.

    Attributes:
        seconds: that measuring took.
    """

    def __init__(self) -> None:
        self._choices: dict[S, Choice[F]] = {}
        self.seconds = 0.0
        self._measures = False

    @property
    def table(self) -> Mapping[S, Choice[F]]:
        """Choices so far."""
        return dict(self._choices)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Within, a size that is new is measured at its first call."""
        before, self._measures = self._measures, True
        try:
            yield
        finally:
            self._measures = before

    def _measure(self, size: S, what: str, timers: Mapping[F, Callable[[], float]]) -> None:
        """Choose the form of ``size`` by :func:`choose_fastest`, whose arguments the others are."""
        begun = time.perf_counter()
        self._choices[size] = choose_fastest(what, timers)
        self.seconds += time.perf_counter() - begun
