"""Rows of a store, read ahead by threads while a training step is computed."""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from eagle_kit.data.hidden_states.shards import Parts
from eagle_kit.data.hidden_states.store import StateStore

PINNED_READERS = 2
"""Threads that read for a GPU, where one is as slow as a step of a small head. On a CPU there is one, which
leaves the cores to the step."""
AHEAD = 2
"""Forwards whose rows are in memory; those of one more for each thread are being read."""


class Prefetcher:
    """Reads rows in the order in which training takes them; :meth:`close` ends its threads.

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
        num_threads = 1
        if pin:
            num_threads = PINNED_READERS
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="states")
        self._order = iter(order)
        self._ready: deque[tuple[list[int], Future[Parts | None]]] = deque()
        self._read_ahead(ahead + num_threads)

    def take(self, rows: list[int]) -> Parts | None:
        """The encoded tensors of ``rows``, which must be next in the order; None if the store lacked one of
        them.

        Raises:
            UserError: as :meth:`StateStore.read`. Any other error of a thread is raised here too.
        """
        expected, found = self._ready.popleft()
        assert expected == rows, f"rows {rows} were asked for, {expected} are next"
        parts = found.result()
        self._read_ahead(1)
        return parts

    def close(self) -> None:
        """End the threads and drop the rows that wait."""
        self._threads.shutdown(cancel_futures=True)

    def _read_ahead(self, count: int) -> None:
        read = self.store.read
        if self.pin:
            read = self.store.read_pinned
        for rows in islice(self._order, count):
            self._ready.append((rows, self._threads.submit(read, rows)))
