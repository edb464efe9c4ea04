"""CUDA graphs of functions of fixed shapes: captured once per key, then replayed with new inputs.

A body takes a nest of tensors and returns one; it may change tensors that it closes over (key-value stores,
slots), reads nothing on the host, and runs the same eagerly. Inputs are copied into buffers of the graph,
outputs are buffers too: they are valid until the next replay of any graph, so results are sent to the host at
once (:class:`HostCopy`).
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_kit.config.engine import GraphMode
from eagle_kit.core.errors import first_line
from eagle_kit.distributed.collectives import Ranks

WARM_UPS = 2


class Lengths(NamedTuple):
    """Lengths of all slots, int64, and the rows of the batch, int64 ``[B]``."""

    slots: torch.Tensor
    rows: torch.Tensor

    def read(self) -> list[int]:
        """Lengths of the batch, on the host."""
        numbers: list[int] = self.slots[self.rows].tolist()
        return numbers


class GraphCall(NamedTuple):
    """A run of ``body`` over ``inputs``, eagerly or as a graph.

    Attributes:
        name, key: equal for calls whose bodies do the same and whose inputs have the same shapes.
        inputs: a nest that nobody changes afterwards: the same one is not copied twice in a row.
        idle: makes inputs of those shapes for the capture, whose run changes nothing that matters.
        lengths: of the requests; recordings on a CPU depend on them.
    """

    name: str
    key: Hashable
    body: Callable[[Any], Any]
    inputs: Any
    idle: Callable[[], Any]
    lengths: Lengths | None = None


class CycleGraphs(Protocol):
    """Runs of the parts of a cycle."""

    @property
    def mode(self) -> GraphMode:
        """``"off"`` captures nothing."""

    @property
    def has_fixed_shapes(self) -> bool:
        """True if graphs are made for the longest context and few kinds of batches, not for those at hand."""

    @property
    def num_graphs(self) -> int:
        """Graphs at hand."""

    @property
    def num_warm_ups(self) -> int:
        """Runs that a later one of their kind is faster than: before there is a graph, and making it."""

    def anew(self) -> "CycleGraphs":
        """Return runs of the same kind without graphs, which are made at the first run, and kept."""

    def run(self, call: GraphCall) -> Any:
        """Run a call -> its outputs, which are valid until the next run."""


class CaptureError(RuntimeError):
    """A body cannot be a graph; the message names the operation."""


class HostCopy:
    """Copy of tensors on its way to the host. On a CPU it is complete at once."""

    def __init__(self, tensors: Any) -> None:
        self._tensors = map_tensors(_to_pinned, tensors)
        self._event: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in leaves(tensors)):
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self, ranks: Ranks | None = None) -> Any:
        """Wait for the copy -> the tensors on the host. Raise RankLost where one of ``ranks``, with which the
        device computes, is lost or does not answer in time."""
        if self._event is not None:
            if ranks is None:
                self._event.synchronize()
            else:
                ranks.wait_for(self._event)
        return self._tensors


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Graph:
    """Body captured on a GPU.

    Args:
        body: function of one nest of tensors; at capture it is run several times with ``example``.
        example: inputs that change nothing that matters, such as a batch of dummies.
        pool: of memory, shared by graphs that never run at the same time.
        stream: to capture on; libraries keep a workspace for every stream that they have seen.

    Raises:
        CaptureError: an operation that cannot be captured, by name. The pool is of no use afterwards.
        torch.OutOfMemoryError: the device has too little memory for the body.
    """

    def __init__(
        self,
        body: Callable[[Any], Any],
        example: Any,
        pool: Any = None,
        stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        self.inputs = map_tensors(torch.clone, example)
        self.given: Any = None
        side = stream or torch.cuda.Stream()
        ours = torch.cuda.current_stream()
        side.wait_stream(ours)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                body(self.inputs)
        ours.wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        last = _LastOperation()
        try:
            # Other threads may pin or allocate memory meanwhile, as the prefetch of a store does.
            mode = "thread_local"
            with torch.cuda.graph(self._graph, pool=pool, stream=side, capture_error_mode=mode), last:
                self.outputs = body(self.inputs)
        except Exception as error:
            torch.cuda.set_stream(ours)  # the end of a capture that failed fails too, before it restores it
            first = error.__context__ or error
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None  # no fault of the operation that asked for it
            reason = first_line(first)
            raise CaptureError(f"The operation {last.name} cannot be in a CUDA graph: {reason}") from first

    def replay(self) -> None:
        """Run the body over ``inputs`` into ``outputs``."""
        self._graph.replay()


class GraphRunner:
    """:class:`CycleGraphs` that run eagerly, or as graphs, one for every (name, key)."""

    def __init__(self, mode: GraphMode) -> None:
        self.mode = mode
        self.num_warm_ups = 0
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._graphs: dict[tuple[str, Hashable], Graph] = {}

    @property
    def has_fixed_shapes(self) -> bool:
        """See :class:`CycleGraphs`."""
        return self.mode != "off"

    @property
    def num_graphs(self) -> int:
        """See :class:`CycleGraphs`."""
        return len(self._graphs)

    def anew(self) -> "GraphRunner":
        """See :class:`CycleGraphs`."""
        return type(self)(self.mode)

    def run(self, call: GraphCall) -> Any:
        """See :class:`CycleGraphs`; the lengths are not needed."""
        if self.mode == "off":
            return call.body(call.inputs)
        kind = (call.name, call.key)
        if kind not in self._graphs:
            self._graphs[kind] = self._capture(call)
            self.num_warm_ups += 1
        graph = self._graphs[kind]
        if graph.given is not call.inputs:  # the same batch again is there already
            write(graph.inputs, call.inputs)
            graph.given = call.inputs
        graph.replay()
        return graph.outputs

    def _capture(self, call: GraphCall) -> Graph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = self._stream or torch.cuda.Stream()
        try:
            return Graph(call.body, call.idle(), self._pool, self._stream)
        except (CaptureError, torch.OutOfMemoryError):
            self._pool = None
            raise


class _LastOperation(TorchDispatchMode):
    """Mode that remembers the name of the last operation that began."""

    name = "before the first one"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = str(func)
        return func(*args, **(kwargs or {}))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply ``function`` to every tensor of a nest of tuples, named tuples, dataclasses and other values."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        parts = [map_tensors(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(
            value, **{name: map_tensors(function, getattr(value, name)) for name in names}
        )
    return value


def leaves(value: Any) -> Iterator[torch.Tensor]:
    """List the tensors of a nest, in order."""
    found: list[torch.Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)  # type: ignore[func-returns-value]
    return iter(found)


def write(buffers: Any, values: Any) -> None:
    """Copy every tensor of one nest into the tensor at its place in another."""
    for buffer, value in zip(leaves(buffers), leaves(values), strict=True):
        if buffer is not value:
            buffer.copy_(value, non_blocking=True)
