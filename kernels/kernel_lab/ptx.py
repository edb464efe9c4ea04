"""Reading PTX: what the loops of a compiled kernel load, and how."""

import re
from typing import NamedTuple

_LABEL = re.compile(r"^\s*(\$?\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$?\w+);")
_LOAD = re.compile(r"\bld\.global(?!\.nc\.L2::prefetch)[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+)\b")
_COPY = re.compile(
    r"\bcp\.async\.c[ag]\.shared\.global[.\w:]*\s*\[[^\]]*\],\s*\[[^\]]*\],\s*(0x[0-9a-fA-F]+|\d+)"
)
_BULK = re.compile(r"\bcp\.async\.bulk\b")
_PRODUCT = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")
WIDE = 16
"""Bytes that a thread loads with one wide instruction."""


class Loop(NamedTuple):
    """Loads of one turn of a loop that holds no other.

    Attributes:
        bytes: of global memory that a thread loads.
        wide_bytes: those by instructions of 16 bytes, or by TMA.
        is_asynchronous: whether ``cp.async`` or TMA load any.
        multiplies: whether matrix instructions are in it.
    """

    bytes: int
    wide_bytes: int
    is_asynchronous: bool
    multiplies: bool

    @property
    def is_narrow(self) -> bool:
        """True if more than half of the bytes are loaded by narrow instructions."""
        return 2 * self.wide_bytes < self.bytes


def innermost_loops(ptx: str) -> list[Loop]:
    """Loops without another inside, in the order of the text. A loop is what lies between a label and a
    branch back to it."""
    lines = ptx.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := _LABEL.match(line))}
    spans = [
        (labels[target], i)
        for i, line in enumerate(lines)
        for target in _BRANCH.findall(line)
        if labels.get(target, i) < i
    ]
    inner = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
    return [_read("\n".join(lines[a:b])) for a, b in inner]


def _read(text: str) -> Loop:
    widths = [int(count or 1) * int(bits) // 8 for count, bits in _LOAD.findall(text)]
    copies = [int(size, 0) for size in _COPY.findall(text)]
    bulks = len(_BULK.findall(text))
    every = [*widths, *copies]
    return Loop(
        sum(every) + WIDE * bulks,
        sum(width for width in every if width >= WIDE) + WIDE * bulks,
        bool(copies or bulks),
        _PRODUCT.search(text) is not None,
    )


_JUMP = re.compile(r"^\s*(@!?%\w+\s+)?bra(?:\.uni)?\s+(\$?\w+);")
_END = re.compile(r"^\s*(@!?%\w+\s+)?(ret|exit);")
_ACCESS = re.compile(r"\b(?:ld|st|atom|red|cp|multimem|ldu)\.(?!param|shared|local|const)[.\w:]+")
WAIT = "griddepcontrol.wait"
START = "griddepcontrol.launch_dependents"


def waits_first(ptx: str) -> bool:
    """Return whether a kernel waits for the launch before it on every way from its entry, before it ends and
    before it reads, writes or copies global memory; prefetches do neither."""
    lines = ptx[ptx.index("\n{", ptx.index(".entry ")) :].splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := _LABEL.match(line))}
    ways, seen = [0], set[int]()
    while ways:
        i = ways.pop()
        if i in seen:
            continue
        seen.add(i)
        line = lines[i].split("//")[0]
        if WAIT in line:
            continue
        if _END.match(line) or _ACCESS.search(line) or i + 1 == len(lines):
            return False
        jump = _JUMP.match(line)
        if not jump or jump[1]:
            ways.append(i + 1)
        if jump:
            ways.append(labels[jump[2]])
    return True


def allocates_first(ptx: str) -> bool:
    """Return whether a kernel takes tensor memory (of B200) only before it lets the next launch start, in the
    order of the text. Programs of two launches that hold a part of it each could wait for one another for
    ever."""
    start = ptx.find(START)
    return start < 0 or "tcgen05.alloc" not in ptx[start:]


def hot_loops(ptx: str) -> list[Loop]:
    """Innermost loops that load: those that multiply too where there are any, and of these the pipelined
    ones, since ends of ranges have loops of their own."""
    loops = [loop for loop in innermost_loops(ptx) if loop.bytes]
    loops = [loop for loop in loops if loop.multiplies] or loops
    return [loop for loop in loops if loop.is_asynchronous] or loops
