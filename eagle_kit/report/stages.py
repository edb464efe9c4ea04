"""Progress of long commands: a bar for each stage, and about how long all of them take."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


def say(line: str) -> None:
    """Print a line to standard error, above the bars that are drawn there."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


def mute(line: str) -> None:
    """Print nothing."""


def about(seconds: float) -> str:
    """A time for people, such as ``"about 6 minutes"``."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return "less than a minute"
    if minutes == 1:
        return "about 1 minute"
    if minutes < 120:
        return f"about {minutes} minutes"
    return f"about {minutes / 60:.1f} hours"


def _plural(unit: str) -> str:
    """The plural, such as ``"responses"`` for ``"response"``."""
    return f"{unit[:-1]}ies" if unit.endswith("y") else f"{unit}s"


class TimeLeft:
    """A line with the time that a command will still take, printed once, after its first measured
    work.

    Args:
        total: amount of work; None where it is not known.
        unit: of work, in the plural, for the line without a total.
        sample: work after which the time is estimated. A batch ends as a whole, so a sample is
            whole batches.
        prints: called with the line.
    """

    def __init__(
        self,
        total: float | None,
        unit: str = "",
        *,
        sample: float = 1.0,
        prints: Callable[[str], None] = say,
    ) -> None:
        self._total = total
        self._unit = unit
        self._sample = sample
        self._prints = prints
        self._done = 0.0
        self._started = time.monotonic()
        self._is_said = False

    def restart(self) -> None:
        """Measure from now on: no work was done before."""
        self._started = time.monotonic()

    def skip(self, work: float) -> None:
        """Leave out ``work`` that was done before the command began."""
        if self._total is not None:
            self._total -= work

    def count(self, work: float) -> None:
        """Count ``work`` that was just done, and print the line once that is enough for an
        estimate."""
        self._done += work
        is_enough = self._done >= min(self._sample, self._total or self._sample)
        if self._is_said or not is_enough or self._done <= 0:
            return
        self._is_said = True
        seconds = (time.monotonic() - self._started) / self._done
        if self._total is None:
            rate = 3600 / max(seconds, 1e-6)
            self._prints(f"time    about {rate:,.0f} {self._unit} an hour; how many there are is not known")
        else:
            self._prints(f"time    {about(seconds * max(self._total - self._done, 0.0))} to go")


class Stages:
    """Stages of a command, one after the other, each with a bar.

    The time of all stages is estimated after the first measured work (:class:`TimeLeft`). So the
    work of all stages is given in one unit.

    Args:
        costs: expected work of each stage by its name, in order, in any one unit.
        sample: see :class:`TimeLeft`.
        shows_bar: draw the bars; without them a line names each stage.
        is_quiet: print nothing at all.
    """

    def __init__(
        self,
        costs: Mapping[str, float],
        *,
        sample: float = 1.0,
        shows_bar: bool = True,
        is_quiet: bool = False,
    ) -> None:
        self._costs = dict(costs)
        self._shows_bar = shows_bar and not is_quiet
        self._prints: Callable[[str], None] = mute if is_quiet else say
        self._time = TimeLeft(sum(costs.values()), sample=sample, prints=self._prints)
        self._bar: Any = None
        self._cost_per_piece = 0.0
        self._is_measuring = False

    def start(self, name: str, total: int, unit: str = "step") -> None:
        """Begin a stage of ``total`` pieces of work. The time of a stage that is not in ``costs``
        is not estimated."""
        from tqdm import tqdm

        self.close()
        names = list(self._costs)
        label = name
        if name in self._costs:
            label = f"{names.index(name) + 1}/{len(names)} {name}"
        self._cost_per_piece = self._costs.get(name, 0.0) / max(total, 1)
        if not self._is_measuring:
            self._time.restart()
            self._is_measuring = True
        if not self._shows_bar:
            self._prints(f"stage   {label}, {total} {_plural(unit)}")
        self._bar = tqdm(total=total, unit=unit, desc=label, dynamic_ncols=True, disable=not self._shows_bar)

    def step(self, *_: object) -> None:
        """Count one piece of work. The arguments of callbacks are ignored."""
        if self._bar is not None:
            self._bar.update()
        self._time.count(self._cost_per_piece)

    def skip(self, count: int) -> None:
        """Count pieces of work that were done before the command began."""
        if self._bar is not None:
            self._bar.update(count)
        self._time.skip(count * self._cost_per_piece)

    def close(self) -> None:
        """End the last stage."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
