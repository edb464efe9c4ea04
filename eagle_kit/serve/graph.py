"""Functions of fixed shapes as CUDA graphs: captured once for a key, then replayed with new inputs.

A body takes a nest of tensors and returns one; it may change tensors that it closes over (key-value stores,
slots), reads nothing on the host, and runs the same eagerly. Inputs are copied into buffers that the graph
knows, outputs are buffers too: they hold until the next replay of any graph, so what the host needs is sent
to it at once (:class:`HostCopy`).
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_kit.core.errors import UserError

GraphMode = Literal["cycle", "phases", "off"]
"""``cycle``: everything between two tokens is one graph; ``phases``: one each for the draft, the verification
and the draft's extension, for comparison; ``off``: no graphs."""
WARM_UPS = 2


class Lengths(NamedTuple):
    """The lengths of all slots, int64, and the rows of those that take part, int64 ``[B]``."""

    slots: torch.Tensor
    rows: torch.Tensor

    def read(self) -> list[int]:
        """Of those that take part, on the host."""
        numbers: list[int] = self.slots[self.rows].tolist()
        return numbers


class CaptureError(RuntimeError):
    """A body cannot be a graph; the message names the operation."""


class HostCopy:
    """A copy of tensors on its way to the host. On a CPU it is there at once."""

    def __init__(self, tensors: Any) -> None:
        self._tensors = map_tensors(_to_pinned, tensors)
        self._event: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in leaves(tensors)):
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Any:
        """The tensors, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Graph:
    """A body captured on a GPU.

    Args:
        body: a function of one nest of tensors; at capture it is run several times with ``example``.
        example: inputs that change nothing that matters, such as a batch of dummies.
        pool: of memory, shared by graphs that never run at the same time.
        stream: to capture on; libraries keep a workspace for every stream that they have seen.

    Raises:
        CaptureError: an operation that cannot be captured, by name. The pool is of no use afterwards.
    """

    def __init__(
        self,
        body: Callable[[Any], Any],
        example: Any,
        pool: Any = None,
        stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        self.inputs = map_tensors(torch.clone, example)
        side, ours = stream or torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(ours)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                body(self.inputs)
        ours.wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        last = _LastOperation()
        try:
            with torch.cuda.graph(self._graph, pool=pool, stream=side), last:
                self.outputs = body(self.inputs)
        except Exception as error:
            torch.cuda.set_stream(ours)  # the end of a capture that failed fails too, before it restores it
            first = error.__context__ or error
            reason = str(first).strip().splitlines() or [type(first).__name__]
            raise CaptureError(f"The operation {last.name} cannot be in a CUDA graph: {reason[0]}") from first

    def replay(self) -> None:
        """Run it over ``inputs`` into ``outputs``."""
        self._graph.replay()


class EagerGraph:
    """The same without a GPU: a replay runs the body over the same buffers and writes into the same buffers,
    so that what a graph would get wrong (a stale input, an output read too late) goes wrong here too."""

    def __init__(
        self, body: Callable[[Any], Any], example: Any, pool: Any = None, stream: Any = None
    ) -> None:
        self._body = body
        self.inputs = map_tensors(torch.clone, example)
        self.outputs = map_tensors(torch.clone, body(self.inputs))

    def replay(self) -> None:
        """Run it over ``inputs`` into ``outputs``."""
        write(self.outputs, self._body(self.inputs))


class GraphRunner:
    """Runs bodies eagerly or as graphs, one for every (name, key).

    Args:
        mode: of what the caller captures; ``off`` captures nothing.
        graph: the kind of graph; :class:`EagerGraph` shows without a GPU what a graph would do.
    """

    def __init__(self, mode: GraphMode, graph: Callable[..., Any] = Graph) -> None:
        if mode not in (known := get_args(GraphMode)):
            raise UserError(f"There is no graph mode {mode!r}.", f"Use one of {', '.join(known)}.")
        self.mode = mode
        self._kind = graph
        self._pool: Any = None
        self._stream: Any = None
        self._graphs: dict[tuple[str, Hashable], Any] = {}

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether graphs are made for the longest context and few kinds of sampling, not for those at
        hand."""
        return self.mode != "off"

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def run(
        self,
        name: str,
        key: Hashable,
        body: Callable[[Any], Any],
        inputs: Any,
        idle: Callable[[], Any],
        lengths: Lengths | None = None,
    ) -> Any:
        """Run ``body`` over ``inputs``.

        Args:
            name, key: of a graph whose bodies do the same and whose inputs have the same shapes.
            idle: makes inputs of those shapes for the capture, with which a run changes nothing that
                matters.
            lengths: of the requests; what runs on a GPU asks nothing of them.

        Returns:
            The outputs, which hold until the next run.
        """
        if self.mode == "off":
            return body(inputs)
        place = (name, key)
        graph = self._graphs.get(place)
        if graph is None:
            graph = self._capture(place, body, idle())
        write(graph.inputs, inputs)
        graph.replay()
        return graph.outputs

    def _capture(self, place: tuple[str, Hashable], body: Callable[[Any], Any], example: Any) -> Any:
        if self._pool is None and torch.cuda.is_available():
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = self._stream or torch.cuda.Stream()
        try:
            graph = self._kind(body, example, self._pool, self._stream)
        except CaptureError:
            self._pool = None
            raise
        self._graphs[place] = graph
        return graph


class _LastOperation(TorchDispatchMode):
    """Knows the name of the last operation that began."""

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
    """The tensors of a nest, in order."""
    found: list[torch.Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)  # type: ignore[func-returns-value]
    return iter(found)


def write(buffers: Any, values: Any) -> None:
    """Copy every tensor of one nest into the tensor at its place in another."""
    for buffer, value in zip(leaves(buffers), leaves(values), strict=True):
        if buffer is not value:
            buffer.copy_(value, non_blocking=True)
