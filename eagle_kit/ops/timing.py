"""Timing of operations: on a GPU by CUDA events around replays of a graph, with the second-level cache
flushed before each; on a CPU by the clock.

The cache is flushed by reading, not by writing: written lines would go back to memory during the operation
and add to its time. A graph of one operation has no gaps between its launches. An operation that cannot be
captured is enqueued while the device is still busy with the flush.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from eagle_kit.ops.linear import onednn

FLUSH_L2_TIMES = 5
EAGER_FLUSHES = 8
"""Flushes before an operation that is not a graph: about half a millisecond, in which the host gets ahead."""


class Timing(NamedTuple):
    """Seconds of a run.

    Attributes:
        median: of all runs.
        low, high: a tenth of the runs are below ``low``, a tenth above ``high``.
        repeats: number of runs.
        how: ``"graph"``, ``"eager"`` (events around launches) or ``"clock"``.
    """

    median: float
    low: float
    high: float
    repeats: int
    how: str

    @classmethod
    def of(cls, seconds: Sequence[float], how: str) -> "Timing":
        """Timing from the ``seconds`` of each run."""
        ordered = sorted(seconds)
        tenth = len(ordered) // 10
        return cls(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], len(ordered), how)

    def in_us(self) -> dict[str, Any]:
        """Fields for JSON, times in microseconds."""
        return {
            "median": round(1e6 * self.median, 3),
            "low": round(1e6 * self.low, 3),
            "high": round(1e6 * self.high, 3),
            "repeats": self.repeats,
            "how": self.how,
        }


class Timer:
    """Times functions on one device.

    Args:
        budget_s: seconds that the repetitions of one function should take together.
        least, most: bounds of the number of repetitions, whatever they take.
    """

    def __init__(
        self, device: torch.device, budget_s: float = 0.25, least: int = 10, most: int = 100
    ) -> None:
        self.device = device
        self.budget_s = budget_s
        self.least = least
        self.most = most
        self._flushed: torch.Tensor | None = None
        if device.type == "cuda":
            size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 50 << 20
            self._flushed = torch.ones(FLUSH_L2_TIMES * size // 4, device=device)
            self._sum = torch.zeros((), device=device)

    def flush(self) -> None:
        """Fill the second-level cache with other, clean lines; nothing on a CPU."""
        if self._flushed is not None:
            torch.sum(self._flushed, dim=0, out=self._sum)

    def time(self, run: Callable[[], Any], *, as_graph: bool = True) -> Timing:
        """Warm up, then time ``run()``, which must do the same every time."""
        if self.device.type != "cuda":
            return self._by_clock(run)

        # Warm up on the stream that captures.
        side = _side_stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)

        # Time replays of a graph, or launches if there is none.
        graph = _capture(run, side) if as_graph else None
        if graph is not None:
            return Timing.of(self._by_events(graph.replay, 1), "graph")
        return Timing.of(self._by_events(run, EAGER_FLUSHES), "eager")

    def time_in_a_row(self, run: Callable[[], Any], repeats: int = 20, warmup: int = 26) -> Timing:
        """Time ``run()`` from one call to the next, as an engine runs its steps: without a wait or a flush
        between them."""
        marks = []
        for _ in range(warmup + repeats + 1):
            marks.append(self._mark())
            run()
        if self.device.type != "cuda":
            seconds = [after - before for before, after in pairwise(marks)]
            return Timing.of(seconds[warmup:], "clock, in a row")
        torch.cuda.synchronize(self.device)
        seconds = [1e-3 * before.elapsed_time(after) for before, after in pairwise(marks)]
        return Timing.of(seconds[warmup:], "events, in a row")

    def _mark(self) -> Any:
        """A point in the device's time."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _by_clock(self, run: Callable[[], Any]) -> Timing:
        run()
        start = time.perf_counter()
        run()
        seconds = []
        for _ in range(self._repeats(time.perf_counter() - start)):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return Timing.of(seconds, "clock")

    def _by_events(self, run: Callable[[], Any], flushes: int) -> list[float]:
        seconds = self._events(run, flushes, 3)
        return self._events(run, flushes, self._repeats(statistics.median(seconds)))

    def _events(self, run: Callable[[], Any], flushes: int, repeats: int) -> list[float]:
        pairs = []
        for _ in range(repeats):
            for _ in range(flushes):
                self.flush()
            start = torch.cuda.Event(enable_timing=True)
            stop = torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            stop.record()
            pairs.append((start, stop))
        torch.cuda.synchronize(self.device)
        return [1e-3 * start.elapsed_time(stop) for start, stop in pairs]

    def _repeats(self, seconds: float) -> int:
        return max(self.least, min(self.most, int(self.budget_s / max(seconds, 1e-9))))


@torch.inference_mode()
def matmul_rates(size: int = 2048) -> dict[str, float]:
    """FLOP/s of a square fp32 product on the CPU, by torch and, if available, by oneDNN."""
    a, b = torch.randn(2, size, size)
    timer = Timer(torch.device("cpu"), budget_s=0.0, least=7)
    products: dict[str, Callable[[], torch.Tensor]] = {"torch_mm": lambda: a @ b}
    if onednn.available():
        products["onednn"] = lambda: onednn.matmul(a, b)
    return {name: 2 * size**3 / timer.time(run).median for name, run in products.items()}


@cache
def _side_stream(device: torch.device) -> "torch.cuda.Stream":
    """Stream of all measurements on a device.

    cuBLAS keeps a workspace of 32 MiB for every stream that it has seen.
    """
    return torch.cuda.Stream(device)


def _capture(run: Callable[[], Any], side: "torch.cuda.Stream") -> "torch.cuda.CUDAGraph | None":
    """Capture ``run`` on the stream ``side``; None if it cannot be captured, as when it reads on the host.

    Other threads may pin or allocate memory during the capture.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            run()
    except Exception:  # whatever an operation raises that cannot be captured; run eagerly it may still work
        torch.cuda.set_stream(stream)  # a capture that ends in an error leaves its own
        torch.cuda.synchronize()
        return None
    return graph
