"""Recordings of cycles on a CPU: operations are recorded once and replayed by TorchScript, without Python.

A cycle of a small model is thousands of operations of some microseconds, and Python takes as long for each as
the operation itself. A recording does on a CPU what a CUDA graph does on a GPU. The body runs once under a
dispatch mode that records every operation with its arguments. The list becomes a TorchScript graph, and a
replay runs it in C++ over the same stores and slots. It runs the same operations in the same order and
without optimisation, so a replay computes the same bits as the body.

A recording is valid while Python would take the same branches:

* Branches on shapes and settings are in the key of the call.
* Branches on the lengths of requests go through :func:`~eagle_kit.ops.cpu.guards.guarded_choice`. Their input
  is the slots' lengths plus a constant. They are evaluated before each replay, and each outcome has its own
  recording.
* A body that reads any other tensor on the host cannot be recorded.
"""

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_kit.config.engine import GraphMode
from eagle_kit.core.errors import RankLost
from eagle_kit.engine.graphs.cuda_graph import CaptureError, GraphCall, Lengths, leaves, map_tensors
from eagle_kit.ops.cpu.guards import VIEWED_TYPES, Choice, Guard, recording_context

RECORD_AFTER = 8
"""Runs of a kind before it is recorded: a recording takes as long as some ten replays save."""
FEW_REPLAYS = 24
"""Replays below which a recording that is dropped has hardly paid."""
MAX_RECORDINGS = 64
"""Most recordings of all engines of the process; a target of 30 layers takes some 5 megabytes for each."""
MAX_RECORD_AFTER = 1536
"""Most runs of a kind before it is recorded."""
MAX_COUNTED = 1024
"""Most kinds whose runs are counted."""
HOST_READS = (
    *("item", "tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "nonzero"),
    *("__bool__", "__int__", "__float__", "__index__"),
)
BOOL_AS_NUMBER = {
    *("aten::fill_", "aten::masked_fill", "aten::masked_fill_", "aten::scatter", "aten::scatter_"),
    *("aten::index_fill", "aten::index_fill_"),
}
"""Operations that take True and 1 alike, because the tensor has the type."""
DATA_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Tags of operations whose result depends on values, so that Python needs them to go on."""

_used: "OrderedDict[tuple[weakref.ref[CpuGraphs], Hashable], None]" = OrderedDict()
"""Recordings of the process, the least recently used first."""
_lock = threading.Lock()

_log = logging.getLogger(__name__)


class _Operation(NamedTuple):
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class _Argument(NamedTuple):
    name: str
    default: Any
    kind: Any


class _Signature(NamedTuple):
    """Schema of an operation, read once: torch makes a new object for each access.

    Attributes:
        name: name with namespace, such as ``aten::add``.
        text: the whole schema.
        arguments: the arguments, in order.
        names: their names.
        takes_tensor: for each argument, True if it is a tensor.
        returns: types of the results.
        is_data_dependent: True if the result depends on the values of tensors.
    """

    name: str
    text: str
    arguments: tuple[_Argument, ...]
    names: frozenset[str]
    takes_tensor: tuple[bool, ...]
    returns: tuple[Any, ...]
    is_data_dependent: bool


@cache
def _signature_of(function: Any) -> _Signature:
    schema = function._schema
    arguments = tuple(_Argument(each.name, each.default_value, each.type) for each in schema.arguments)
    return _Signature(
        name=schema.name,
        text=str(schema),
        arguments=arguments,
        names=frozenset(each.name for each in arguments),
        takes_tensor=tuple(str(each.kind) == "Tensor" for each in arguments),
        returns=tuple(each.type for each in schema.returns),
        is_data_dependent=bool(DATA_DEPENDENT & set(function.tags)),
    )


class _Recorder(TorchDispatchMode):
    """Dispatch mode that records operations. It keeps their tensors alive, so that ids are unique."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch then does not import its compiler, a second of work, to leave this mode out."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _reads_values(func, args):
            raise CaptureError(f"{func} reads numbers on the host")
        with torch._C.DisableTorchFunction():  # inside an operation host reads are allowed
            result = func(*args, **(kwargs or {}))
        self.operations.append(_Operation(func, args, kwargs or {}, result))
        return result


def _reads_values(function: Any, args: tuple[Any, ...]) -> bool:
    """Return True if an operation returns a number, or a tensor whose size depends on values."""
    signature = _signature_of(function)
    if signature.name == "aten::index":
        kinds = [index.dtype for index in args[1] if index is not None]
        return torch.bool in kinds or torch.uint8 in kinds
    return (signature.name == "aten::where" and len(args) == 1) or signature.is_data_dependent


class _NoHostReads(TorchFunctionMode):
    """Function mode that raises CaptureError where Python reads a tensor's values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in HOST_READS:
            raise CaptureError(f"{func.__name__} reads numbers on the host")
        return func(*args, **(kwargs or {}))


class Condition(NamedTuple):
    """Condition of a recording: ``choice`` of the lengths plus ``offset`` must be as it was recorded."""

    choice: Choice
    offset: int

    def __call__(self, lengths: Sequence[int]) -> tuple[int, ...]:
        return self.choice([length + self.offset for length in lengths])


class Recording:
    """A body, recorded as a list of operations.

    Args:
        body: function of one nest of tensors. The constructor runs it once with ``inputs``, and its effects
            count.

    Attributes:
        outputs: outputs of that run; None once it is compiled.
        conditions: conditions under which the recording may be replayed.
        num_replays: replays so far.

    Raises:
        CaptureError: the body reads values on the host. It has been run in part, and must be run again.
    """

    def __init__(self, body: Callable[[Any], Any], inputs: Any) -> None:
        # Run the body under the recording modes.
        inputs = _without_repeats(inputs)
        recorder = _Recorder()
        with (
            recording_context(lambda: len(recorder.operations)) as self._recording_context,
            _NoHostReads(),
            recorder,
        ):
            self.outputs = body(inputs)

        # Until :meth:`compile`: the inputs and operations. After it: tensors that the body closes over.
        self._inputs = list(leaves(inputs))
        self._operations = recorder.operations
        self._closed_over: list[torch.Tensor] = []
        self.num_replays = 0
        self.conditions: list[Condition] = []

    def compile(self, lengths: Lengths) -> None:
        """Compile the operations for replays, and find the :attr:`conditions` of these.

        Args:
            lengths: the lengths that the choices of the body depend on.

        Raises:
            CaptureError: an operation or an argument cannot be recorded.
        """
        self.conditions = [self._trace_condition(each, lengths) for each in self._recording_context.choices]
        self._function = self._graph(self._inputs)
        self._layout = map_tensors(lambda tensor: tensor.new_empty(0), self.outputs)

        # Free the tensors of the run. The context lives on with the objects that replays need, and refers to
        # the recorder, so its list is cleared in place.
        self._operations.clear()
        self._recording_context.choices = []
        self._inputs = []
        self.outputs = None

    def replay(self, inputs: Any) -> Any:
        """Run the operations over ``inputs`` of the same shapes, and return new outputs."""
        self.num_replays += 1
        results = iter(self._function(*leaves(inputs), *self._closed_over))
        return map_tensors(lambda _: next(results), self._layout)

    def _trace_condition(self, chosen: Guard, lengths: Lengths) -> Condition:
        """Trace the input of a choice back, through the operations before it, to the lengths plus a constant.

        Raises:
            CaptureError: it is another tensor.
        """
        # The lengths must be those that the cycle began with.
        before = self._operations[: chosen.position]
        changed = [tensor for operation in before for tensor in _mutated(operation)]
        seq_lens = lengths.seq_lens.untyped_storage().data_ptr()
        if any(each.untyped_storage().data_ptr() == seq_lens for each in changed):
            raise CaptureError("a choice is made by lengths after they were changed")

        # Follow additions of constants back to the operation that gathered the lengths from the slots.
        tensor = chosen.tensor
        offset = 0
        while True:
            if any(each is tensor for each in changed):
                raise CaptureError("a choice is made by a number that was changed")
            made = next((op for op in before if any(each is tensor for each in _results_of(op))), None)
            name = "nothing" if made is None else str(made.function)
            if made is not None and name == "eagle_kit_cpp.gather_rows.default":
                tables, rows = made.args
                index = next(i for i, each in enumerate(made.result) if each is tensor)
                if tables[index] is lengths.seq_lens and rows is lengths.slot_ids:
                    return Condition(chosen.choice, offset)
            if made is not None and name == "aten.index.Tensor":
                store = made.args[0]
                rows = made.args[1]
                if store is lengths.seq_lens and len(rows) == 1 and rows[0] is lengths.slot_ids:
                    return Condition(chosen.choice, offset)
            if made is None or name != "aten.add.Tensor" or made.kwargs or not isinstance(made.args[1], int):
                raise CaptureError(f"a choice is made by the result of {name}, not by lengths")
            tensor = made.args[0]
            offset += made.args[1]

    def _graph(self, inputs: list[torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Build the TorchScript graph of the operations, and return it as a function."""
        graph: Any = torch._C.Graph()

        # Values of the graph by the ids of the tensors that they stand for.
        values = {id(tensor): graph.addInput() for tensor in inputs}
        constants: dict[Hashable, Any] = {}

        def value(tensor: torch.Tensor) -> Any:
            if id(tensor) not in values:  # a weight, a store, a slot
                values[id(tensor)] = graph.addInput()
                self._closed_over.append(tensor)
            return values[id(tensor)]

        def node(kind: str, operands: list[Any], count: int = 1) -> Any:
            made = graph.create(kind, operands, count)
            graph.insertNode(made)
            return made

        def constant(given: Any) -> Any:
            """Value of a number, a text or None; one for all operations."""
            key = (type(given), repr(given))  # by its text, because 0.0 equals -0.0
            if key not in constants:
                constants[key] = graph.insertConstant(given)
            return constants[key]

        def operand(given: Any, kind: Any) -> Any:
            """Value of an argument whose schema has the type ``kind``."""
            name = kind.kind()
            if isinstance(given, torch.Tensor):
                return value(given)
            if isinstance(given, torch.Generator):
                raise CaptureError("a generator of random numbers is used")
            if given is None:
                return constant(None)
            if name == "OptionalType":
                return operand(given, kind.getElementType())
            if name == "ListType" or isinstance(given, list | tuple):
                element = kind.getElementType()
                if element.kind() == "SymIntType":
                    element = torch._C.IntType.get()
                several = given if isinstance(given, list | tuple) else [given]
                made = node("prim::ListConstruct", [operand(each, element) for each in several])
                made.output().setType(torch._C.ListType(element))
                return made.output()
            if name == "NumberType" and isinstance(given, bool):
                if signature.name not in BOOL_AS_NUMBER:
                    raise CaptureError(f"{given} is given to {signature.name} as a number")
                given = int(given)
            try:
                return constant(float(given) if name == "FloatType" else given)
            except TypeError as error:
                raise CaptureError(f"{given!r} cannot be an argument") from error

        for called, given, kwargs, result in self._operations:
            # The operation as TorchScript knows it.
            function, args = _torchscript_call(called, given)
            signature = _signature_of(function)
            if len(args) > len(signature.arguments) or kwargs.keys() - signature.names:
                raise CaptureError(f"{called} was taken for {signature.text}")

            # Its arguments: positional, by name, or the default.
            operands = []
            for index, argument in enumerate(signature.arguments):
                argument_value = kwargs.get(argument.name, argument.default)
                if index < len(args):
                    argument_value = args[index]
                operands.append(operand(argument_value, argument.kind))

            # Its node.
            made = node(signature.name, operands, len(signature.returns))
            for output, returned in zip(made.outputs(), signature.returns, strict=True):
                if returned.kind() != "TensorType":
                    output.setType(returned)
            if made.schema() != signature.text:
                raise CaptureError(f"{function} was taken for {made.schema()}")

            # The values of its results.
            results = result if len(signature.returns) > 1 else (result,) * len(signature.returns)
            for output, returned_value in zip(made.outputs(), results, strict=True):
                if isinstance(returned_value, list | tuple):
                    unpacked = node("prim::ListUnpack", [output], len(returned_value))
                    for tensor, unpacked_output in zip(returned_value, unpacked.outputs(), strict=True):
                        values[id(tensor)] = unpacked_output
                elif isinstance(returned_value, torch.Tensor):
                    values[id(returned_value)] = output
                else:
                    raise CaptureError(f"{function} gives {type(returned_value).__name__}")

        # The graph returns the outputs of the body as one tuple.
        results = [value(tensor) for tensor in leaves(self.outputs)]
        together = node("prim::TupleConstruct", results).output()
        together.setType(torch._C.TupleType([result.type() for result in results]))
        graph.registerOutput(together)
        return _function_of(graph)


def _without_repeats(inputs: Any) -> Any:
    """Replace a tensor that occurs again in a nest by a view of it, because later inputs may differ there."""
    seen: set[int] = set()

    def unique(tensor: torch.Tensor) -> torch.Tensor:
        is_repeat = id(tensor) in seen
        seen.add(id(tensor))
        return tensor.view_as(tensor) if is_repeat else tensor

    return map_tensors(unique, inputs)


def _results_of(operation: _Operation) -> Sequence[Any]:
    """List the results of an operation."""
    result = operation.result
    return result if isinstance(result, list | tuple) else [result]


def _mutated(operation: _Operation) -> list[Any]:
    """List the tensors that an operation changes in place."""
    arguments = operation.function._schema.arguments
    given = [*zip(arguments, operation.args, strict=False)]
    given += [(each, operation.kwargs[each.name]) for each in arguments if each.name in operation.kwargs]
    values = [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]
    return [part for value in values for part in (value if isinstance(value, list | tuple) else [value])]


def _torchscript_call(function: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the operation and the arguments that TorchScript has for a recorded call.

    Python calls ``add.Tensor`` with a number, which is ``add.Scalar`` in TorchScript. A view as another dtype
    is an operation of ours, because TorchScript takes it for a view of another shape.
    """
    if str(function) == "aten.view.dtype":
        if args[1] not in VIEWED_TYPES:
            raise CaptureError(f"a view as {args[1]}")
        return torch.ops.eagle_kit_cpu.bits_as.default, (args[0], VIEWED_TYPES.index(args[1]))
    takes_tensor = _signature_of(function).takes_tensor[: len(args)]
    if any(takes and isinstance(x, int | float) for takes, x in zip(takes_tensor, args, strict=True)):
        return function.overloadpacket.Scalar, args
    return function, args


def _function_of(graph: Any) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Make a function of a graph, without TorchScript's optimisations."""
    function: Callable[..., tuple[torch.Tensor, ...]] = torch._C._create_function_from_graph("cycle", graph)

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        try:
            with _without_optimization():
                return function(*tensors)
        except RuntimeError as error:
            # TorchScript wraps the errors of our operations.
            if "KeyboardInterrupt" in str(error):
                raise KeyboardInterrupt from None
            _, is_lost, message = str(error).rpartition("RankLost: ")
            if is_lost:
                raise RankLost(message.partition("\n")[0]) from None
            raise

    return call


@contextmanager
def _without_optimization() -> Iterator[None]:
    before = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        torch._C._set_graph_executor_optimize(before)


def available() -> bool:
    """Return True if this torch has the parts of TorchScript that recordings need."""
    needed = ("Graph", "_create_function_from_graph", "_set_graph_executor_optimize", "TupleType")
    return all(hasattr(torch._C, name) for name in needed)


class CpuGraphs:
    """:class:`~eagle_kit.engine.graphs.cuda_graph.CycleGraphs` on a CPU: eager runs, then recordings.

    A kind of calls has the same name, key and shapes. It has one recording for each outcome of its choices.

    Args:
        record_after: runs of a kind, with the same outcome, before it is recorded.
        is_bounded: count its recordings among the ``MAX_RECORDINGS`` of the process, and drop the least
            recently used ones.
    """

    mode: GraphMode = "cycle"
    has_fixed_shapes = False
    num_out_of_memory = 0
    node_bytes = 0

    def __init__(self, record_after: int = RECORD_AFTER, *, is_bounded: bool = True) -> None:
        self._record_after = record_after
        self._is_bounded = is_bounded
        self.num_warm_ups = 0
        self.num_captures = 0
        self.num_eager_runs = 0

        # Eager runs by kind and outcome, the least recent first.
        self._runs: OrderedDict[Hashable, int] = OrderedDict()

        # Recordings by kind and outcome, the conditions of each kind, and kinds that cannot be recorded.
        self._conditions: dict[Hashable, list[Condition]] = {}
        self._recordings: dict[Hashable, Recording] = {}
        self._refused: set[Hashable] = set()

    @property
    def num_graphs(self) -> int:
        """See :class:`~eagle_kit.engine.graphs.cuda_graph.CycleGraphs`."""
        return len(self._recordings)

    def new_empty(self) -> "CpuGraphs":
        """See :class:`~eagle_kit.engine.graphs.cuda_graph.CycleGraphs`."""
        return CpuGraphs(record_after=1, is_bounded=False)

    def run(self, call: GraphCall) -> Any:
        """See :class:`~eagle_kit.engine.graphs.cuda_graph.CycleGraphs`; idle inputs are not needed."""
        body = call.body
        inputs = call.inputs
        lengths = call.lengths
        assert lengths is not None
        kind = (call.name, call.key, tuple(tensor.shape for tensor in leaves(inputs)))
        if kind in self._refused:
            self.num_eager_runs += 1
            return body(inputs)

        # Replay the recording for these lengths, if there is one.
        lengths_now = lengths.read()
        choices = tuple(condition(lengths_now) for condition in self._conditions.get(kind, ()))
        recording = self._recordings.get((kind, choices))
        if recording is not None:
            self._note_use((kind, choices))
            return recording.replay(inputs)

        # Run eagerly until the kind has run often.
        self.num_warm_ups += 1
        self._runs[kind, choices] = self._runs.pop((kind, choices), 0) + 1
        if len(self._runs) > MAX_COUNTED:
            self._runs.popitem(last=False)
        if self._runs[kind, choices] < self._record_after:
            return body(inputs)
        return self._record(kind, call, lengths, lengths_now)

    def _record(self, kind: Hashable, call: GraphCall, lengths: Lengths, lengths_now: list[int]) -> Any:
        """Run a call and record it, and return its outputs. A kind that cannot be recorded stays eager."""
        # Run it under the recorder.
        try:
            recording = Recording(call.body, call.inputs)
        except CaptureError as error:
            self._refuse(kind, error)
            return call.body(call.inputs)
        outputs = recording.outputs

        # Compile it. The body has run, so whatever TorchScript raises only means that there is no recording.
        try:
            recording.compile(lengths)
            known = self._conditions.setdefault(kind, recording.conditions)
            if [each.offset for each in known] != [each.offset for each in recording.conditions]:
                raise CaptureError("choices are made in another way each time")
        except Exception as error:
            self._refuse(kind, error)
            return outputs
        choices = tuple(condition(lengths_now) for condition in known)
        self._recordings[kind, choices] = recording
        self.num_captures += 1
        self._note_use((kind, choices))

        # Forget engines that are gone, and drop the least recently used recordings of the process.
        with _lock:
            for owner, key in [each for each in _used if each[0]() is None]:
                del _used[owner, key]
            while len(_used) > MAX_RECORDINGS:
                (owner, key), _ = _used.popitem(last=False)
                if (graphs := owner()) is not None:
                    graphs._drop(key)
        return outputs

    def _drop(self, key: Any) -> None:
        """Forget a recording.

        If it was hardly replayed, batches change too often for recordings to pay. Then the next ones wait
        longer.
        """
        recording = self._recordings.pop(key, None)
        self._runs.pop(key, None)  # so that it is not recorded again at its next run
        if recording is not None and recording.num_replays < FEW_REPLAYS:
            self._record_after = min(2 * self._record_after, MAX_RECORD_AFTER)

    def _note_use(self, key: Hashable) -> None:
        """Mark a recording as the most recently used one of the process."""
        if not self._is_bounded:
            return
        with _lock:
            _used[weakref.ref(self), key] = None
            _used.move_to_end((weakref.ref(self), key))

    def _refuse(self, kind: Hashable, error: Exception) -> None:
        """Run a kind eagerly from now on."""
        _log.info("A cycle stays in Python: %s.", error)
        self._refused.add(kind)
