"""Rows of a store, read ahead by a thread while a step is computed."""

import queue
import threading
import time
from collections.abc import Iterable
from types import TracebackType

from eagle_kit.data.states.shards import Parts
from eagle_kit.data.states.store import StateStore

AHEAD = 2
"""Forwards that are read and wait; a third is in the thread's hands."""


class Prefetcher:
    """Reads rows in the order in which they will be asked for.

    A context manager; without it, :meth:`close` ends the thread.

    Args:
        store: where from. A row that it lacks is handed over as None.
        order: the rows of every forward to come; it may be endless.
        pin: read into page-locked memory, from which copies to a GPU do not wait.
        ahead: forwards that may wait, >= 1: the bound of what is held in memory.

    Attributes:
        wait_s: seconds that :meth:`take` waited for the disk in all.
    """

    def __init__(
        self, store: StateStore, order: Iterable[list[int]], *, pin: bool = False, ahead: int = AHEAD
    ) -> None:
        self.wait_s = 0.0
        self._ready: queue.Queue[tuple[list[int], Parts | BaseException | None]] = queue.Queue(ahead)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(store, iter(order), pin), name="states", daemon=True
        )
        self._thread.start()

    def take(self, rows: list[int]) -> Parts | None:
        """The encoded tensors of ``rows``, which must be next in the order; None when the store lacked one.

        Raises:
            UserError: or whatever else the thread met while reading them.
        """
        started = time.perf_counter()
        expected, found = self._ready.get()
        self.wait_s += time.perf_counter() - started
        if isinstance(found, BaseException):
            self.close()
            raise found
        assert expected == rows, f"rows {rows} were asked for, {expected} are next"
        return found

    def close(self) -> None:
        """End the thread; what waits is dropped."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, store: StateStore, order: Iterable[list[int]], pin: bool) -> None:
        try:
            for rows in order:
                parts = store.read(rows)
                if parts is not None and pin:
                    parts = {name: tensor.pin_memory() for name, tensor in parts.items()}
                if not self._put(rows, parts):
                    return
            self._put([], RuntimeError("More rows were asked for than the order has."))
        except BaseException as error:  # handed to the thread that trains
            self._put([], error)

    def _put(self, rows: list[int], found: "Parts | BaseException | None") -> bool:
        """Hand over, waiting for room; False when the reader has gone."""
        while not self._stop.is_set():
            try:
                self._ready.put((rows, found), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
