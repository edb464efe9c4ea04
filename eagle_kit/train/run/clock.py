"""Time of an optimiser step by part: data, capture, forward, backward, communication, optimizer.

A lap is the time since the last one. On CUDA laps are events on the current stream, so that nothing waits
while the step runs; they are read when its row is written.
"""

import time

import torch

LAPS = ("data", "capture", "forward", "backward", "communication", "optimizer")
"""``data`` lays the rows out; ``capture`` runs the target or waits for its stored states; ``forward`` holds
the loss with the gradient of the output layer, which is made while logits exist; ``communication`` is the
waiting for other processes too."""


class StepClock:
    """Seconds of a step by lap. Starts when it is made.

    Args:
        device: whose time is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds = dict.fromkeys(LAPS, 0.0)
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._last = time.perf_counter()
        if self._on_cuda:
            self.lap(LAPS[0])

    def lap(self, name: str) -> None:
        """Give the time since the last lap to ``name``, one of :data:`LAPS`."""
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((name, event))
            return
        now = time.perf_counter()
        self._seconds[name] += now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """Seconds of every lap so far. On CUDA waits for the last one."""
        if self._events:
            self._events[-1][1].synchronize()
            for (_, before), (name, after) in zip(self._events, self._events[1:], strict=False):
                self._seconds[name] += before.elapsed_time(after) / 1000
            self._events = self._events[-1:]
        return dict(self._seconds)
