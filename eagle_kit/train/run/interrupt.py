"""Ctrl-C and SIGTERM as a flag, so that the step is finished and saved first."""

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FINISH_STEP = "this step is finished and saved first"


class Interrupt:
    """Context manager that turns the first SIGINT or SIGTERM into a flag; the second one interrupts at once.

    Outside of the main thread, signals are not changed.

    Args:
        announce: print a line when the first signal arrives.

    Attributes:
        promise: what that line says is done before the process ends; may be changed as the work goes on.
        requested: True if a signal has arrived.
    """

    def __init__(self, announce: bool = True, promise: str = FINISH_STEP) -> None:
        self.promise = promise
        self.requested = False
        self._announce = announce
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Set the flag. The next signal has the handler from before."""
        self.requested = True
        self._restore()
        if self._announce:
            print(f"\nStopping: {self.promise}; press Ctrl-C again to drop it.", file=sys.stderr)

    def _restore(self) -> None:
        """Restore the handlers from before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
