"""Table of measured choices of an engine, kept in a file and the same on all ranks."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

from torch import nn

from eagle_kit.distributed.collectives import Ranks
from eagle_kit.engine.measured.choice import BackendChoice, F, choose_fastest
from eagle_kit.engine.measured.choice_file import ChoiceFile

S = TypeVar("S")


def have_equal_parts(modules: Iterable[nn.Module], ranks: Ranks | None) -> bool:
    """True if the weights of every rank have the same shapes, so that all ranks meet the same sizes of layers
    in the same order; every rank calls it. Otherwise ranks cannot choose together."""
    if ranks is None:
        return True
    shapes = [tuple(weight.shape) for module in modules for weight in module.parameters()]
    return all(each == shapes for each in ranks.all(shapes))


class MeasuredChoices(Generic[S, F]):
    """Table from sizes to backends, filled by measurements. A size is measured once.

    A choice that lies in the file takes the place of its measurement and changes nothing else: a restarted
    engine has the backends of the first one, from the same call on.

    Args:
        file: where choices are kept; None keeps none.
        ranks: processes that share the model, of which the first one chooses. All of them meet the same new
            sizes in the same order.

    Attributes:
        seconds: total time of the measurements.
    """

    def __init__(self, file: ChoiceFile | None = None, ranks: Ranks | None = None) -> None:
        self.file = file
        self.ranks = ranks
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

    def origin(self) -> list[str]:
        """Origin and file of the choices, in a line for people; none without a file or a choice."""
        if self.file is None or not self._choices:
            return []
        num_sizes = len(self._choices)
        if not self.file.is_used:
            return [f"{num_sizes} sizes measured, and not kept"]
        return [f"{self.file.num_read} of {num_sizes} sizes read from {self.file.path}, where all are kept"]

    def _measure(self, size: S, what: str, timers: Mapping[F, Callable[[], float]]) -> None:
        """Choose the backend of ``size``; see :func:`choose_fastest` for the other arguments."""
        begun = time.perf_counter()
        choice: BackendChoice[F] | None = None
        if self.ranks is None or self.ranks.is_first:
            choice = self._find(what, timers)
        if self.ranks is not None:
            choice = self.ranks.agree(choice)
        assert choice is not None
        self._choices[size] = choice
        self.seconds += time.perf_counter() - begun

    def _find(self, what: str, timers: Mapping[F, Callable[[], float]]) -> BackendChoice[F]:
        """Read the choice from the file, or measure it and write it there.

        A choice for want of memory is not written, since the next start may have more.
        """
        if self.file is None:
            return choose_fastest(what, timers)
        known = self.file.get(what, timers)
        if known is not None:
            return known
        choice = choose_fastest(what, timers)
        if choice.lacked_memory:
            return choice
        return self.file.add(what, choice, timers)
