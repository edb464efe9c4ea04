"""Progress line of a run."""

import math
import sys
import time
from collections import defaultdict
from types import TracebackType

from tqdm import tqdm

from eagle_kit.train.run.step import StepResult

SHOWN_GROUPS = 4
"""Maximum number of groups of documents whose accept lengths the line shows; the report has all."""


class MovingAverage:
    """Exponential moving average over about twenty values, without bias towards zero.

    Attributes:
        mean: the average; NaN before the first value.
    """

    DECAY = 0.95

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0
        self.mean = math.nan

    def add(self, value: float) -> None:
        """Add a value."""
        self._sum = self.DECAY * self._sum + (1.0 - self.DECAY) * value
        self._weight = self.DECAY * self._weight + (1.0 - self.DECAY)
        self.mean = self._sum / self._weight


class ProgressLine:
    """A progress bar over optimiser steps.

    It shows loss, matches, simulated accept length (of all rows, and of the first groups of documents),
    tokens per second and the time that is left. A terminal redraws it; a log file gets it at most every 30
    seconds, and where a validation begins.

    Args:
        total: step at which the session stops.
        done: steps finished before this session.
        stop_after_s: maximum duration of this session in seconds; None is unbounded.
        enabled: False prints nothing, in all processes but the main one.
    """

    def __init__(
        self, total: int, done: int, stop_after_s: float | None = None, *, enabled: bool = True
    ) -> None:
        self._total = total
        self._first = done
        self._stop_after_s = stop_after_s
        self._started = time.perf_counter()
        self._loss = MovingAverage()
        self._lengths: defaultdict[str, MovingAverage] = defaultdict(MovingAverage)
        self._figures = ""
        self._interval = 0.5 if sys.stderr.isatty() else 30.0
        self._validation_shown_at = 0.0
        self._bar = tqdm(
            total=total,
            initial=done,
            unit="step",
            disable=not enabled,
            dynamic_ncols=True,
            mininterval=self._interval,
            bar_format="step {n_fmt}/{total_fmt} |{bar:8}|{postfix}",
        )

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def update(self, step: int, result: StepResult) -> None:
        """Show the figures of a finished step."""
        # Averages over the last steps: a group may have few rows in one.
        if math.isfinite(result.loss):
            self._loss.add(result.loss)
        for name, length in result.simulated_of.items():
            self._lengths[name].add(length)

        # The line.
        shares = " ".join(f"{100 * share:.0f}" for share in result.match_per_step)
        accept = f"{result.simulated_accept_length:.2f}"
        shown = list(self._lengths.items())[:SHOWN_GROUPS]
        if shown:
            by_group = ", ".join(f"{name} {length.mean:.2f}" for name, length in shown)
            accept += f" ({by_group})"
        left = format_seconds(self._seconds_left(step))
        self._figures = (
            f"loss {self._loss.mean:.3f} match {shares} % accept {accept} "
            f"{result.tokens_per_s:.0f} tok/s left {left}"
        )
        self._bar.set_postfix_str(self._figures, refresh=False)
        self._bar.update(step - self._bar.n)

    def validating(self, num_responses: int, total: int) -> None:
        """Show the number of decoded responses of a validation, after the figures of the last step.

        Args:
            num_responses: responses that are decoded.
            total: all responses of the validation.
        """
        if self._bar.disable:
            return
        is_last = num_responses == total
        now = time.perf_counter()
        if num_responses and not is_last and now - self._validation_shown_at < self._interval:
            return
        self._validation_shown_at = now
        note = "" if is_last else f", validating: response {num_responses + 1}/{total}"
        self._bar.set_postfix_str(self._figures + note)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if not self._bar.disable:
            tqdm.write(text, file=sys.stderr)

    def _seconds_left(self, step: int) -> float:
        """Seconds until the last step, at the mean speed of this session, or until its time limit."""
        spent = time.perf_counter() - self._started
        per_step = spent / max(1, step - self._first)
        left = per_step * max(0, self._total - step)
        if self._stop_after_s is None:
            return left
        return min(left, max(0.0, self._stop_after_s - spent))


def format_seconds(seconds: float) -> str:
    """Format a duration: ``3725`` as ``"1h02m"``, ``75`` as ``"1m15s"``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s"
