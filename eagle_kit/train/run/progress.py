"""Progress line of a run."""

import math
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from tqdm import tqdm


class ProgressLine:
    """A progress bar over optimiser steps with loss, match, simulated accept length, tokens/s and time left.

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
        self._loss: float | None = None
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

    def update(
        self, step: int, loss: float, match: Sequence[float], accept_length: float, tokens_per_s: float
    ) -> None:
        """Show the figures of a finished step; the loss is smoothed over about twenty steps."""
        if math.isfinite(loss):
            self._loss = loss if self._loss is None else 0.95 * self._loss + 0.05 * loss
        shares = " ".join(f"{100 * share:.0f}" for share in match)
        left, mean = format_seconds(self._seconds_left(step)), self._loss or math.nan
        self._bar.set_postfix_str(
            f"loss {mean:.3f} match {shares} % accept {accept_length:.2f} {tokens_per_s:.0f} tok/s "
            f"left {left}",
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
