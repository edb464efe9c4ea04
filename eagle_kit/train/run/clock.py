"""Time of an optimiser step by part: data, capture, forward, backward, communication, optimizer.

A lap is the time since the lap before. On CUDA, laps are events on the current stream, so that the host does
not wait during the step; they are read when its row is written.
"""

import time
from itertools import pairwise

import torch

LAPS = ("data", "capture", "forward", "backward", "communication", "optimizer")
"""Parts of a step.

``data`` makes the micro-batches. ``capture`` runs the target or reads its stored hidden states. ``forward``
includes the loss and the gradient of the output layer, which is computed while the logits exist.
``communication`` includes the time of waiting for other processes.
"""


class StepClock:
    """Seconds of a step by part. The first lap starts with the constructor.

    Args:
        device: device whose time is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds = dict.fromkeys(LAPS, 0.0)
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._last = time.perf_counter()
        if self._on_cuda:
            self.lap(LAPS[0])

    def lap(self, name: str) -> None:
        """Add the time since the last lap to ``name``, one of :data:`LAPS`."""
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((name, event))
            return
        now = time.perf_counter()
        self._seconds[name] += now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """Seconds by part so far. On CUDA it waits for the last event."""
        if self._events:
            last = self._events[-1][1]
            last.synchronize()
            for (_, before), (name, after) in pairwise(self._events):
                self._seconds[name] += before.elapsed_time(after) / 1000
            self._events = self._events[-1:]
        return dict(self._seconds)
