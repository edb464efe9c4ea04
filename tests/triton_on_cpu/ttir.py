"""Reader of Triton's intermediate code (TTIR): the text of a module as a tree of operations.

TTIR is what Triton's front end makes of a kernel, before anything is known of threads. Each operation of
MLIR prints itself in a form of its own. What is common to these forms is read here, the rest is kept as text.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

SSA_NAME = re.compile(r"%[\w.$-]+(?:#\d+)?")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_TYPE = re.compile(r"tensor<(?:\d+x)*(?:!tt\.ptr<[^>]+>|\w+)>|!tt\.ptr<[^>]+>|[a-z]\w*")
_ATTRIBUTES = re.compile(r"<?\{([^{}]*)\}>?")
_HEAD = re.compile(r'(?:(%[^=]+?) = )?"?([a-z]\w*(?:\.\w+)+)"?(.*)$')


class UnknownOperation(NotImplementedError):
    """An operation, or a form of one, that has no translation; the message is its text."""


@dataclass(frozen=True)
class Type:
    """Type of a value: ``element`` is ``"f32"``, or ``"f32*"`` for pointers; a scalar has no ``shape``."""

    element: str
    shape: tuple[int, ...] | None = None

    @property
    def num_elements(self) -> int:
        """1 for a scalar."""
        return math.prod(self.shape or ())

    @property
    def pointee(self) -> "Type":
        """What pointers of this type point to."""
        assert self.element.endswith("*"), self
        return Type(self.element.removesuffix("*"), self.shape)

    def of(self, element: str) -> "Type":
        """The same shape of other elements."""
        return Type(element, self.shape)


@dataclass
class Block:
    """Operations in a row; ``arguments`` are given by whoever jumps here."""

    label: str
    arguments: list[tuple[str, Type]] = field(default_factory=list)
    operations: list["Operation"] = field(default_factory=list)


@dataclass
class Operation:
    """An operation.

    Attributes:
        name: with its dialect, such as ``"arith.addi"``.
        results: names of its results.
        operands: names of its operands, in the order of the text.
        types: all types behind its last colon, in the order of the text; results come last.
        words: what the text says besides: predicates, labels of blocks, options.
        attributes: by name, as text.
        strings: string literals, without their quotation marks.
        regions: code that belongs to it: bodies of loops, branches, functions that combine.
        text: its first line.
        line: where it stands in a Python file, ``"file.py:12"``; empty if that is not known.
    """

    name: str
    results: list[str]
    operands: list[str]
    types: list[Type]
    words: str
    attributes: dict[str, str]
    strings: list[str]
    text: str
    line: str = ""
    regions: list[list[Block]] = field(default_factory=list)

    def unknown(self, why: str = "no translation") -> UnknownOperation:
        """The error that there is no translation of this operation, or of this form of it."""
        return UnknownOperation(f"{self.name}: {why}: {self.text} at {self.line or 'an unknown line'}")

    @property
    def result_types(self) -> list[Type]:
        """Types of the results; of a comparison or a load it is not what the text says last."""
        return self.types[len(self.types) - len(self.results) :]

    def integer(self, name: str) -> int:
        """An attribute such as ``axis = 0 : i32``."""
        return int(self.attributes[name].partition(" : ")[0])

    def walk(self) -> Iterator["Operation"]:
        """Iterate over this operation and all within."""
        yield self
        for region in self.regions:
            for block in region:
                for operation in block.operations:
                    yield from operation.walk()


@dataclass
class Function:
    """A kernel: its name, its parameters and its blocks."""

    name: str
    parameters: list[tuple[str, Type]]
    blocks: list[Block]

    def walk(self) -> Iterator[Operation]:
        """Iterate over all operations."""
        for block in self.blocks:
            for operation in block.operations:
                yield from operation.walk()


def read_module(text: str) -> Function:
    """Read the kernel of a module, which is its only function once all others are inlined.

    Args:
        text: of the module, with or without locations: ``compiled.asm["ttir"]``.

    Raises:
        UnknownOperation: there are functions that are not inlined.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    locations = _Locations([line for line in lines if line.startswith("#loc")])
    lines = [line for line in lines if not line.startswith("#")]

    # One function.
    functions = [number for number, line in enumerate(lines) if line.startswith("tt.func")]
    if len(functions) != 1:
        raise UnknownOperation(f"tt.call: functions that are not inlined: {lines[functions[1]]}")
    head, _ = _split_location(lines[functions[0]])
    found = re.match(r"tt\.func public @([\w.$]+)\((.*)\)", head)
    if found is None:
        raise UnknownOperation(head)
    name, parameters = found.groups()

    # Its blocks.
    blocks, _ = _Reader(lines, functions[0] + 1, locations).region()
    return Function(name, _named_types(parameters), blocks)


class _Locations:
    """Table of source locations at the end of a module: ``#loc9 = loc("file.py":12:4)``."""

    def __init__(self, lines: list[str]) -> None:
        self.texts = dict(line.split(" = ", 1) for line in lines)

    def line(self, text: str) -> str:
        """File and line of ``loc(...)``: of a call site it is the innermost function's."""
        for _ in range(20):
            place = re.search(r'"([^"]+)":(\d+):\d+', text)
            if place:
                return f"{place[1]}:{place[2]}"
            reference = re.search(r"#loc\d*", text)
            if reference is None or reference[0] not in self.texts:
                break
            text = self.texts[reference[0]]
        return ""


def _split_location(line: str) -> tuple[str, str]:
    """A line without locations, and the last of them, which is that of the operation."""
    last = ""
    while (first := line.find(" loc(")) >= 0:
        depth = 0
        for end in range(first + 4, len(line)):
            depth += {"(": 1, ")": -1}.get(line[end], 0)
            if depth == 0:
                break
        last = line[first + 1 : end + 1]
        line = line[:first] + line[end + 1 :]
    return line, last


class _Reader:
    """Position in the lines of a module."""

    def __init__(self, lines: list[str], at: int, locations: _Locations) -> None:
        self.lines = lines
        self.at = at
        self.locations = locations

    def next(self) -> tuple[str, str]:
        """The next line, without its location and comment, and the location."""
        self.at += 1
        line, location = _split_location(self.lines[self.at - 1])
        if "//" in _STRING.sub("", line):
            line = line.rpartition("//")[0]
        return line.strip(), location

    def region(self) -> tuple[list[Block], tuple[str, str]]:
        """Read blocks up to the line that closes them; also returns that line."""
        blocks = [Block("entry")]
        while not (closing := self.next())[0].startswith("}"):
            line, location = closing
            found = re.match(r"\^(\w+)(?:\((.*)\))?:", line)
            if found is None:
                blocks[-1].operations.append(self.operation(line, location))
                continue
            block = Block(found[1], _named_types(found[2] or ""))
            if blocks[-1].operations:
                blocks.append(block)
            else:  # a region that begins with the names of its arguments
                blocks[-1] = block
        return blocks, closing

    def operation(self, line: str, location: str) -> Operation:
        """Read an operation that begins with ``line``, and its regions."""
        regions = []
        opening = line
        closing = (line, location)
        while closing[0].endswith("{"):
            blocks, closing = self.region()
            regions.append(blocks)

        # The types of generic forms stand behind the regions.
        text, location = closing
        tail = text.removeprefix("})") if text.startswith("})") else ""
        operation = _parsed(opening.rstrip("({ ") + tail if regions else line, opening)
        operation.regions = regions
        operation.line = self.locations.line(location)
        return operation


def _parsed(line: str, text: str) -> Operation:
    matched = _HEAD.match(line)
    if matched is None:
        raise UnknownOperation(text)
    results, name, rest = matched.groups()

    # Literals and attributes first, since they may contain anything.
    strings = _STRING.findall(rest)
    rest = _STRING.sub("", rest)
    attributes = {}
    for found in _ATTRIBUTES.findall(rest):
        for entry in re.split(r", (?=[A-Za-z_]\w*(?: =|,|$))", found):
            key, _, value = entry.partition(" = ")
            attributes[key] = value
    rest = _ATTRIBUTES.sub("", rest)

    # What is left are words and names of operands, a colon, and types.
    words, types = _split_types(rest, name)
    return Operation(
        name=name,
        results=_result_names(results),
        operands=SSA_NAME.findall(words),
        types=types,
        words=words.strip(),
        attributes=attributes,
        strings=strings,
        text=text,
    )


def _split_types(rest: str, name: str) -> tuple[str, list[Type]]:
    if name.startswith("cf."):  # types stand within the lists of what a block is given
        return rest, []
    if name == "scf.for":  # ... iter_args(...) -> (f32, i32)  : i32
        words, _, variable = rest.rpartition(" : ")
        words, _, results = words.partition(" -> ")
        return words, [read_type(variable), *read_types(results)]
    if name == "scf.if":
        words, _, results = rest.partition(" -> ")
        return words, read_types(results)
    words, colon, types = rest.rpartition(" : ")
    if colon:
        return words, read_types(types)
    words, arrow, types = rest.rpartition(" -> ")
    return (words, read_types(types)) if arrow else (rest, [])


def _result_names(text: str | None) -> list[str]:
    names = []
    for each in (text or "").split(", "):
        name, _, number = each.partition(":")
        if number:
            names += [f"{name}#{i}" for i in range(int(number))]
        elif name:
            names.append(name)
    return names


def _named_types(text: str) -> list[tuple[str, Type]]:
    """Read ``%x: !tt.ptr<f32> {tt.divisibility = 16 : i32}, %n: i32``."""
    text = re.sub(r" \{[^{}]*\}", "", text)
    return [(name, read_type(kind)) for name, kind in re.findall(r"(%[\w.$-]+): (.+?)(?=, %|$)", text)]


def read_types(text: str) -> list[Type]:
    """Read all types in a text: ``tensor<4xf32>, (i32) -> i1``."""
    return [read_type(each) for each in _TYPE.findall(text.replace(" to ", " -> "))]


def read_type(text: str) -> Type:
    """Read ``tensor<16x8x!tt.ptr<f32>>`` as elements ``f32*`` of shape (16, 8)."""
    tensor = re.fullmatch(r"tensor<((?:\d+x)*)(.+)>", text.strip())
    if tensor is None:
        return Type(_element(text.strip()))
    sizes, element = tensor.groups()
    return Type(_element(element), tuple(int(size) for size in sizes.split("x") if size))


def _element(text: str) -> str:
    pointer = re.fullmatch(r"!tt\.ptr<(.+?)(?:, \d+)?>", text)
    return f"{_element(pointer[1])}*" if pointer else text
