"""Computations in the queues of streams, in place of the kernels that the device does not run.

A computation is a function without arguments that reads and writes tensors of the host over the bytes of
tensors of the device. It is enqueued in a stream: the runtime runs it in the stream's order, or keeps its
number as a node of the graph that the stream captures and runs it at every replay.
"""

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, NamedTuple

import torch

runtime = ctypes.CDLL(None)
runtime.device_enqueue_computation.argtypes = [ctypes.c_void_p, ctypes.c_long]
runtime.device_is_allocated.argtypes = [ctypes.c_void_p]
runtime.device_is_allocated.restype = ctypes.c_bool


class Computation(NamedTuple):
    """What is to run, under the name of its operation, and the addresses of the storages that it uses."""

    name: str
    run: Callable[[], None]
    addresses: tuple[int, ...]


class _ThreadState(threading.local):
    """True while this thread computes, or runs a kernel of torch that is part of a computation."""

    is_inside = False


state = _ThreadState()
num_by_name: Counter[str] = Counter()
"""Computations that were enqueued."""
_numbers = itertools.count(1)
_computations: dict[int, Computation] = {}
_errors: list[BaseException] = []


class BelowAutograd:
    """Within is the work of a kernel: no autograd, no modes of Python, no computations of computations."""

    def __enter__(self) -> None:
        self._guards: list[Any] = [torch._C._AutoDispatchBelowAutograd(), torch._C.DisableTorchFunction()]
        self._was_inside = state.is_inside
        state.is_inside = True
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(kind, error, trace)
        state.is_inside = self._was_inside


class Covered:
    """Launches, copies and fills within are part of a computation.

    The runtime checks and counts them, and does nothing else.
    """

    def __enter__(self) -> None:
        self._was_inside = state.is_inside
        state.is_inside = True
        runtime.device_cover(1)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        runtime.device_cover(-1)
        state.is_inside = self._was_inside


class HostViews:
    """Tensors of the host over the bytes of tensors of the device.

    Views of one storage of the device share one storage here.

    A captured node keeps no memory alive, as a graph does not. Tensors of the host are copied into it, as a
    launch copies its arguments; pinned memory of copies is read where it lies, at every replay.

    Args:
        is_capturing: the tensors are for a node of a graph.
        is_copy: the operation is a copy.
    """

    def __init__(self, is_capturing: bool, is_copy: bool = False) -> None:
        self.is_capturing = is_capturing
        self.is_copy = is_copy
        self.storages: dict[int, torch.UntypedStorage] = {}

    def of(self, value: Any) -> Any:
        """Replace the tensors of an argument, a list of them, and a device."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.of(part) for part in value)
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_cuda:
            return self._over_bytes(value)
        if not self.is_capturing:
            return value
        return self._over_bytes(value) if self.is_copy and value.is_pinned() else value.clone()

    def _over_bytes(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address:  # no elements
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if address not in self.storages:
            self.storages[address] = torch._C._construct_storage_from_data_pointer(
                address, torch.device("cpu"), storage.nbytes()
            )
        view = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return view.set_(self.storages[address], tensor.storage_offset(), tensor.shape, tensor.stride())


def enqueue(name: str, run: Callable[[], None], addresses: Iterable[int]) -> None:
    """Enqueue a computation in the current stream; raise what it raises if it has run."""
    number = next(_numbers)
    _computations[number] = Computation(name, run, tuple(addresses))
    num_by_name[name] += 1
    stream = torch.cuda.current_stream().cuda_stream
    runtime.device_enqueue_computation(stream, number)
    raise_errors()


def raise_errors() -> None:
    """Raise the first error of the computations that ran since the last time: it cannot pass through C."""
    if _errors:
        error = _errors[0]
        _errors.clear()
        raise error


@ctypes.CFUNCTYPE(None, ctypes.c_long)
def _compute(number: int) -> None:
    """Run a computation for the runtime; the computations behind one that failed are left out."""
    if _errors:
        return
    try:
        computation = _computations[number]
        for address in computation.addresses:
            if not runtime.device_is_allocated(address):
                raise RuntimeError(
                    f"{computation.name}: an illegal memory access, in memory that was given back"
                )
        with BelowAutograd():
            computation.run()
    except BaseException as error:
        _errors.append(error)


@ctypes.CFUNCTYPE(None, ctypes.c_long)
def _forget(number: int) -> None:
    """Drop a computation that neither a queue nor a graph has any more."""
    _computations.pop(number, None)


def start() -> None:
    """Let the runtime call the computations, and replays raise their errors."""
    runtime.device_compute_by(_compute, _forget)
    replay = torch.cuda.CUDAGraph.replay

    def checked(graph: torch.cuda.CUDAGraph) -> None:
        replay(graph)
        raise_errors()

    torch.cuda.CUDAGraph.replay = checked  # type: ignore[method-assign]
