"""Recordings of cycles on a CPU: operations are recorded once and replayed by TorchScript, without Python.

A cycle of a small model is thousands of operations of some microseconds, and Python's part of each is as long
as the work. A list of operations does here what a CUDA graph does on a GPU: the body runs once under a mode
that records every operation with its arguments, the list becomes a TorchScript graph, and a replay runs it in
C++ over the same stores and slots. The operations are the same ones in the same order, not optimised, so that
a replay gives the bits of the body.

A recording is valid while Python would take the same decisions. Those by shapes and settings are in the
caller's key. Those by the lengths of requests are taken through
:func:`~eagle_kit.ops.cpu.guards.guarded_choice`, from the slots' lengths plus a number; they are taken
again before each replay, and each outcome has a recording of its own. A body that reads any other number
cannot be recorded.
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
"""Of all engines of the process; some 5 megabytes each, for a target of 30 layers."""
MAX_RECORD_AFTER = 1536
MAX_COUNTED = 1024
READS = (
    *("item", "tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "nonzero"),
    *("__bool__", "__int__", "__float__", "__index__"),
)
WRITING = {
    *("aten::fill_", "aten::masked_fill", "aten::masked_fill_", "aten::scatter", "aten::scatter_"),
    *("aten::index_fill", "aten::index_fill_"),
}
"""Operations to which True and 1 are the same: the type is that of the tensor."""
READING = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Of operations whose result Python cannot use without knowing numbers."""

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
    """What a recording needs of an operation's schema, which torch makes anew for each question.

    Attributes:
        returns: types of the results.
        takes_tensor: of each argument, whether its type is a tensor.
    """

    name: str
    text: str
    arguments: tuple[_Argument, ...]
    names: frozenset[str]
    takes_tensor: tuple[bool, ...]
    returns: tuple[Any, ...]
    reads: bool


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
        reads=bool(READING & set(function.tags)),
    )


class _Recorder(TorchDispatchMode):
    """Mode that records operations and keeps their tensors alive, so that no two have one id."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch then does not import its compiler, a second of work, to leave this mode out."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _reads(func, args):
            raise CaptureError(f"{func} reads numbers on the host")
        with torch._C.DisableTorchFunction():  # an operation may read what it likes
            result = func(*args, **(kwargs or {}))
        self.operations.append(_Operation(func, args, kwargs or {}, result))
        return result


def _reads(function: Any, args: tuple[Any, ...]) -> bool:
    """Return True if an operation returns a number, or a tensor whose size depends on numbers."""
    signature = _signature_of(function)
    if signature.name == "aten::index":
        kinds = [index.dtype for index in args[1] if index is not None]
        return torch.bool in kinds or torch.uint8 in kinds
    return (signature.name == "aten::where" and len(args) == 1) or signature.reads


class _NoReads(TorchFunctionMode):
    """Mode that refuses to hand a tensor's numbers to Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            raise CaptureError(f"{func.__name__} reads numbers on the host")
        return func(*args, **(kwargs or {}))


class Condition(NamedTuple):
    """Condition of a recording: the ``choice`` by the lengths plus ``offset`` must be the recorded one."""

    choice: Choice
    offset: int

    def __call__(self, lengths: Sequence[int]) -> tuple[int, ...]:
        return self.choice([length + self.offset for length in lengths])


class Recording:
    """Body as a list of operations.

    Args:
        body: function of one nest of tensors. It is run once with ``inputs``, for good: :attr:`outputs` is
            its result.

    Raises:
        CaptureError: the body reads numbers. It has been run in part, and must be run again.
    """

    def __init__(self, body: Callable[[Any], Any], inputs: Any) -> None:
        inputs = _told_apart(inputs)
        recorder = _Recorder()
        with (
            recording_context(lambda: len(recorder.operations)) as self._recording_context,
            _NoReads(),
            recorder,
        ):
            self.outputs = body(inputs)
        self._inputs, self._operations = list(leaves(inputs)), recorder.operations
        self._outside: list[torch.Tensor] = []
        self.num_replays = 0
        self.conditions: list[Condition] = []

    def compile(self, lengths: Lengths) -> None:
        """Compile the operations for replays where all :attr:`conditions` hold.

        Raises:
            CaptureError: an operation or an argument cannot be recorded.
        """
        self.conditions = [self._condition(each, lengths) for each in self._recording_context.choices]
        self._function = self._graph(self._inputs)
        self._layout = map_tensors(lambda tensor: tensor.new_empty(0), self.outputs)
        self._operations.clear()  # in place: the context, which holds what must live on, knows the recorder
        self._inputs, self._recording_context.choices, self.outputs = [], [], None

    def replay(self, inputs: Any) -> Any:
        """Run the operations over ``inputs`` of the same shapes -> new outputs."""
        self.num_replays += 1
        results = iter(self._function(*leaves(inputs), *self._outside))
        return map_tensors(lambda _: next(results), self._layout)

    def _condition(self, chosen: Guard, lengths: Lengths) -> Condition:
        """Trace a choice back to the lengths plus a number, through the operations before it."""
        tensor, offset, before = chosen.tensor, 0, self._operations[: chosen.position]
        changed = [tensor for operation in before for tensor in _written(operation)]
        slots = lengths.slots.untyped_storage().data_ptr()
        if any(each.untyped_storage().data_ptr() == slots for each in changed):
            raise CaptureError("a choice is made by lengths after they were changed")
        while True:
            if any(each is tensor for each in changed):
                raise CaptureError("a choice is made by a number that was changed")
            made = next((op for op in before if any(each is tensor for each in _results(op))), None)
            name = "nothing" if made is None else str(made.function)
            if made is not None and name == "eagle_kit_cpp.gather_rows.default":
                tables, rows = made.args
                place = next(i for i, each in enumerate(made.result) if each is tensor)
                if tables[place] is lengths.slots and rows is lengths.rows:
                    return Condition(chosen.choice, offset)
            if made is not None and name == "aten.index.Tensor":
                store, rows = made.args[0], made.args[1]
                if store is lengths.slots and len(rows) == 1 and rows[0] is lengths.rows:
                    return Condition(chosen.choice, offset)
            if made is None or name != "aten.add.Tensor" or made.kwargs or not isinstance(made.args[1], int):
                raise CaptureError(f"a choice is made by the result of {name}, not by lengths")
            tensor, offset = made.args[0], offset + made.args[1]

    def _graph(self, inputs: list[torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
        graph: Any = torch._C.Graph()
        values = {id(tensor): graph.addInput() for tensor in inputs}
        constants: dict[Hashable, Any] = {}

        def value(tensor: torch.Tensor) -> Any:
            if id(tensor) not in values:  # a weight, a store, a slot
                values[id(tensor)] = graph.addInput()
                self._outside.append(tensor)
            return values[id(tensor)]

        def node(kind: str, operands: list[Any], count: int = 1) -> Any:
            made = graph.create(kind, operands, count)
            graph.insertNode(made)
            return made

        def constant(given: Any) -> Any:
            """Value of a number, a text or None; one for all operations."""
            key = type(given), repr(given)  # 0.0 and -0.0 are equal
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
                if signature.name not in WRITING:
                    raise CaptureError(f"{given} is given to {signature.name} as a number")
                given = int(given)
            try:
                return constant(float(given) if name == "FloatType" else given)
            except TypeError as error:
                raise CaptureError(f"{given!r} cannot be an argument") from error

        for called, given, kwargs, result in self._operations:
            function, args = _written_as(called, given)
            signature = _signature_of(function)
            if len(args) > len(signature.arguments) or kwargs.keys() - signature.names:
                raise CaptureError(f"{called} was taken for {signature.text}")
            operands = []
            for place, argument in enumerate(signature.arguments):
                default = kwargs.get(argument.name, argument.default)
                operands.append(operand(args[place] if place < len(args) else default, argument.kind))
            made = node(signature.name, operands, len(signature.returns))
            for output, returned in zip(made.outputs(), signature.returns, strict=True):
                if returned.kind() != "TensorType":
                    output.setType(returned)
            if made.schema() != signature.text:
                raise CaptureError(f"{function} was taken for {made.schema()}")
            results = result if len(signature.returns) > 1 else (result,) * len(signature.returns)
            for output, mine in zip(made.outputs(), results, strict=True):
                if isinstance(mine, list | tuple):
                    unpacked = node("prim::ListUnpack", [output], len(mine))
                    values.update(
                        (id(part), each) for part, each in zip(mine, unpacked.outputs(), strict=True)
                    )
                elif isinstance(mine, torch.Tensor):
                    values[id(mine)] = output
                else:
                    raise CaptureError(f"{function} gives {type(mine).__name__}")
        results = [value(tensor) for tensor in leaves(self.outputs)]
        together = node("prim::TupleConstruct", results).output()
        together.setType(torch._C.TupleType([result.type() for result in results]))
        graph.registerOutput(together)
        return _function_of(graph)


def _told_apart(inputs: Any) -> Any:
    """Replace a tensor that occurs twice by two views: the next inputs may have two tensors."""
    seen: set[int] = set()

    def own(tensor: torch.Tensor) -> torch.Tensor:
        known = id(tensor) in seen
        seen.add(id(tensor))
        return tensor.view_as(tensor) if known else tensor

    return map_tensors(own, inputs)


def _results(operation: _Operation) -> Sequence[Any]:
    """List what an operation returns."""
    result = operation.result
    return result if isinstance(result, list | tuple) else [result]


def _written(operation: _Operation) -> list[Any]:
    """List the arguments that an operation changes."""
    arguments = operation.function._schema.arguments
    given = [*zip(arguments, operation.args, strict=False)]
    given += [(each, operation.kwargs[each.name]) for each in arguments if each.name in operation.kwargs]
    values = [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]
    return [part for value in values for part in (value if isinstance(value, list | tuple) else [value])]


def _written_as(function: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Rewrite an operation and its arguments for TorchScript: Python calls ``add.Tensor`` with a number,
    which is ``add.Scalar``, and a view as another type looks like one of another size."""
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
            with _as_written():
                return function(*tensors)
        except RuntimeError as error:  # TorchScript makes its own of those of our operations
            if "KeyboardInterrupt" in str(error):
                raise KeyboardInterrupt from None
            _, is_lost, told = str(error).rpartition("RankLost: ")
            if is_lost:
                raise RankLost(told.partition("\n")[0]) from None
            raise

    return call


@contextmanager
def _as_written() -> Iterator[None]:
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
    """:class:`~eagle_kit.engine.graphs.cuda_graph.CycleGraphs` that run bodies eagerly until they have been
    run often, then from recordings.

    Args:
        record_after: runs of a kind before it is recorded.
        is_bounded: its recordings are among the ``MAX_RECORDINGS`` of the process.
    """

    mode: GraphMode = "cycle"
    has_fixed_shapes = False

    def __init__(self, record_after: int = RECORD_AFTER, *, is_bounded: bool = True) -> None:
        self._record_after, self._is_bounded, self.num_warm_ups = record_after, is_bounded, 0
        self._runs: OrderedDict[Hashable, int] = OrderedDict()
        self._conditions: dict[Hashable, list[Condition]] = {}
        self._recordings: dict[Hashable, Recording] = {}
        self._refused: set[Hashable] = set()

    @property
    def num_graphs(self) -> int:
        """Recordings at hand."""
        return len(self._recordings)

    def anew(self) -> "CpuGraphs":
        """See :class:`~eagle_kit.engine.graphs.cuda_graph.CycleGraphs`."""
        return CpuGraphs(record_after=1, is_bounded=False)

    def run(self, call: GraphCall) -> Any:
        """See :class:`~eagle_kit.engine.graphs.cuda_graph.CycleGraphs`; idle inputs are not needed."""
        body, inputs, lengths = call.body, call.inputs, call.lengths
        assert lengths is not None
        kind = (call.name, call.key, tuple(tensor.shape for tensor in leaves(inputs)))
        if kind in self._refused:
            return body(inputs)
        now = lengths.read()
        choices = tuple(condition(now) for condition in self._conditions.get(kind, ()))
        recording = self._recordings.get((kind, choices))
        if recording is not None:
            self._note_use((kind, choices))
            return recording.replay(inputs)
        self.num_warm_ups += 1
        self._runs[kind, choices] = self._runs.pop((kind, choices), 0) + 1
        if len(self._runs) > MAX_COUNTED:
            self._runs.popitem(last=False)
        if self._runs[kind, choices] < self._record_after:
            return body(inputs)
        return self._record(kind, call, lengths, now)

    def _record(self, kind: Hashable, call: GraphCall, lengths: Lengths, now: list[int]) -> Any:
        try:
            recording = Recording(call.body, call.inputs)
        except CaptureError as error:
            self._refuse(kind, error)
            return call.body(call.inputs)
        outputs = recording.outputs
        try:
            recording.compile(lengths)
            known = self._conditions.setdefault(kind, recording.conditions)
            if [each.offset for each in known] != [each.offset for each in recording.conditions]:
                raise CaptureError("choices are made in another way each time")
        except Exception as error:  # the body has run, and TorchScript is free to refuse what it likes
            self._refuse(kind, error)
            return outputs
        choices = tuple(condition(now) for condition in known)
        self._recordings[kind, choices] = recording
        self._note_use((kind, choices))
        with _lock:
            for owner, key in [each for each in _used if each[0]() is None]:
                del _used[owner, key]
            while len(_used) > MAX_RECORDINGS:
                (owner, key), _ = _used.popitem(last=False)
                if (graphs := owner()) is not None:
                    graphs._drop(key)
        return outputs

    def _drop(self, key: Any) -> None:
        """Forget a recording. Where it was hardly replayed, batches change too often for recordings to pay,
        and the next ones wait longer."""
        recording = self._recordings.pop(key, None)
        self._runs.pop(key, None)  # so that it is not recorded again at its next run
        if recording is not None and recording.num_replays < FEW_REPLAYS:
            self._record_after = min(2 * self._record_after, MAX_RECORD_AFTER)

    def _note_use(self, key: Hashable) -> None:
        """Put a recording behind all others of the process in the order in which they are dropped."""
        if not self._is_bounded:
            return
        with _lock:
            _used[weakref.ref(self), key] = None
            _used.move_to_end((weakref.ref(self), key))

    def _refuse(self, kind: Hashable, error: Exception) -> None:
        _log.info("A cycle stays in Python: %s.", error)
        self._refused.add(kind)
