"""Heartbeat of processes that work together: one whose machine is gone, or that is stopped, is missed by the
others. A connection that is cut breaks collectives at once; a machine without power or network closes none.
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
"""Times that a process is heard from within the time after which it is missed."""
LEFT = "left"
"""What a process says when it has done its work."""


def launched_store(timeout: timedelta) -> dist.Store:
    """Connect once more to the store by which the processes of a launcher have met."""
    environ = os.environ
    address = environ["MASTER_ADDR"]
    port = int(environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(f"heartbeat/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


class Heartbeat:
    """Thread that tells the others, through a store, that this process lives, and watches them.

    Args:
        connect: makes this process' own connection to the store; within the thread, as a store serves one
            call at a time.
        rank, size: number of this process, and of all.
        timeout_s: seconds of silence after which a process, or the store, is missed.
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
        self._answered = time.monotonic()
        self._heard = dict.fromkeys(range(size), ("", self._answered))
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._beat, self._watch)]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # a thread within the store would abort the process

    def leave(self) -> None:
        """Say that this process has done its work, so that nobody misses it, and watch no more."""
        self._is_done = True
        self.close()

    def close(self) -> None:
        """Watch no more. The others miss this process, unless it has said before that it leaves."""
        self._has_ended.set()
        self._threads[0].join(self._timeout_s)
        atexit.unregister(self.close)

    def _beat(self) -> None:
        """Write and read what is new, until the end. An error of the store is silence: it is missed then."""
        every = self._timeout_s / BEATS
        store: dist.Store | None = None
        number = 0
        while True:
            if (is_last := self._has_ended.is_set()) and (store is None or not self._is_done):
                return
            try:
                store = store or self._connect(timedelta(seconds=every))
                store.set(f"{self._rank}", LEFT if is_last else f"{number}")
                for rank in range(0 if is_last else self._size):
                    self._hear(rank, store.get(f"{rank}").decode() if store.check([f"{rank}"]) else "")
                self._answered = time.monotonic()
            except (RuntimeError, ValueError):
                store = None
            if is_last:
                return
            number += 1
            self._has_ended.wait(every)

    def _hear(self, rank: int, said: str) -> None:
        before, _ = self._heard[rank]
        if said != before or said == LEFT:
            self._heard[rank] = said, time.monotonic()

    def _watch(self) -> None:
        """Find out who is missing, also while a call of the store hangs."""
        every = min(1.0, self._timeout_s / BEATS)
        while not self._has_ended.wait(every):
            now = time.monotonic()
            limit = self._timeout_s
            silent = [rank for rank, (_, last) in self._heard.items() if now - last > limit]
            if now - self._answered > limit:
                self._on_missing(f"The store of the first machine has not answered for {in_seconds(limit)}.")
            elif silent := [rank for rank in silent if rank != self._rank]:
                self._on_missing(
                    f"Process {silent[0]} of {self._size} has not been heard from for {in_seconds(limit)}."
                )
            else:
                continue
            return
