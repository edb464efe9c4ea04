"""Translation of a Triton kernel's intermediate code (:mod:`ttir`) into C++ for a CPU.

Every value is a member of a struct ``Program``: a number, or an array where its elements differ. A number
that is spread over a shape stays a number. Each operation becomes a loop over the elements of its result, and
the programs of a grid run one after another. So the threads of a program are always in step, and a barrier
within it has nothing to do. A kernel that waits for other programs of its grid cannot run, and is refused.

What is done to single elements stands in ``elements.h``, a function for each operation. Operations that
move elements, access memory or have regions are translated here, each by the method that bears its name.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.triton_on_cpu.ttir import Block, Function, Operation, Type, UnknownOperation

HEADER = Path(__file__).with_name("elements.h")
AXES = {"x": 0, "y": 1, "z": 2}
SILENT_INSTRUCTIONS = ("griddepcontrol.", "prefetch.")
"""Inline assembly that changes no value: order of launches, and hints to a cache."""
FREE_OF_VALUES = {
    "ttg.barrier": "the threads of a program are in step",
    "gpu.barrier": "the threads of a program are in step",
    "tt.grid_dependency_wait": "launches run one after another",
    "tt.grid_dependency_launch_dependents": "launches run one after another",
}
"""Operations that change no value, and why."""


@dataclass(frozen=True)
class Value:
    """A value of the kernel: its name in C++, its type, and whether it is an array there."""

    name: str
    type: Type
    is_array: bool

    def at(self, index: str = "i") -> str:
        """The element of an index into the flat shape."""
        return f"{self.name}[{index}]" if self.is_array else self.name


class Access(NamedTuple):
    """A read or write of memory in a kernel."""

    operation: str
    line: str


@dataclass(frozen=True)
class Translation:
    """A kernel in C++.

    Attributes:
        source: defines ``run``, see ``_RUN``.
        parameters: types of what it takes.
        accesses: operations that read or write memory; faults name them by their number, from 1.
    """

    name: str
    source: str
    parameters: tuple[Type, ...]
    accesses: tuple[Access, ...]


_RUN = """\
// Runs all programs of a grid. `arguments` are addresses of the parameters. `order` has the numbers of the
// programs in the order in which they run (x varies fastest), or is null for ascending order. `ranges` is the
// memory that may be accessed; without any, all of it. Other accesses do nothing; `fault` is the first.
extern "C" void run(const i32* grid, void** arguments, const i32* order, const Range* ranges,
                    i64 num_ranges, Fault* fault) {
    static thread_local Program* program = new Program;
    program->memory = {ranges, num_ranges, 0, fault};
    for (int axis = 0; axis < 3; axis++) program->grid[axis] = grid[axis];
@ARGUMENTS@
    i64 num_programs = (i64)grid[0] * grid[1] * grid[2];
    for (i64 number = 0; number < num_programs; number++) {
        i64 next = order ? order[number] : number;
        program->at[0] = next % grid[0];
        program->at[1] = next / grid[0] % grid[1];
        program->at[2] = next / grid[0] / grid[1];
        program->body();
    }
}
"""


def translate(function: Function) -> Translation:
    """Translate a kernel.

    Raises:
        UnknownOperation: an operation is not known, or the kernel waits for other programs. The message
            has its name, its text and its line.
    """
    translator = _Translator()
    for name, kind in function.parameters:
        translator.scope[name] = translator.new(kind)
    parameters = list(translator.scope.values())

    # The body: blocks that jump to each other.
    translator.blocks(function.blocks)

    # The file.
    arguments = [
        f"    program->{value.name} = *({value.type.element}*)arguments[{number}];"
        for number, value in enumerate(parameters)
    ]
    source = [
        f"// {function.name}",
        HEADER.read_text(),
        "struct Program {",
        "Memory memory;",
        "i32 grid[3];",
        "i32 at[3];",
        *translator.members,
        "void body() {",
        *translator.lines,
        "}",
        "};",
        _RUN.replace("@ARGUMENTS@", "\n".join(arguments)),
    ]
    kinds = tuple(value.type for value in parameters)
    return Translation(function.name, "\n".join(source), kinds, tuple(translator.accesses))


@cache
def elementwise_names() -> frozenset[str]:
    """Names of the functions of ``elements.h``, such as ``arith_addi`` and ``atomic_fadd``."""
    return frozenset(re.findall(r"\b((?:arith|math|tt|atomic)_\w+)\(", HEADER.read_text()))


class _Translator:
    def __init__(self) -> None:
        self.scope: dict[str, Value] = {}
        self.members: list[str] = []
        self.lines: list[str] = []
        self.accesses: list[Access] = []
        self.num_values = 0
        self.yield_to: Callable[[list[Value]], None] | None = None

    # ---- Values ----

    def new(self, kind: Type, is_array: bool = False) -> Value:
        """A new member."""
        self.num_values += 1
        value = Value(f"v{self.num_values}", kind, is_array)
        size = f"[{kind.num_elements}]" if is_array else ""
        self.members.append(f"{kind.element} {value.name}{size};")
        return value

    def storage(self, kind: Type) -> Value:
        """A new member for whatever values of a type are assigned to it."""
        return self.new(kind, kind.shape is not None)

    def operands(self, operation: Operation) -> list[Value]:
        """The operands' values."""
        return [self.scope[name] for name in operation.operands]

    def define(self, operation: Operation, value: Value) -> None:
        """Give the only result of an operation its value."""
        [name] = operation.results
        self.scope[name] = value

    def assign(self, value: Value, expression: str) -> None:
        """Assign an expression of the index ``i`` to each element."""
        if value.is_array:
            self.lines.append(f"for (int i = 0; i < {value.type.num_elements}; i++)")
        self.lines.append(f"{value.at()} = {expression};")

    def compute(self, operation: Operation, kind: Type, expression: str, is_array: bool) -> None:
        """Make an expression the result of an operation."""
        value = self.new(kind, is_array)
        self.assign(value, expression)
        self.define(operation, value)

    def copy(self, targets: Sequence[Value], values: Sequence[Value]) -> None:
        """Assign values, all at once: a loop may exchange what it carries."""
        names = {target.name for target in targets}
        sources = []
        for target, value in zip(targets, values, strict=True):
            if value.name in names - {target.name}:
                kept = self.new(value.type, value.is_array)
                self.assign(kept, value.at())
                value = kept
            sources.append(value)
        for target, value in zip(targets, sources, strict=True):
            if target.name != value.name:
                self.assign(target, value.at())

    # ---- Blocks and operations ----

    def blocks(self, blocks: list[Block]) -> None:
        """Translate the blocks of a kernel. A value is known in all blocks behind its own."""
        self.labelled = {block.label: block for block in blocks}
        for block in blocks:
            for name, kind in block.arguments:
                self.scope[name] = self.storage(kind)
        for block in blocks:
            self.lines.append(f"{block.label}:;")
            for operation in block.operations:
                self.operation(operation)

    def region(self, region: list[Block], yield_to: Callable[[list[Value]], None]) -> None:
        """Translate the one block of a region, whose arguments have values.

        ``yield_to`` translates its end, given the values that it ends with.
        """
        [block] = region
        outer_scope = dict(self.scope)
        outer_yield = self.yield_to
        self.yield_to = yield_to
        for operation in block.operations:
            self.operation(operation)
        self.yield_to = outer_yield
        self.scope = outer_scope

    def bind(self, region: list[Block], values: Sequence[Value]) -> None:
        """Give the arguments of a region's block their values."""
        [block] = region
        for (name, _), value in zip(block.arguments, values, strict=True):
            self.scope[name] = value

    def operation(self, operation: Operation) -> None:
        """Translate an operation, by the method of its name or as a function of single elements."""
        self.lines.append(f"// {operation.text}")
        if operation.name in FREE_OF_VALUES:
            return
        method = getattr(self, operation.name.replace(".", "_"), None)
        if method is not None:
            method(operation)
        else:
            self.elementwise(operation, operation.name.replace(".", "_"), operation.result_types)

    def elementwise(self, operation: Operation, function: str, result_types: list[Type]) -> None:
        """A function of ``elements.h`` for each element."""
        if function not in elementwise_names() or len(result_types) != 1:
            raise operation.unknown()
        operands = self.operands(operation)
        arguments = ", ".join(operand.at() for operand in operands)
        # For comparisons the type that is named is that of the operands.
        named = operands[0].type if function.startswith("arith_cmp") else result_types[0]
        expression = f"{function}<{named.element}>({arguments})"
        is_array = any(operand.is_array for operand in operands)
        self.compute(operation, result_types[0], expression, is_array)

    # ---- Constants, numbers of programs ----

    def arith_constant(self, operation: Operation) -> None:
        """A number, or one that is spread over a shape."""
        [kind] = operation.types or [Type("i1")]
        dense = re.fullmatch(r"dense<(.*)>", operation.words)
        literal = dense[1] if dense else operation.words
        self.compute(operation, kind, _literal(operation, literal, kind.element), is_array=False)

    def ub_poison(self, operation: Operation) -> None:
        """A value that nobody reads."""
        [kind] = operation.types
        self.compute(operation, kind, f"unset<{kind.element}>()", is_array=False)

    def tt_get_program_id(self, operation: Operation) -> None:
        """Place of the program in the grid."""
        self.compute(operation, Type("i32"), f"at[{AXES[operation.words]}]", is_array=False)

    def tt_get_num_programs(self, operation: Operation) -> None:
        """Extent of the grid."""
        self.compute(operation, Type("i32"), f"grid[{AXES[operation.words]}]", is_array=False)

    def tt_make_range(self, operation: Operation) -> None:
        """Ascending integers."""
        [kind] = operation.types
        self.compute(operation, kind, f"{operation.integer('start')} + i", is_array=True)

    # ---- Comparisons ----

    def arith_cmpi(self, operation: Operation) -> None:
        """Comparison of integers; the predicate is the first word."""
        self._compare(operation)

    def arith_cmpf(self, operation: Operation) -> None:
        """Comparison of floats."""
        self._compare(operation)

    def _compare(self, operation: Operation) -> None:
        predicate = operation.words.partition(",")[0]
        function = f"{operation.name.replace('.', '_')}_{predicate}"
        self.elementwise(operation, function, [operation.types[0].of("i1")])

    def tt_fp_to_fp(self, operation: Operation) -> None:
        """Conversion between floats, to nearest even."""
        if "rtz" in operation.words:
            raise operation.unknown("rounding towards zero")
        self.elementwise(operation, "tt_fp_to_fp", operation.result_types)

    def tt_elementwise_inline_asm(self, operation: Operation) -> None:
        """Instructions: those that change no value."""
        if not operation.strings[0].startswith(SILENT_INSTRUCTIONS):
            raise operation.unknown("instructions")
        for name, kind in zip(operation.results, operation.result_types, strict=True):
            self.scope[name] = self.new(kind)
            self.assign(self.scope[name], "0")

    # ---- Shapes ----

    def _same_elements(self, operation: Operation) -> None:
        """The same elements in the same order, in another shape."""
        [value] = self.operands(operation)
        self.define(operation, Value(value.name, operation.types[-1], value.is_array))

    tt_splat = tt_expand_dims = tt_reshape = _same_elements

    def tt_unsplat(self, operation: Operation) -> None:
        """The one element of a tensor."""
        [value] = self.operands(operation)
        self.compute(operation, operation.types[-1], value.at("0"), is_array=False)

    def tt_broadcast(self, operation: Operation) -> None:
        """Dimensions of size 1 are repeated."""
        [value] = self.operands(operation)
        if not value.is_array:
            return self._same_elements(operation)
        kind = operation.types[-1]
        strides = [
            stride if size > 1 else 0
            for size, stride in zip(value.type.shape, _strides(value.type.shape), strict=True)
        ]
        self.compute(operation, kind, value.at(_index(kind.shape, strides)), is_array=True)

    def tt_trans(self, operation: Operation) -> None:
        """Dimensions in another order."""
        [value] = self.operands(operation)
        if not value.is_array:
            return self._same_elements(operation)
        kind = operation.types[-1]
        order = [int(each) for each in re.findall(r"\d+", operation.attributes["order"].partition(":")[2])]
        strides = _strides(value.type.shape)
        index = _index(kind.shape, [strides[dimension] for dimension in order])
        self.compute(operation, kind, value.at(index), is_array=True)

    def tt_join(self, operation: Operation) -> None:
        """Two tensors as a last dimension of 2."""
        first, second = self.operands(operation)
        expression = f"i % 2 ? {second.at('i / 2')} : {first.at('i / 2')}"
        self.compute(operation, operation.types[-1], expression, is_array=True)

    def tt_split(self, operation: Operation) -> None:
        """A last dimension of 2 as two tensors."""
        [value] = self.operands(operation)
        shape = value.type.shape[:-1] or None
        for number, name in enumerate(operation.results):
            self.scope[name] = self.storage(Type(value.type.element, shape))
            self.assign(self.scope[name], value.at(f"2 * i + {number}" if shape else str(number)))

    def tt_cat(self, operation: Operation) -> None:
        """Two tensors, one behind the other."""
        first, second = self.operands(operation)
        size = first.type.num_elements
        expression = f"i < {size} ? {first.at()} : {second.at(f'i - {size}')}"
        self.compute(operation, operation.types[-1], expression, is_array=True)

    def tt_gather(self, operation: Operation) -> None:
        """Elements of the first tensor by indices along an axis."""
        value, indices = self.operands(operation)
        axis = operation.integer("axis")
        strides = _strides(value.type.shape)
        along = f"{indices.at()} * {strides[axis]}"
        strides[axis] = 0
        expression = value.at(f"{_index(indices.type.shape, strides)} + {along}")
        self.compute(operation, indices.type.of(value.type.element), expression, is_array=True)

    # ---- Memory ----

    def tt_addptr(self, operation: Operation) -> None:
        """Pointers moved by elements; the type of the result stands first."""
        self.elementwise(operation, "tt_addptr", operation.types[:1])

    def access(self, operation: Operation, pointer: Value, mask: Value | None) -> str:
        """The condition that an element of ``pointer`` is accessed."""
        self.accesses.append(Access(operation.name, operation.line))
        element = pointer.type.pointee.element
        allowed = f"memory.allows({pointer.at()}, sizeof({element}), {len(self.accesses)}, at)"
        return f"{mask.at()} && {allowed}" if mask else allowed

    def tt_load(self, operation: Operation) -> None:
        """``load pointer[, mask[, other]]``."""
        pointer, *rest = self.operands(operation)
        mask = rest[0] if rest else None
        kind = pointer.type.pointee
        other = rest[1].at() if len(rest) > 1 else f"unset<{kind.element}>()"
        expression = f"{self.access(operation, pointer, mask)} ? *{pointer.at()} : {other}"
        self.compute(operation, kind, expression, any(each.is_array for each in (pointer, *rest)))

    def tt_store(self, operation: Operation) -> None:
        """``store pointer, value[, mask]``."""
        pointer, value, *rest = self.operands(operation)
        condition = self.access(operation, pointer, rest[0] if rest else None)
        if any(each.is_array for each in (pointer, value, *rest)):
            self.lines.append(f"for (int i = 0; i < {pointer.type.num_elements}; i++)")
        self.lines.append(f"if ({condition}) *{pointer.at()} = {value.at()};")

    def tt_atomic_rmw(self, operation: Operation) -> None:
        """``atomic_rmw add, acq_rel, gpu, pointer, value[, mask]``: gives what was there before."""
        pointer, given, *rest = self.operands(operation)
        function = f"atomic_{operation.words.partition(',')[0]}"
        if function not in elementwise_names():
            raise operation.unknown()
        condition = self.access(operation, pointer, rest[0] if rest else None)
        self._read_and_change(operation, pointer, condition, f"{function}(old, {given.at()})")

    def tt_atomic_cas(self, operation: Operation) -> None:
        """``atomic_cas acq_rel, gpu, pointer, expected, value``: gives what was there before."""
        pointer, expected, given = self.operands(operation)
        condition = self.access(operation, pointer, None)
        changed = f"old == {expected.at()} ? {given.at()} : old"
        self._read_and_change(operation, pointer, condition, changed)

    def _read_and_change(self, operation: Operation, pointer: Value, condition: str, changed: str) -> None:
        kind = pointer.type.pointee
        before = self.storage(kind)
        if kind.shape is not None:  # each element changes memory, equal ones too
            self.lines.append(f"for (int i = 0; i < {kind.num_elements}; i++)")
        self.lines.append(f"if ({condition}) {{")
        self.lines.append(f"{kind.element} old = *{pointer.at()};")
        self.lines.append(f"*{pointer.at()} = {changed};")
        self.lines.append(f"{before.at()} = old;")
        self.lines.append(f"}} else {before.at()} = unset<{kind.element}>();")
        self.define(operation, before)

    # ---- Products, reductions and scans ----

    def tt_dot(self, operation: Operation) -> None:
        """Product of matrices with a sum to begin with."""
        a, b, c = (self._as_array(value) for value in self.operands(operation))
        if a.type.element == "f32" and re.search(r"inputPrecision = tf32(?!x)", operation.words):
            raise operation.unknown("a product that rounds fp32 to tf32")
        kind = operation.types[-1]
        if len(kind.shape) != 2:
            raise operation.unknown("products of batches")
        result = self.new(kind, is_array=True)
        rows, inner = a.type.shape
        sizes = f"{rows}, {b.type.shape[1]}, {inner}"
        self.lines.append(f"tt_dot<{sizes}>({a.name}, {b.name}, {c.name}, {result.name});")
        self.define(operation, result)

    def _as_array(self, value: Value) -> Value:
        if value.is_array:
            return value
        array = self.new(value.type, is_array=True)
        self.assign(array, value.at())
        return array

    def tt_reduce(self, operation: Operation) -> None:
        """Elements along an axis combined by a region: neighbours, then pairs, then fours.

        So the rounding errors of a sum grow with the logarithm of its length, as they do on a GPU.
        """
        inputs = self.operands(operation)
        shape = inputs[0].type.shape
        axis = operation.integer("axis")
        num_along = shape[axis]
        results = [self.storage(Type(value.type.element, _without(shape, axis) or None)) for value in inputs]
        parts = [self.new(Type(value.type.element, (num_along,)), is_array=True) for value in inputs]
        left = [self.new(Type(value.type.element)) for value in inputs]
        right = [self.new(Type(value.type.element)) for value in inputs]

        # All elements of a line.
        self._begin_lines(shape, axis)
        self.lines.append(f"for (int along = 0; along < {num_along}; along++) {{")
        self.lines.append(f"const int from = (outer * {num_along} + along) * num_inner + inner;")
        self._put(parts, "along", [value.at("from") for value in inputs])
        self.lines.append("}")

        # Half of them are left after each round; an odd one waits for the next.
        self.lines += [
            f"for (int width = {num_along}; width > 1; width = (width + 1) / 2) {{",
            "for (int pair = 0; pair < width / 2; pair++) {",
        ]
        self._put(left, "", [part.at("2 * pair") for part in parts])
        self._put(right, "", [part.at("2 * pair + 1") for part in parts])
        self.bind(operation.regions[0], [*left, *right])
        self.region(operation.regions[0], lambda values: self.copy(left, values))
        self._put(parts, "pair", [value.name for value in left])
        self.lines.append("}")
        self.lines.append("if (width % 2) {")
        self._put(parts, "width / 2", [part.at("width - 1") for part in parts])
        self.lines += ["}", "}"]

        self._put(results, "outer * num_inner + inner", [part.at("0") for part in parts])
        self.lines += ["}", "}"]
        self.scope.update(zip(operation.results, results, strict=True))

    def tt_scan(self, operation: Operation) -> None:
        """Elements along an axis combined with all before them (behind them, if reversed)."""
        inputs = self.operands(operation)
        shape = inputs[0].type.shape
        axis = operation.integer("axis")
        num_along = shape[axis]
        results = [self.storage(value.type) for value in inputs]
        sums = [self.new(Type(value.type.element)) for value in inputs]
        elements = [self.new(Type(value.type.element)) for value in inputs]

        # The first element begins the sums.
        is_reversed = operation.attributes.get("reverse", "false") == "true"
        step = f"{num_along - 1} - along" if is_reversed else "along"
        self._begin_lines(shape, axis)
        self.lines.append(f"for (int along = 0; along < {num_along}; along++) {{")
        self.lines.append(f"const int from = (outer * {num_along} + {step}) * num_inner + inner;")
        self.lines.append("if (along == 0) {")
        self._put(sums, "", [value.at("from") for value in inputs])

        # The others are combined with them.
        self.lines.append("} else {")
        self._put(elements, "", [value.at("from") for value in inputs])
        self.bind(operation.regions[0], [*sums, *elements])
        self.region(operation.regions[0], lambda values: self.copy(sums, values))
        self.lines.append("}")
        self._put(results, "from", [value.name for value in sums])
        self.lines += ["}", "}", "}"]
        self.scope.update(zip(operation.results, results, strict=True))

    def _begin_lines(self, shape: tuple[int, ...], axis: int) -> None:
        """Begin loops over all lines along an axis: ``outer`` in front of it, ``inner`` behind it."""
        self.lines += [
            "{",
            f"const int num_inner = {Type('', shape[axis + 1 :]).num_elements};",
            f"for (int outer = 0; outer < {Type('', shape[:axis]).num_elements}; outer++)",
            "for (int inner = 0; inner < num_inner; inner++) {",
        ]

    def _put(self, targets: Sequence[Value], index: str, expressions: Sequence[str]) -> None:
        """Assign one element of each target."""
        for target, expression in zip(targets, expressions, strict=True):
            self.lines.append(f"{target.at(index)} = {expression};")

    # ---- Control flow ----

    def _yield(self, operation: Operation) -> None:
        """The end of a region, with what it gives."""
        assert self.yield_to is not None
        self.yield_to(self.operands(operation))

    scf_yield = scf_condition = tt_reduce_return = tt_scan_return = _yield

    def tt_return(self, operation: Operation) -> None:
        """The end of the program."""
        self.lines.append("return;")

    def cf_br(self, operation: Operation) -> None:
        """A jump to a block."""
        self._jump(operation.words)

    def cf_cond_br(self, operation: Operation) -> None:
        """``cond_br %condition, ^bb1(%x : i32), ^bb2``."""
        condition, yes, no = re.split(r", (?=\^)", operation.words)
        self.lines.append(f"if ({self.scope[condition].name}) {{")
        self._jump(yes)
        self.lines.append("} else {")
        self._jump(no)
        self.lines.append("}")

    def _jump(self, text: str) -> None:
        label, given = re.fullmatch(r"\^(\w+)(?:\((.*)\))?", text).groups()
        values = [self.scope[name] for name in re.findall(r"%[\w.$#-]+", given or "")]
        targets = [self.scope[name] for name, _ in self.labelled[label].arguments]
        self.copy(targets, values)
        self.lines.append(f"goto {label};")

    def scf_if(self, operation: Operation) -> None:
        """Two regions, or one."""
        [condition] = self.operands(operation)
        results = [self.storage(kind) for kind in operation.result_types]
        for number, region in enumerate(operation.regions):
            self.lines.append("} else {" if number else f"if ({condition.name}) {{")
            self.region(region, lambda values: self.copy(results, values))
        self.lines.append("}")
        self.scope.update(zip(operation.results, results, strict=True))

    def scf_for(self, operation: Operation) -> None:
        """``for %i = %start to %stop step %step iter_args(%carried = %first, ...)``."""
        if "unsigned" in operation.words:
            raise operation.unknown("a loop over unsigned numbers")
        index, start, stop, step, *pairs = operation.operands
        carried = [self.storage(kind) for kind in operation.result_types]
        self.copy(carried, [self.scope[name] for name in pairs[1::2]])

        # The region's arguments are named in the first line.
        outer_scope = dict(self.scope)
        variable = self.new(self.scope[start].type)
        self.scope[index] = variable
        self.scope.update(zip(pairs[::2], carried, strict=True))
        name = variable.name
        first, end, by = (self.scope[each].name for each in (start, stop, step))
        self.lines.append(f"for ({name} = {first}; {name} < {end}; {name} += {by}) {{")
        self.region(operation.regions[0], lambda values: self.copy(carried, values))
        self.lines.append("}")
        self.scope = outer_scope
        self.scope.update(zip(operation.results, carried, strict=True))

    def scf_while(self, operation: Operation) -> None:
        """``while (%a = %first, ...)``: one region up to the condition, and one behind it."""
        self._refuse_waiting(operation)
        before, after = operation.regions
        first = [self.scope[name] for name in operation.operands[1::2]]
        carried = [self.storage(value.type) for value in first]
        results = [self.storage(kind) for kind in operation.result_types]
        self.copy(carried, first)

        # Up to the condition, which hands values to the results and the second region.
        outer_scope = dict(self.scope)
        self.scope.update(zip(operation.operands[::2], carried, strict=True))
        self.lines.append("while (true) {")
        self.region(before, lambda values: self._go_on_while(values[0], results, values[1:]))

        # The second region, whose values are carried to the first.
        self.bind(after, results)
        self.region(after, lambda values: self.copy(carried, values))
        self.lines.append("}")
        self.scope = outer_scope
        self.scope.update(zip(operation.results, results, strict=True))

    def _go_on_while(self, condition: Value, results: list[Value], values: list[Value]) -> None:
        self.copy(results, values)
        self.lines.append(f"if (!{condition.name}) break;")

    def _refuse_waiting(self, operation: Operation) -> None:
        """A loop whose condition comes from memory that other programs write would never end here."""
        for inner in operation.walk():
            if inner.name.startswith("tt.atomic") or inner.attributes.get("isVolatile") == "true":
                raise inner.unknown("a loop that waits for other programs of the grid")


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _strides(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous shape."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= size
    return strides


def _index(shape: Sequence[int], strides: Sequence[int]) -> str:
    """The index, by strides, of the element whose flat index into ``shape`` is ``i``."""
    terms = []
    for size, inner, stride in zip(shape, _strides(shape), strides, strict=True):
        if stride and size > 1:
            terms.append(f"i / {inner} % {size} * {stride}")
    return " + ".join(terms) or "0"


def _literal(operation: Operation, text: str, element: str) -> str:
    """A literal of MLIR in C++: ``true``, ``-3``, ``2.5e+00``, or the bits of a float ``0x7F80``."""
    if text in ("true", "false"):
        return text
    if element in ("i1", "i8", "i16", "i32", "i64"):
        if re.fullmatch(r"-?\d+", text) is None:
            raise operation.unknown("a constant of several values")
        return f"({element}){int(text) % 2**64:#x}ull"
    if text.startswith("0x"):
        bits = {2: "uint8_t", 4: "uint16_t", 8: "uint32_t", 16: "uint64_t"}[len(text) - 2]
        return f"bits_as<{element}>(({bits}){text})"
    if re.fullmatch(r"-?\d+\.\d+(?:[eE][+-]?\d+)?", text) is None:
        raise operation.unknown("a constant of several values")
    return text if element == "f64" else f"({element}){text}f"


__all__ = ["Access", "Translation", "UnknownOperation", "translate"]
