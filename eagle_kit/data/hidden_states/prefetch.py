"""Rows of a store, read ahead by a thread while a step is computed."""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from eagle_kit.data.hidden_states.shards import Parts
from eagle_kit.data.hidden_states.store import StateStore

AHEAD = 2
"""Forwards that are read and wait; a third is in the thread's hands."""


class Prefetcher:
    """Reader of rows in the order in which they will be asked for; :meth:`close` ends its thread.

    Args:
        store: read. A row that it lacks is handed over as None.
        order: the rows of every forward to come; it may be endless.
        pin: read into page-locked memory, from which copies to a GPU do not wait.
        ahead: forwards that may wait, >= 1: the bound of what is held in memory.
    """

    def __init__(
        self, store: StateStore, order: Iterable[list[int]], *, pin: bool = False, ahead: int = AHEAD
    ) -> None:
        self.store, self.pin = store, pin
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="states")
        self._order = iter(order)
        self._ready: deque[tuple[list[int], Future[Parts | None]]] = deque()
        self._read_ahead(ahead + 1)

    def take(self, rows: list[int]) -> Parts | None:
        """The encoded tensors of ``rows``, which must be next in the order; None when the store lacked one.

        Raises:
            UserError: or whatever else the thread met while reading them.
        """
        expected, found = self._ready.popleft()
        assert expected == rows, f"rows {rows} were asked for, {expected} are next"
        parts = found.result()
        self._read_ahead(1)
        return parts

    def close(self) -> None:
        """End the thread; rows that wait are dropped."""
        self._thread.shutdown(cancel_futures=True)

    def _read_ahead(self, count: int) -> None:
        for rows in islice(self._order, count):
            self._ready.append((rows, self._thread.submit(self._read, rows)))

    def _read(self, rows: list[int]) -> Parts | None:
        parts = self.store.read(rows)
        if parts is not None and self.pin:
            return {name: tensor.pin_memory() for name, tensor in parts.items()}
        return parts
