"""Heartbeat of processes that work together: each notices when another has stopped or its machine is gone.

Collectives notice a closed connection at once, but a machine without power or network closes none.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from eagle_kit.core.errors import in_seconds

BEATS = 6
"""Heartbeats within the time after which a process counts as missing."""
LEFT = "left"
"""Last heartbeat of a process that has done its work."""


def launched_store(timeout: timedelta) -> dist.Store:
    """Open another connection to the store of the launcher, by which its processes have met."""
    environ = os.environ
    address = environ["MASTER_ADDR"]
    port = int(environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(f"heartbeat/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


class Heartbeat:
    """Threads that write this process' heartbeat to a store and watch those of the others.

    Args:
        connect: opens this process' own connection to the store; called in the thread, since a connection
            serves one call at a time.
        rank, size: number of this process, and number of processes.
        timeout_s: seconds without a heartbeat after which a process counts as missing, and without an answer
            after which the store does.
        on_missing: called once, in a thread, with a sentence.
    """

    def __init__(
        self,
        connect: Callable[[timedelta], dist.Store],
        rank: int,
        size: int,
        timeout_s: float,
        on_missing: Callable[[str], None],
    ) -> None:
        self._connect = connect
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._on_missing = on_missing
        self._has_ended = threading.Event()
        self._is_done = False
        self._answered = time.monotonic()  # last time that the store has answered
        self._heard = dict.fromkeys(range(size), ("", self._answered))  # last heartbeat of each process
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._beat, self._watch)]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # a thread within the store would abort the process

    def leave(self) -> None:
        """Announce that this process has done its work, so that it does not count as missing, and stop."""
        self._is_done = True
        self.close()

    def close(self) -> None:
        """Stop. This process then counts as missing for the others, unless :meth:`leave` was called."""
        self._has_ended.set()
        self._threads[0].join(self._timeout_s)
        atexit.unregister(self.close)

    def _beat(self) -> None:
        """Write this process' heartbeat and read the others', until the end. After an error of the store the
        connection is opened again at the next beat."""
        interval_s = self._timeout_s / BEATS
        store: dist.Store | None = None
        number = 0
        while True:
            # The last beat is the announcement of a process that leaves.
            is_last = self._has_ended.is_set()
            if is_last and (store is None or not self._is_done):
                return
            try:
                store = store or self._connect(timedelta(seconds=interval_s))
                store.set(f"{self._rank}", LEFT if is_last else f"{number}")
                if not is_last:
                    self._read(store)
                self._answered = time.monotonic()
            except (RuntimeError, ValueError):
                store = None
            if is_last:
                return
            number += 1
            self._has_ended.wait(interval_s)

    def _read(self, store: dist.Store) -> None:
        """Read the heartbeats of all processes and note the time of those that are new."""
        for rank in range(self._size):
            beat = store.get(f"{rank}").decode() if store.check([f"{rank}"]) else ""
            last_beat, _ = self._heard[rank]
            if beat != last_beat or beat == LEFT:
                self._heard[rank] = (beat, time.monotonic())

    def _watch(self) -> None:
        """Report the first process that is missing, also while a call of the store hangs."""
        interval_s = min(1.0, self._timeout_s / BEATS)
        timeout = in_seconds(self._timeout_s)
        while not self._has_ended.wait(interval_s):
            oldest = time.monotonic() - self._timeout_s
            if self._answered < oldest:
                self._on_missing(f"The store of the first machine has not answered for {timeout}.")
                return
            for rank, (_, last_time) in self._heard.items():
                if rank != self._rank and last_time < oldest:
                    self._on_missing(f"Process {rank} of {self._size} has not been heard from for {timeout}.")
                    return
