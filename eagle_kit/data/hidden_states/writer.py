"""Addition of rows to a store while the next ones are computed on a GPU.

The states of a row are copied into pinned memory in a stream of their own. A thread waits for the copy, and
checks, hashes and writes. On a CPU, which computes meanwhile with all of its cores, rows are added directly.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from eagle_kit.data.hidden_states.format import check_finite, encode, finite_flags, names_of_dtypes
from eagle_kit.data.hidden_states.store import StateStore

NUM_BUFFERS = 2
"""Pinned buffers: one is filled while the other is written."""
ALIGNMENT = 256
"""Bytes to which the tensors of a buffer are aligned."""
FLAG = "finite."
"""Prefix of the names of :func:`finite_flags` in a buffer."""

Add = Callable[[Sequence[int], Sequence[int], dict[str, torch.Tensor]], object]
"""Function of row numbers, their lengths and their tensors, see :meth:`StateStore.add`."""


@contextmanager
def writing(store: StateStore, device: torch.device) -> Iterator[Add]:
    """Context whose function adds rows to ``store``. At its end everything is written.

    An error within drops the rows of the unfinished shard.

    Args:
        device: device of the states.

    Raises:
        UserError: see :meth:`StateStore.add`; also raised by the function for rows that it was given before.
    """
    if device.type != "cuda":
        yield store.add
        store.flush()
        return

    writer = StateWriter(store, device)
    try:
        yield writer.add
        writer.finish()
    finally:
        writer.close()


class _Buffer:
    """Pinned memory for the tensors of a row; it grows to the largest row.

    Attributes:
        memory: uint8.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def views(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors in this memory with the shapes and dtypes of ``tensors``. Earlier ones become invalid."""
        offsets = {}
        size = 0
        for name, tensor in tensors.items():
            offsets[name] = size
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if size > len(self.memory):
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)

        views = {}
        for name, tensor in tensors.items():
            part = self.memory[offsets[name] : offsets[name] + tensor.nbytes]
            views[name] = part.view(tensor.dtype).view(tensor.shape)
        return views


class _Row(NamedTuple):
    """A row whose copy was started.

    Attributes:
        rows, lengths, dtypes: see :meth:`StateStore.add_encoded`.
        copies: encoded tensors and flags in ``buffer``.
        sources: the same on the device, whose memory must stay until they are copied.
        copied: event behind the copies.
        buffer: buffer that is free again when the row was read from it.
    """

    rows: Sequence[int]
    lengths: Sequence[int]
    dtypes: dict[str, str]
    copies: dict[str, torch.Tensor]
    sources: dict[str, torch.Tensor]
    copied: torch.cuda.Event
    buffer: _Buffer


class StateWriter:
    """Adds rows of states on a GPU to a store, which only this writer may use until :meth:`finish`.

    :meth:`close` must be called at the end.

    Args:
        store: the store.
        device: device of the states.
    """

    def __init__(self, store: StateStore, device: torch.device) -> None:
        self.store = store
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._free: queue.Queue[_Buffer] = queue.Queue()
        for _ in range(NUM_BUFFERS):
            self._free.put(_Buffer())
        # There are never more rows in the queue than buffers. None ends the thread.
        self._rows: queue.Queue[_Row | None] = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="states", daemon=True)
        self._thread.start()

    def add(self, rows: Sequence[int], lengths: Sequence[int], tensors: dict[str, torch.Tensor]) -> None:
        """Start to add rows, see :meth:`StateStore.add`. Waits while both buffers are in use.

        Raises:
            UserError: an earlier row could not be added.
        """
        buffer = self._free.get()
        self._raise_error()

        # Encode them in the stream that computed them.
        encoded = encode(tensors, self.store.format, self.store.manifest["hidden_size"])
        flags = finite_flags(tensors)
        sources = encoded | {FLAG + name: flag for name, flag in flags.items()}

        # Copy them in a stream of their own. A later row may be computed meanwhile.
        copies = buffer.views(sources)
        copied = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for name, source in sources.items():
                copies[name].copy_(source, non_blocking=True)
            copied.record()
        dtypes = names_of_dtypes(tensors)
        self._rows.put(_Row(rows, lengths, dtypes, copies, sources, copied, buffer))

    def finish(self) -> None:
        """Wait until all rows are added, and write the rows of the unfinished shard. Raises UserError as
        :meth:`add` does."""
        self.close()
        self._raise_error()
        self.store.flush()

    def close(self) -> None:
        """End the thread when all rows are added. Rows of the unfinished shard are not written."""
        self._rows.put(None)
        self._thread.join()

    def _raise_error(self) -> None:
        """Raise the error of the thread."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        """Body of the thread: add rows in their order. Behind an error they are dropped."""
        while True:
            row = self._rows.get()
            if row is None:
                return
            try:
                copies = self._take(row)
                if self._error is None:
                    self._add(row, copies)
            except BaseException as error:  # raised in the thread that computes
                self._error = error

    def _take(self, row: _Row) -> dict[str, torch.Tensor]:
        """Wait for the copies of a row, and take them out of its buffer, which is free then."""
        try:
            row.copied.synchronize()
            row.sources.clear()
            return {name: copy.clone() for name, copy in row.copies.items()}
        finally:
            self._free.put(row.buffer)

    def _add(self, row: _Row, copies: dict[str, torch.Tensor]) -> None:
        """Add a row to the store. Raises UserError as :meth:`StateStore.add`."""
        encoded = {name: copy for name, copy in copies.items() if not name.startswith(FLAG)}
        flags = {name.removeprefix(FLAG): copy for name, copy in copies.items() if name.startswith(FLAG)}
        check_finite(flags, row.dtypes)
        self.store.add_encoded(row.rows, row.lengths, encoded, row.dtypes)
