"""Collectives of processes that share a model by tensor parallelism, and messages of rank 0 to the others.

Tensors go over ``gloo`` on a CPU. On GPUs, small sums in bf16 and fp32 use torch's one-shot all-reduce over
symmetric memory where all ranks have it; all other collectives are NCCL's. On a CPU each collective is one
custom op, so that recorded cycles contain it (:mod:`~eagle_kit.ops.cpu.guards`).

Legend: R ranks.
"""

import contextlib
import itertools
import logging
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from eagle_kit.core.errors import RankLost, in_seconds
from eagle_kit.ops.cpu.guards import library

FOREVER = timedelta(days=365)
START_TIMEOUT = timedelta(minutes=30)
"""Default time for all ranks to start and to load their part of the model; some may read more slowly than
others."""
SPIN_S = 200e-6
"""Seconds for which an event of the device is polled without sleep, so that short waits end at once."""
POLL_S = 20e-6
"""Seconds of sleep between two polls after that; the system adds its own, on Linux some 50 microseconds."""
CLOSE_S = 5.0
"""Seconds to leave a group with a lost rank: work on a GPU may wait for that rank for ever."""
INLINE_BYTES = 1024
"""Size of the first buffer of a message. A short message is sent in it."""
ONE_SHOT_BYTES = 256 * 1024
"""Largest sum by the one-shot all-reduce, in which every rank reads all of every rank; NCCL takes larger
ones."""
ONE_SHOT_DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes that the one-shot all-reduce takes."""

OWN_ERRORS = (torch.AcceleratorError, torch.OutOfMemoryError)
"""Errors of a rank's own device: they do not mean that another rank is lost."""

_numbers = itertools.count()
_ranks: "WeakValueDictionary[int, Ranks]" = WeakValueDictionary()


class Share(NamedTuple):
    """The part of rank ``rank`` of ``size``."""

    rank: int
    size: int

    def of(self, count: int) -> range:
        """Indices of this rank among ``count``: contiguous, of nearly equal number on every rank."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)


class Ranks:
    """This process among those that share a model. All of them make the same calls in the same order.

    Args:
        rank, size: number of this process, and number of processes.
        device: of the tensors.
        timeout_s: seconds after which a process that does not answer counts as lost.
        start_timeout: time by which processes may call :meth:`all` apart.

    Attributes:
        volume: bytes that this rank has given to collectives, by kind (``sum``, ``stack``, ``first``); only
            calls from Python count, not replays of CUDA graphs.
        lost: why the group cannot be used any more; None while it can.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        start_timeout: timedelta = START_TIMEOUT,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout_s = timeout_s
        self.start_timeout = start_timeout
        self.volume: Counter[str] = Counter()
        self.lost: str | None = None

        # Groups for tensors, for messages of rank 0, and for calls to which ranks may come late.
        timeout = timedelta(seconds=timeout_s)
        self._data = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        # The others wait for a message of rank 0 for as long as it takes: there may be none for days.
        self._control = dist.new_group(backend="gloo", timeout=FOREVER if rank else timeout)
        self._slow = dist.new_group(backend="gloo", timeout=start_timeout)
        self._one_shot_buffers = self._make_buffers() if device.type == "cuda" else {}
        self.number = next(_numbers)
        _ranks[self.number] = self

    @property
    def is_first(self) -> bool:
        """True for rank 0, which takes requests and whose choices all ranks follow."""
        return self.rank == 0

    @property
    def share(self) -> Share:
        """This rank's part of what is divided among all."""
        return Share(self.rank, self.size)

    # Collectives of tensors.

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of every rank's ``x``, which may hold the sum afterwards."""
        return self._on_device("all_sum", x)

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's ``x``, ``[R, *x.shape]``."""
        return self._on_device("all_stack", x)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of the first rank."""
        return self._on_device("of_first", x)

    def join(self, x: torch.Tensor, count: int, dim: int = -1) -> torch.Tensor:
        """Concatenate every rank's part ``x`` of ``count`` along ``dim``."""
        dim %= x.ndim
        widths = [len(Share(rank, self.size).of(count)) for rank in range(self.size)]

        # Rows of equally many on every rank are concatenated already.
        if dim == 0 and min(widths) == max(widths):
            return self.stack(x).flatten(0, 1)

        # Otherwise every part is padded to the widest one, and cut to its width afterwards.
        padding = [0, 0] * (x.ndim - 1 - dim) + [0, max(widths) - x.shape[dim]]
        parts = self.stack(torch.nn.functional.pad(x, padding)).unbind(0)
        return torch.cat([part.narrow(dim, 0, width) for part, width in zip(parts, widths, strict=True)], dim)

    def _on_device(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cpu":
            result: torch.Tensor = getattr(torch.ops.eagle_kit_cpu, name)(x, self.number)
            return result
        return COLLECTIVES[name](self, x)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        if x.nbytes <= ONE_SHOT_BYTES and x.dtype in self._one_shot_buffers:
            return self._one_shot(x)
        # On a GPU a sum of a prompt is hundreds of megabytes, so it is computed in place.
        total = x.contiguous() if x.is_cuda else x.clone(memory_format=torch.contiguous_format)
        self._run("sum", x, lambda: dist.all_reduce(total, group=self._data))
        return total

    def _one_shot(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over symmetric memory."""
        buffer = self._one_shot_buffers[x.dtype][: x.numel()]
        buffer.copy_(x.reshape(-1))
        self.volume["sum"] += x.nbytes
        total: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", self._data.group_name)
        return total.view(x.shape)

    def _make_buffers(self) -> dict[torch.dtype, torch.Tensor]:
        """Make the buffers of the one-shot all-reduce on all ranks. None are made if one rank has an older
        torch, or if GPUs cannot read each other's memory."""
        from torch.distributed import _symmetric_memory as symmetric

        buffers: dict[torch.dtype, torch.Tensor] = {}

        def allocate() -> None:
            for dtype in ONE_SHOT_DTYPES:
                count = ONE_SHOT_BYTES // dtype.itemsize
                buffers[dtype] = symmetric.empty(count, dtype=dtype, device=self.device)

        def exchange() -> None:
            for buffer in buffers.values():
                symmetric.rendezvous(buffer, self._data.group_name)

        if not all(self.all(hasattr(torch.ops.symm_mem, "one_shot_all_reduce"))):
            return {}
        if self._can_all(allocate) and self._can_all(exchange):
            return buffers
        return {}

    def _can_all(self, work: Callable[[], None]) -> bool:
        """Call ``work``; return whether it succeeded on every rank."""
        try:
            work()
        except RuntimeError as error:
            logging.getLogger(__name__).info("No one-shot all-reduce: %s", error)
            return all(self.all(False))
        return all(self.all(True))

    def _stack(self, x: torch.Tensor) -> torch.Tensor:
        stacked = x.new_empty(self.size, *x.shape)
        parts = list(stacked.unbind(0))
        self._run("stack", x, lambda: dist.all_gather(parts, x.contiguous(), group=self._data))
        return stacked

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        received = x.clone(memory_format=torch.contiguous_format)
        self._run("first", x, lambda: dist.broadcast(received, 0, group=self._data))
        return received

    def _run(self, kind: str, x: torch.Tensor, collective: Callable[[], Any]) -> None:
        """Call a collective of ``x``, counted as ``kind``."""
        self.volume[kind] += x.nbytes
        with self._watched():
            collective()

    def wait_for(self, event: "torch.cuda.Event") -> None:
        """Wait for work on the device that may itself wait for another rank.

        Raises:
            RankLost: the work was not done in time, or a rank is lost.
        """
        start = time.monotonic()
        while not event.query():
            waited = time.monotonic() - start
            if waited > self.timeout_s:
                self.lose(_timeout_message(self.timeout_s))
            if self.lost is not None:
                raise RankLost(self.lost)
            if waited >= SPIN_S:
                time.sleep(POLL_S)

    # Messages between hosts, which are pickled.

    def broadcast(self, message: Any) -> None:
        """Send a message from rank 0 to all others, which :meth:`receive` it."""
        assert self.is_first
        self._broadcast(message)

    def receive(self) -> Any:
        """Wait for the next message of rank 0, for as long as it takes."""
        assert not self.is_first
        return self._broadcast(None)

    def agree(self, value: Any) -> Any:
        """``value`` of rank 0; every rank calls it."""
        return self._broadcast(value)

    def all(self, value: Any) -> list[Any]:
        """``value`` of every rank; ranks may call it up to ``start_timeout`` apart."""
        values: list[Any] = [None] * self.size
        with self._watched(self.start_timeout.total_seconds()):
            dist.all_gather_object(values, value, group=self._slow)
        return values

    def together(self, work: Callable[[], Any]) -> Any:
        """Call ``work`` on every rank and return its result. If one fails, every rank raises an error: its
        own, or that of the first rank that failed."""
        result: Any = None
        own_error: Exception | None = None
        try:
            result = work()
        except Exception as raised:  # it is raised below
            own_error = raised
        errors = self.all(_portable(own_error))
        if own_error is not None:
            raise own_error
        for error in errors:
            if error is not None:
                raise error
        return result

    def _broadcast(self, message: Any) -> Any:
        """Send ``message`` of rank 0 -> the message, on every rank."""
        # The first buffer has the number of bytes, and as many of them as fit.
        buffer = torch.zeros(INLINE_BYTES, dtype=torch.uint8)
        body = b""
        if self.is_first:
            body = pickle.dumps(message)
            head = len(body).to_bytes(8, "little") + body[: INLINE_BYTES - 8]
            buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        with self._watched():
            dist.broadcast(buffer, 0, group=self._control)
        head = buffer.numpy().tobytes()
        count = int.from_bytes(head[:8], "little")
        received = head[8 : 8 + count]

        # A longer message is sent again, in a buffer of its size.
        if count > INLINE_BYTES - 8:
            whole = torch.frombuffer(bytearray(body or bytes(count)), dtype=torch.uint8)
            with self._watched():
                dist.broadcast(whole, 0, group=self._control)
            received = whole.numpy().tobytes()
        return message if self.is_first else pickle.loads(received)

    @contextmanager
    def _watched(self, timeout_s: float | None = None) -> Iterator[None]:
        """Raise RankLost in place of the errors of a collective, except those of this rank's own device.

        Args:
            timeout_s: of the collective; default that of the ranks.
        """
        if self.lost is not None:
            raise RankLost(self.lost)
        try:
            yield
        except OWN_ERRORS:
            raise
        except (RuntimeError, ValueError) as error:
            text = str(error).lower()
            if "timed out" in text or "timeout" in text:
                self.lose(_timeout_message(timeout_s or self.timeout_s))
            else:
                self.lose("A rank has ended.")
            raise RankLost(self.lost) from error

    def lose(self, why: str) -> None:
        """Mark the group as lost: every call from now on raises RankLost with this reason, also one that
        waits for the device. The first reason stays. Any thread may call it."""
        self.lost = self.lost or why

    def give_up(self, why: str) -> None:
        """Leave the other ranks, whose wait for a message then fails. Every call from now on raises RankLost
        with this reason."""
        self.lost = why
        with contextlib.suppress(Exception):  # of a group that is broken already
            dist.destroy_process_group(self._control)

    def close(self) -> None:
        """Leave the group; collectives of other ranks that wait for this one then fail."""
        was_lost = self.lost is not None
        self.lose("The group was closed.")
        for name in ("_data", "_control", "_slow"):  # a connection ends with the last reference to its group
            vars(self).pop(name, None)
        if not was_lost:
            _destroy()
            return

        # A lost rank may block the end of the group.
        leaving = threading.Thread(target=_destroy, daemon=True)
        leaving.start()
        leaving.join(CLOSE_S)


def _destroy() -> None:
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def _timeout_message(timeout_s: float) -> str:
    return f"A rank has not answered for {in_seconds(timeout_s)}."


def _portable(error: Exception | None) -> Exception | None:
    """The error, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # a class may raise anything here
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def connect(
    rank: int,
    size: int,
    device: torch.device,
    timeout_s: float,
    address: str | None = None,
    meeting: timedelta | None = None,
    start_timeout: timedelta = START_TIMEOUT,
) -> Ranks:
    """Join the other processes.

    Args:
        rank, size, device, timeout_s, start_timeout: of :class:`Ranks`.
        address: such as ``tcp://127.0.0.1:29500``; default that of the environment that ``torchrun`` sets.
        meeting: time within which all processes must have joined; None is ``start_timeout``.
    """
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo",
            init_method=address or "env://",
            rank=rank,
            world_size=size,
            timeout=meeting or start_timeout,
        )
    return Ranks(rank, size, device, timeout_s, start_timeout)


COLLECTIVES = {"all_sum": Ranks._sum, "all_stack": Ranks._stack, "of_first": Ranks._first}


def _op(collective: Callable[[Ranks, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, number: collective(_ranks[number], x)


for _name, _collective in COLLECTIVES.items():
    library.define(f"{_name}(Tensor x, int ranks) -> Tensor")
    library.impl(_name, _op(_collective), "CPU")
