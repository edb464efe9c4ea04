"""Rows of a store, read ahead by a thread while a training step is computed."""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from eagle_kit.data.hidden_states.shards import Parts
from eagle_kit.data.hidden_states.store import StateStore

AHEAD = 2
"""Forwards whose rows are in memory; those of one more are being read."""


class Prefetcher:
    """Reads rows in the order in which training takes them; :meth:`close` ends its thread.

    Args:
        store: the store that is read.
        order: the rows of every forward to come; it may be endless.
        pin: read into page-locked memory, from which copies to a GPU are asynchronous.
        ahead: forwards whose rows may wait in memory, >= 1.
    """

    def __init__(
        self, store: StateStore, order: Iterable[list[int]], *, pin: bool = False, ahead: int = AHEAD
    ) -> None:
        self.store = store
        self.pin = pin
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="states")
        self._order = iter(order)
        self._ready: deque[tuple[list[int], Future[Parts | None]]] = deque()
        self._read_ahead(ahead + 1)

    def take(self, rows: list[int]) -> Parts | None:
        """The encoded tensors of ``rows``, which must be next in the order; None if the store lacked one of
        them.

        Raises:
            UserError: as :meth:`StateStore.read`. Any other error of the thread is raised here too.
        """
        expected, found = self._ready.popleft()
        assert expected == rows, f"rows {rows} were asked for, {expected} are next"
        parts = found.result()
        self._read_ahead(1)
        return parts

    def close(self) -> None:
        """End the thread and drop the rows that wait."""
        self._thread.shutdown(cancel_futures=True)

    def _read_ahead(self, count: int) -> None:
        for rows in islice(self._order, count):
            self._ready.append((rows, self._thread.submit(self._read, rows)))

    def _read(self, rows: list[int]) -> Parts | None:
        parts = self.store.read(rows)
        if parts is not None and self.pin:
            return {name: tensor.pin_memory() for name, tensor in parts.items()}
        return parts
