"""CUDA graphs of functions of fixed shapes: captured once per key, then replayed with new inputs.

A body takes a nest of tensors and returns one (tuples, named tuples, dataclasses). It may change tensors that
it closes over, such as stores and slots, and reads no tensor on the host. A replay copies its inputs into
buffers of the graph. Its outputs are buffers too, valid until the next replay of any graph, so results are
sent to the host at once (:class:`HostCopy`).
"""

import dataclasses
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_kit.config.engine import GraphMode
from eagle_kit.core.errors import first_line
from eagle_kit.core.switches import VARIABLE
from eagle_kit.distributed.collectives import Ranks
from eagle_kit.ops.device_memory import clear_frames, out_of_memory_cause

WARM_UPS = 2
"""Eager runs of a body before its capture, in which libraries make their workspaces."""


class Lengths(NamedTuple):
    """Lengths of the requests of a batch, on the device.

    Attributes:
        seq_lens: int64 ``[M + 1]``, the lengths of all slots.
        slot_ids: int64 ``[B]``, the slots of the batch.
    """

    seq_lens: torch.Tensor
    slot_ids: torch.Tensor

    def read(self) -> list[int]:
        """Read the lengths of the batch on the host."""
        lengths: list[int] = self.seq_lens[self.slot_ids].tolist()
        return lengths


class GraphCall(NamedTuple):
    """Call of ``body(inputs)``, to be run eagerly or as a graph.

    Attributes:
        name, key: equal for calls whose bodies run the same operations on inputs of the same shapes.
        body: the function to run.
        inputs: a nest of tensors that is not changed afterwards. If the next call has the same object as its
            inputs, they are not copied again.
        idle: makes inputs of the same shapes for the capture. A run over them must change nothing that
            matters: they are dummies.
        lengths: lengths of the requests, which the choices of a recording on a CPU depend on.
        may_capture: False runs the body eagerly if it has no graph yet.
    """

    name: str
    key: Hashable
    body: Callable[[Any], Any]
    inputs: Any
    idle: Callable[[], Any]
    lengths: Lengths | None = None
    may_capture: bool = True


class CycleGraphs(Protocol):
    """Run the functions of a cycle, eagerly or as graphs: CUDA graphs on a GPU, recordings on a CPU."""

    @property
    def mode(self) -> GraphMode:
        """``"off"`` captures nothing."""

    @property
    def has_fixed_shapes(self) -> bool:
        """True if a graph serves the longest context and one of a few kinds of batches, as CUDA graphs do."""

    @property
    def num_graphs(self) -> int:
        """Number of graphs that have been made and not dropped."""

    @property
    def num_warm_ups(self) -> int:
        """Number of runs in which a graph was made or prepared: eager runs before it, and captures that
        succeed or fail. Runs of a body that has no graph for good do not count."""

    @property
    def num_out_of_memory(self) -> int:
        """Number of captures that failed for lack of memory."""

    @property
    def node_bytes(self) -> int:
        """Device memory that the driver took for the graphs, outside of torch's allocator."""

    @property
    def num_captures(self) -> int:
        """Number of graphs that have been made, dropped ones included."""

    @property
    def num_eager_runs(self) -> int:
        """Number of runs of bodies that have no graph for good, while others have one."""

    def new_empty(self) -> "CycleGraphs":
        """Return an object of the same class without graphs. It makes one at the first run of each kind."""

    def run(self, call: GraphCall) -> Any:
        """Run a call, and return its outputs, which are valid until the next run."""


class CaptureError(RuntimeError):
    """A body cannot be a graph.

    Args:
        message: names the operation.
        operation: name of the operation; a recording on a CPU, whose message is not shown, gives none.
    """

    def __init__(self, message: str, operation: str = "") -> None:
        super().__init__(message)
        self.operation = operation


class CaptureFailure(NamedTuple):
    """Why a capture failed.

    Attributes:
        operation: name of the operation that cannot be captured; None if memory was missing.
        reason: one sentence.
    """

    operation: str | None
    reason: str


class HostCopy:
    """Asynchronous copy of a nest of tensors to the host. On a CPU it is complete at once."""

    def __init__(self, tensors: Any) -> None:
        self._tensors = map_tensors(_to_pinned, tensors)
        self._event: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in leaves(tensors)):
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self, ranks: Ranks | None = None) -> Any:
        """Wait for the copy, and return the tensors on the host.

        Args:
            ranks: processes whose collectives the device waits for.

        Raises:
            RankLost: one of ``ranks`` is lost or does not answer in time.
        """
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
    """CUDA graph of a body.

    Args:
        body: function of one nest of tensors. The constructor runs it several times with ``example``.
        example: inputs for the capture. A run over them changes nothing that matters: they are dummies.
        pool: memory pool, shared by graphs that never run at the same time.
        stream: stream to capture on. Libraries keep a workspace for every stream that they have seen.

    Attributes:
        inputs: buffers of the inputs.
        outputs: buffers of the outputs.
        last_inputs: inputs that were copied into the buffers last; None before the first replay.
        node_bytes: device memory that the driver took for the graph, outside of torch's allocator.

    Raises:
        CaptureError: an operation cannot be captured; the message names it.
        torch.OutOfMemoryError: the device has too little memory for the body or for the graph.

    After an error the current stream is as before.
    """

    def __init__(
        self,
        body: Callable[[Any], Any],
        example: Any,
        pool: Any = None,
        stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        self.inputs = map_tensors(torch.clone, example)
        self.last_inputs: Any = None
        pool = pool or torch.cuda.graph_pool_handle()

        # Run the body eagerly, on the stream of the capture.
        side = stream or torch.cuda.Stream()
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                body(self.inputs)
        current.wait_stream(side)
        torch.cuda.synchronize()

        # Capture it. The mode remembers the operation that an error comes from.
        before = _driver_bytes()
        self._graph = torch.cuda.CUDAGraph()
        last = _LastOperation()
        try:
            # Other threads may pin or allocate memory meanwhile, as the prefetch of a store does.
            mode = "thread_local"
            with torch.cuda.graph(self._graph, pool=pool, stream=side, capture_error_mode=mode), last:
                self.outputs = body(self.inputs)
        except Exception as error:
            # The context manager of a failed capture raises again, before it restores the stream.
            torch.cuda.set_stream(current)
            _leave_capture(self._graph, pool)
            first = error.__context__ or error
            reason = first_line(first)
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None  # no operation is at fault
            if "out of memory" in reason:  # the driver has no room for the graph
                raise torch.OutOfMemoryError(reason) from None
            text = f"The operation {last.name} cannot be in a CUDA graph: {reason.rstrip('.')}."
            raise CaptureError(text, last.name) from first
        self.node_bytes = max(0, _driver_bytes() - before)

    def replay(self) -> None:
        """Run the body over ``inputs`` into ``outputs``."""
        self._graph.replay()


def _driver_bytes() -> int:
    """Bytes of the current GPU that are taken, but not by torch's allocator."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _leave_capture(graph: "torch.cuda.CUDAGraph", pool: Any) -> None:
    """Give up the use of a pool by a capture that the driver refused to end.

    Which of it torch does by itself depends on its version.
    """
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # torch has closed the pool for this capture
        torch._C._cuda_endAllocateToPool(device, pool)
    try:
        graph.pool()
    except RuntimeError:  # the graph will not release a pool that it has not got
        torch._C._cuda_releasePool(device, pool)


def _can_capture(pool: Any, stream: "torch.cuda.Stream") -> bool:
    """Return whether graphs can be captured in ``pool``, by capturing one.

    Behind a failed capture, torch's generator of random numbers raises errors in some versions until a
    capture has ended well.
    """
    current = torch.cuda.current_stream()
    number = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            number.zero_()
    except RuntimeError:
        torch.cuda.set_stream(current)
        return False
    return True


class GraphRunner:
    """:class:`CycleGraphs` that run eagerly, or as CUDA graphs, one for every (name, key).

    A capture that fails is reported once for each operation, and its (name, key) runs eagerly from then on.

    Args:
        mode: ``"off"`` runs everything eagerly.
        ranks: processes that make the same runs. A capture that fails on one of them counts as failed on all.

    Attributes:
        node_bytes: device memory that the driver took for the graphs; of ranks, on that which needed most.
        num_captures: number of graphs that have been made, dropped ones included.
        num_eager_runs: number of runs of calls that have no graph for good.
        num_out_of_memory: number of captures that failed for lack of memory.
    """

    def __init__(self, mode: GraphMode, ranks: Ranks | None = None) -> None:
        self.mode = mode
        self.num_warm_ups = 0
        self.num_captures = 0
        self.num_eager_runs = 0
        self.node_bytes = 0
        self.num_out_of_memory = 0
        self._ranks = ranks
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._graphs: dict[tuple[str, Hashable], Graph] = {}

        # Calls that run eagerly for good, and operations that were reported; None stands for memory.
        self._refused: set[tuple[str, Hashable]] = set()
        self._reported: set[str | None] = set()

    @property
    def has_fixed_shapes(self) -> bool:
        """See :class:`CycleGraphs`."""
        return self.mode != "off"

    @property
    def num_graphs(self) -> int:
        """See :class:`CycleGraphs`."""
        return len(self._graphs)

    def new_empty(self) -> "GraphRunner":
        """See :class:`CycleGraphs`."""
        made = type(self)(self.mode)
        made._ranks = self._ranks
        made._reported = self._reported
        return made

    def run(self, call: GraphCall) -> Any:
        """See :class:`CycleGraphs`; the lengths are not needed."""
        if self.mode == "off":
            return call.body(call.inputs)
        key = (call.name, call.key)
        graph = self._graphs.get(key)
        if graph is None and call.may_capture and key not in self._refused:
            graph = self._add(key, call)
        if graph is None:
            self.num_eager_runs += 1
            return call.body(call.inputs)
        if graph.last_inputs is not call.inputs:  # else the buffers hold them already
            write(graph.inputs, call.inputs)
            graph.last_inputs = call.inputs
        graph.replay()
        return graph.outputs

    def _add(self, key: tuple[str, Hashable], call: GraphCall) -> Graph | None:
        """Capture a call on all ranks and return its graph; None if the capture fails on one of them."""
        self.num_warm_ups += 1
        graph = None
        failure = None
        try:
            graph = self._capture(call)
        except CaptureError as error:
            failure = CaptureFailure(error.operation, str(error))
            clear_frames(error)
        except torch.OutOfMemoryError as error:
            failure = CaptureFailure(None, out_of_memory_cause(error, "capturing a graph"))
            clear_frames(error)

        # All ranks replay, or all run eagerly.
        node_bytes = 0 if graph is None else graph.node_bytes
        outcomes = [(failure, node_bytes)]
        if self._ranks is not None:
            outcomes = self._ranks.all(outcomes[0])
        failures = [failure for failure, _ in outcomes if failure is not None]
        if not failures:
            self._graphs[key] = graph  # type: ignore[assignment]
            self.num_captures += 1
            self.node_bytes += max(node_bytes for _, node_bytes in outcomes)
            return graph

        # The eager run needs the memory of the capture.
        self._refused.add(key)
        self._report(failures[0])
        del graph
        self._restore(failures[0])
        torch.cuda.empty_cache()
        return None

    def _capture(self, call: GraphCall) -> Graph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = self._stream or torch.cuda.Stream()
        return Graph(call.body, call.idle(), self._pool, self._stream)

    def _restore(self, failure: CaptureFailure) -> None:
        """Let later captures use the pool of earlier graphs, or else a new one."""
        if not self._graphs:
            self._pool = None  # torch has given up a pool that no graph uses
        if failure.operation is None or self._stream is None:
            return
        if not _can_capture(self._pool, self._stream):
            self._pool = None
            _can_capture(None, self._stream)

    def _report(self, failure: CaptureFailure) -> None:
        """Count a failed capture, and warn of it unless a warning has named its operation."""
        self.num_out_of_memory += failure.operation is None
        if failure.operation in self._reported:
            return
        self._reported.add(failure.operation)
        if failure.operation is None:
            remedy = "Lower kv_tokens, or graph_memory to the graphs that fit."
        else:
            remedy = (
                "Report this with the output of `eagle-kit doctor --gpu`. "
                f"{VARIABLE}=graphs does without graphs."
            )
        text = "%s Steps that need this graph run without it, slower. %s"
        logging.getLogger(__name__).warning(text, failure.reason, remedy)


class _LastOperation(TorchDispatchMode):
    """Dispatch mode that remembers the name of the last operation that began."""

    name = "before the first one"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = str(func)
        return func(*args, **(kwargs or {}))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a nest of tuples, named tuples and dataclasses with ``function`` applied to every tensor.

    Other values stay as they are.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        members = [map_tensors(function, member) for member in value]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        mapped = {}
        for field in dataclasses.fields(value):
            mapped[field.name] = map_tensors(function, getattr(value, field.name))
        return dataclasses.replace(value, **mapped)
    return value


def leaves(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors of a nest, in order."""
    found: list[torch.Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)  # type: ignore[func-returns-value]
    return iter(found)


def write(buffers: Any, values: Any) -> None:
    """Copy every tensor of the nest ``values`` into the tensor at the same place of ``buffers``."""
    for buffer, value in zip(leaves(buffers), leaves(values), strict=True):
        if buffer is not value:
            buffer.copy_(value, non_blocking=True)
