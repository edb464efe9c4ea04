"""Progress line of a run."""

import math
import sys
import time
from collections import defaultdict
from types import TracebackType

from tqdm import tqdm

from eagle_kit.train.run.step import StepResult

SHOWN_GROUPS = 4
"""Groups of documents whose accept lengths the line has room for; the report has all."""


class MovingAverage:
    """Exponential moving average over about twenty values, without bias towards the first: the weights of the
    values add up to 1 from the first on.

    Attributes:
        mean: the average; NaN before the first value.
    """

    DECAY = 0.95

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0
        self.mean = math.nan

    def add(self, value: float) -> None:
        """Take a further value."""
        self._sum = self.DECAY * self._sum + (1.0 - self.DECAY) * value
        self._weight = self.DECAY * self._weight + (1.0 - self.DECAY)
        self.mean = self._sum / self._weight


class ProgressLine:
    """A progress bar over optimiser steps with loss, match, simulated accept length (of all rows, and of the
    first groups of documents), tokens/s and time left.

    On a terminal the line is redrawn; in a log file it is written at most every half minute.

    Args:
        total: step the run stops at.
        done: steps finished before this session.
        stop_after_s: seconds this session may last, when bounded.
        enabled: False draws nothing (the other processes of a run).
    """

    def __init__(
        self, total: int, done: int, stop_after_s: float | None = None, *, enabled: bool = True
    ) -> None:
        self._total, self._first, self._stop_after_s = total, done, stop_after_s
        self._started = time.perf_counter()
        self._loss = MovingAverage()
        self._lengths: defaultdict[str, MovingAverage] = defaultdict(MovingAverage)
        self._bar = tqdm(
            total=total,
            initial=done,
            unit="step",
            disable=not enabled,
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 30.0,
            bar_format="step {n_fmt}/{total_fmt} |{bar:8}|{postfix}",
        )

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def update(self, step: int, result: StepResult) -> None:
        """Show the figures of a finished step; the loss, and accept lengths of groups, which a step may have
        few rows of, are averages of about the last twenty steps."""
        if math.isfinite(result.loss):
            self._loss.add(result.loss)
        for name, length in result.simulated_of.items():
            self._lengths[name].add(length)
        shown = list(self._lengths.items())[:SHOWN_GROUPS]
        of = f" ({', '.join(f'{name} {length.mean:.2f}' for name, length in shown)})" if shown else ""
        shares = " ".join(f"{100 * share:.0f}" for share in result.match_per_step)
        left = format_seconds(self._seconds_left(step))
        self._bar.set_postfix_str(
            f"loss {self._loss.mean:.3f} match {shares} % accept {result.simulated_accept_length:.2f}{of} "
            f"{result.tokens_per_s:.0f} tok/s left {left}",
            refresh=False,
        )
        self._bar.update(step - self._bar.n)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if not self._bar.disable:
            tqdm.write(text, file=sys.stderr)

    def _seconds_left(self, step: int) -> float:
        spent = time.perf_counter() - self._started
        left = spent / max(1, step - self._first) * max(0, self._total - step)
        return left if self._stop_after_s is None else min(left, max(0.0, self._stop_after_s - spent))


def format_seconds(seconds: float) -> str:
    """``3725`` -> ``"1h02m"``, ``75`` -> ``"1m15s"``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s"
